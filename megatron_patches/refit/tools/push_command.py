"""``python -m megatron_patches.refit push``: a checkpoint's weights into running vLLM servers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager

from megatron_patches.refit.checkpoints import checkpoint_model
from megatron_patches.refit.checkpoints.checkpoint_model import CheckpointModel
from megatron_patches.refit.command import is_first, run_together
from megatron_patches.refit.control.exchange import default_exchange, on_first
from megatron_patches.refit.control.messages import LONGEST_TIMEOUT_S
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.trainer import push_flags
from megatron_patches.refit.trainer.engines import http_engines
from megatron_patches.refit.trainer.session import PushReport, RefitSession

_UP_S = 60.0  # for a server to say that it takes weights, however busy


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``push``."""
    push = commands.add_parser(
        "push",
        help="stream a Megatron checkpoint into running vLLM servers",
        description="Streams the weights of a Megatron checkpoint (torch_dist) into vLLM servers that were started "
        "with the weight-transfer backend 'etp'. Alone, one process holds the model; under torchrun it is sharded as "
        "asked. If anything fails, the servers go on with the weights that they had.",
    )
    add_push_options(push, "pushing")


def add_push_options(parser: argparse.ArgumentParser, while_doing: str) -> None:
    """Adds the options that say which checkpoint to push, to which servers, and how.

    Args:
        parser: parser of the command.
        while_doing: "pushing", for the help.
    """
    checkpoint_model.add_checkpoint_options(parser, while_doing)
    parser.add_argument("--engines", nargs="+", required=True, metavar="URL", help="base URLs of the servers")
    parser.add_argument("--version", type=int, help="number of the weights; the checkpoint's iteration by default")
    push_flags.add_flags(parser)


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    return run_together(lambda progress: _push(options, progress), (RefitError, ValueError))


def _push(options: argparse.Namespace, progress: Progress) -> str:
    """Does what the command line says. Returns what serves, in words."""
    with session_of(options, progress) as (session, found):
        report = prepare_and_push(session, found, options, progress)
    seconds = ", ".join(f"{name} {value:.3f} s" for name, value in report.seconds.items())
    return (
        f"version {report.version} serves on {len(options.engines)} engine(s): {report.nbytes / 1e6:.2f} MB ({seconds})"
    )


@contextmanager
def session_of(options: argparse.Namespace, progress: Progress) -> Iterator[tuple[RefitSession, CheckpointModel]]:
    """A session that the options describe, and the checkpoint's model. Collective.

    The servers are asked whether they take weights before the model is loaded, which may take minutes.

    Args:
        options: of :func:`add_push_options`.
        progress: receives the phases of loading.

    Raises:
        RefitError: if a server takes no weights, or the checkpoint cannot be loaded.
        ValueError: if an option is out of range.
    """
    timeout_s = options.timeout_minutes * 60
    if timeout_s > LONGEST_TIMEOUT_S:
        raise ValueError(
            f"--timeout-minutes is {options.timeout_minutes:g}; give a push at most {LONGEST_TIMEOUT_S / 60:g}"
        )
    settings = push_flags.options_from(options, timeout_s)
    if options.version is not None and options.version < 0:
        raise ValueError(f"--version is {options.version}; it must be at least 0")
    credentials = push_flags.credentials_from(options)
    engines = http_engines(options.engines, timeout_s, credentials)
    impatient = http_engines(options.engines, min(timeout_s, _UP_S), credentials)

    def ask(_vocab_size: int) -> None:
        on_first(default_exchange(), lambda: [engine.world_size() for engine in impatient])

    with checkpoint_model.loaded(options, progress, ask) as found:
        engines = engines if is_first() else []
        with closing(RefitSession(found.chunks, engines, vocab_size=found.vocab_size, options=settings)) as session:
            yield session, found


def prepare_and_push(
    session: RefitSession, found: CheckpointModel, options: argparse.Namespace, progress: Progress
) -> PushReport:
    """Connects to the servers, and pushes the checkpoint's model to them."""
    progress.phase("connect", 0)
    session.prepare()
    progress.phase("push", 0)
    return session.push(max(found.iteration, 1) if options.version is None else options.version)
