"""Pushes the weights of a Megatron training run into running engines, from inside the training loop.

With ``--refit-engines`` every Megatron script pushes after every ``--refit-interval`` steps; a run that continues from
a checkpoint also pushes what it has loaded, before its first step. The version that engines get is the number of
steps that the weights have seen.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.refit.engines import HttpEngine, PauseMode
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.session import PushReport, RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.registry import PatchRecord

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to ``parser`` and return it."""
    defaults = RefitOptions()
    group = parser.add_argument_group(
        title="refit", description="Streams the weights into running vLLM servers while training goes on."
    )
    group.add_argument(
        "--refit-engines",
        nargs="+",
        default=[],
        metavar="URL",
        help="Base URLs of vLLM servers that were started with the weight-transfer backend 'etp'. Default: none.",
    )
    group.add_argument(
        "--refit-interval",
        type=int,
        default=1,
        metavar="N",
        help="Push after every N steps. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-transport",
        choices=[name.value for name in TransportName],
        default=defaults.transport.value,
        help="How weights travel: shm is shared memory on one host, the others reach everywhere. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-staging-bytes",
        type=int,
        default=defaults.staging_bytes,
        metavar="BYTES",
        help="The most memory that packets take in one process, on either side. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-timeout",
        type=float,
        default=defaults.timeout_s,
        metavar="SECONDS",
        help="End a push with an error if a trainer rank or an engine worker lags this far behind the first to finish "
        "a step of it. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-pause",
        choices=[mode.value for mode in PauseMode],
        default=defaults.pause.value,
        help="What becomes of requests under way when new weights take effect: wait lets them end first, abort ends "
        "them, keep lets them go on with the new weights. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-memory",
        choices=[mode.value for mode in MemoryMode],
        default=defaults.memory.value,
        help="Where engines receive new weights: beside those that serve, which takes memory for a second copy, or "
        "in_place, which pauses the engines from before the first byte. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-host",
        default=defaults.host,
        metavar="ADDRESS",
        help="Address of this run's first machine that engines reach. Default: %(default)s.",
    )
    group.add_argument(
        "--refit-allow-narrowing",
        action="store_true",
        help="Push also where an engine keeps a weight in a narrower type than this run, and rounds it.",
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse settings with which no push could work.

    Raises:
        UnsupportedConfigurationError: naming the flag.
    """
    if not args.refit_engines:
        return
    if args.refit_interval < 1:
        raise UnsupportedConfigurationError(f"--refit-interval is {args.refit_interval}; it must be at least 1")
    try:
        options_from_args(args)
        for url in args.refit_engines:
            HttpEngine(url)
    except ValueError as error:
        raise UnsupportedConfigurationError(f"--refit-engines: {error}") from error


def options_from_args(args: argparse.Namespace) -> RefitOptions:
    """The options of the session.

    Raises:
        ValueError: on a value out of range.
    """
    return RefitOptions(
        transport=TransportName(args.refit_transport),
        staging_bytes=args.refit_staging_bytes,
        timeout_s=args.refit_timeout,
        pause=PauseMode(args.refit_pause),
        memory=MemoryMode(args.refit_memory),
        host=args.refit_host,
        allow_narrowing=args.refit_allow_narrowing,
    )


class Pusher:
    """Pushes one training run's weights; does nothing without ``--refit-engines``."""

    def __init__(self) -> None:
        self._session: RefitSession | None = None

    def before_step(self, model: Sequence[Any], iteration: int) -> None:
        """Meet the engines before the first step, and push weights that were loaded."""
        args = _args()
        if not args.refit_engines or self._session is not None:
            return
        self._session = self._open(args, model)
        if iteration > 0:
            self._push(iteration)

    def after_step(self, iteration: int) -> None:
        """Push where the interval says so. ``iteration`` counts the steps made."""
        if self._session is not None and iteration % _args().refit_interval == 0:
            self._push(iteration)

    def finish(self) -> None:
        """Wait for the last commit, and leave the engines."""
        session, self._session = self._session, None
        if session is not None:
            session.wait()
            session.close()

    def _open(self, args: argparse.Namespace, model: Sequence[Any]) -> RefitSession:
        import torch.distributed as dist

        from megatron_patches.refit.megatron_checkpoint import vocabulary_of

        engines = [HttpEngine(url, args.refit_timeout) for url in args.refit_engines] if dist.get_rank() == 0 else []
        session = RefitSession(model, engines, vocab_size=vocabulary_of(args), options=options_from_args(args))
        digest = session.prepare()
        _print(f"refit: {len(args.refit_engines)} engine(s) follow plan {digest[:12]}")
        return session

    def _push(self, iteration: int) -> None:
        if self._session is None:
            return
        report = self._session.push(iteration, wait=False)
        _print(_line(report))


def _line(report: PushReport) -> str:
    seconds = report.seconds["send"]
    rate = report.nbytes / 1e6 / seconds if seconds else 0.0
    return f"refit: version {report.version} sent, {report.nbytes / 1e6:.2f} MB in {seconds:.3f} s ({rate:.0f} MB/s)"


def _args() -> argparse.Namespace:
    from megatron.training.global_vars import get_args

    args: argparse.Namespace = get_args()
    return args


def _print(text: str) -> None:
    """On the rank whose output Megatron's own progress goes to."""
    from megatron.training.utils import print_rank_last

    print_rank_last(text)


def records(pusher: Pusher | None = None) -> tuple[PatchRecord, ...]:
    """The replacements in Megatron's training loop.

    Args:
        pusher: what pushes; a new one by default.
    """
    pushing = pusher or Pusher()

    def around_step(train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def replacement(step: Any, data: Any, model: Sequence[Any], *rest: Any, **kwargs: Any) -> Any:
            iteration = int(_args().curr_iteration)
            pushing.before_step(model, iteration)
            result = train_step(step, data, model, *rest, **kwargs)
            pushing.after_step(iteration + 1)
            return result

        return replacement

    def around_training(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = train(*args, **kwargs)
            pushing.finish()
            return result

        return replacement

    module = "megatron.training.training"
    reason = "pushes weights into engines between steps"
    return (
        PatchRecord(target=f"{module}:train_step", replace=around_step, reason=reason, sha256="275be60d0831f482"),
        PatchRecord(target=f"{module}:train", replace=around_training, reason=reason, sha256="e94d5fc0508fd2fa"),
    )
