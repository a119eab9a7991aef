"""Pushes the weights of a Megatron training run into running engines, from inside the training loop.

With ``--refit-engines`` every Megatron script pushes after every ``--refit-interval`` steps. A run that loads a
checkpoint, to resume, to start from its weights, or with ``--load-hf``, also pushes the loaded weights before its first
step. A version is the number of steps of the run that the weights have been trained for.
"""

from __future__ import annotations

import argparse
import functools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_patches import last_line
from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.refit.command import fail
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.source.gemm_scales import why_other_scales
from megatron_patches.refit.trainer import push_flags
from megatron_patches.refit.trainer.engines import http_engines
from megatron_patches.refit.trainer.session import (
    EngineReport,
    Fate,
    OnEngineFailure,
    PushReport,
    RefitOptions,
    RefitSession,
)
from megatron_patches.refit.trainer.telemetry import Telemetry, address_from
from megatron_patches.registry import PatchRecord

logger = logging.getLogger(__name__)

_PREFIX = "refit-"
_TAKE_PART = {Fate.SENT, Fate.TAKES, Fate.SERVES}
_ON_FAILURE = {"continue": OnEngineFailure.DROP, "stop": OnEngineFailure.RAISE}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to ``parser`` and return it."""
    group = parser.add_argument_group(
        title="refit", description="Streams the weights into running vLLM servers while training goes on."
    )
    group.add_argument(
        "--refit-engines",
        nargs="+",
        default=[],
        metavar="URL",
        help="base URLs of vLLM servers that were started with the weight-transfer backend 'etp'; none by default",
    )
    group.add_argument(
        "--refit-interval",
        type=int,
        default=1,
        metavar="N",
        help="push after every N steps; %(default)s by default",
    )
    group.add_argument(
        "--refit-timeout",
        type=float,
        default=RefitOptions().timeout_s,
        metavar="SECONDS",
        help="how long a push waits for other trainer ranks and engine workers after the first one has finished a "
        "step; an engine that takes longer has failed, see --refit-on-failure; %(default)s by default",
    )
    group.add_argument(
        "--refit-on-failure",
        choices=list(_ON_FAILURE),
        default="continue",
        help="what to do when an engine fails: continue keeps training, pushes to the others, and takes it back when "
        "it answers again; stop ends the run after this step, with a checkpoint if --save is given; %(default)s by "
        "default",
    )
    group.add_argument(
        "--refit-lag",
        type=float,
        default=RefitOptions().lag_s,
        metavar="SECONDS",
        help="with --refit-on-failure continue, how long a push waits for an engine that is still committing "
        "the version before; then that engine misses the version; %(default)s by default",
    )
    group.add_argument(
        "--refit-fan-out",
        action="store_true",
        help="let an engine that starts late, comes back or missed a version take the current one from engines that "
        "serve it; without the flag, it waits for the next push. Engines then connect to each other",
    )
    group.add_argument(
        "--refit-fan-out-width",
        type=int,
        metavar="N",
        help="with --refit-fan-out, send each version to N engines, from which the others take it, in waves; without "
        "it, the trainer sends to all",
    )
    group.add_argument(
        "--refit-wait",
        action="store_true",
        help="start the next step only when all engines serve the weights of this one; without it, they commit during "
        "the next step, and answer with the previous version until then",
    )
    group.add_argument(
        "--refit-telemetry",
        type=Path,
        metavar="FILE",
        help="append what each version cost at each engine to this file, as one JSON object a line; none by default",
    )
    group.add_argument(
        "--refit-metrics-port",
        metavar="[ADDRESS:]PORT",
        help="serve the same to Prometheus, at 127.0.0.1 unless an address is given; needs the package "
        "prometheus_client; not served by default",
    )
    push_flags.add_flags(group, _PREFIX)
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse settings with which no push can succeed.

    Raises:
        UnsupportedConfigurationError: naming the flag.
    """
    if args.refit_interval < 1:
        raise UnsupportedConfigurationError(f"--refit-interval is {args.refit_interval}; it must be at least 1")
    try:
        options = options_from_args(args)
    except ValueError as error:
        raise UnsupportedConfigurationError(str(error)) from error
    if why := why_other_scales(args, options.weight_format, "--refit-weight-format"):
        raise UnsupportedConfigurationError(why)
    if getattr(args, "rank", 0) == 0:  # addresses and the file are of the first rank's machine
        try:
            telemetry_from_args(args).close()
        except (RefitError, ValueError) as error:
            raise UnsupportedConfigurationError(str(error)) from error
        try:
            family = socket.getaddrinfo(options.host, 0, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((options.host, 0), family=family).close()
        except OSError as error:
            raise UnsupportedConfigurationError(
                f"--refit-host is {options.host}, on which this machine cannot listen ({error.strerror or error}); it "
                "must be the address of the first rank's machine at which engines reach it"
            ) from error
    if not args.refit_engines:
        return
    steps = getattr(args, "train_iters", None)
    if steps and args.refit_interval > steps and not args.load:
        raise UnsupportedConfigurationError(
            f"--refit-interval is {args.refit_interval}, of --train-iters {steps}: no step would be pushed"
        )
    try:
        http_engines(args.refit_engines, args.refit_timeout)
    except ValueError as error:
        raise UnsupportedConfigurationError(f"--refit-engines: {error}") from error


def options_from_args(args: argparse.Namespace) -> RefitOptions:
    """The options of the session.

    Raises:
        ValueError: on a value out of range.
    """
    more = {
        "on_engine_failure": ("on-failure", _ON_FAILURE[args.refit_on_failure]),
        "lag_s": ("lag", args.refit_lag),
        "fan_out": ("fan-out", args.refit_fan_out),
        "fan_out_width": ("fan-out-width", args.refit_fan_out_width),
    }
    return push_flags.options_from(args, args.refit_timeout, _PREFIX, more=more)


def telemetry_from_args(args: argparse.Namespace) -> Telemetry:
    """The telemetry that records what each version cost, for the first rank.

    Raises:
        ValueError: if the address of the metrics is invalid.
        RefitError: if the file or the port cannot be opened.
    """
    port = args.refit_metrics_port
    try:
        address = None if port is None else address_from(port)
    except ValueError as error:
        raise ValueError(f"--refit-metrics-port: {error}") from error
    return Telemetry(args.refit_telemetry, address)


class Pusher:
    """Pushes the weights of one training run; does nothing without ``--refit-engines``.

    Attributes:
        stopped: whether the run must end because an engine failed.
    """

    def __init__(self) -> None:
        self._session: RefitSession | None = None
        self._telemetry: Telemetry | None = None
        self._alone = False  # whether no engine is left and this was printed
        self._lost = set[str]()  # engines printed as failed and not yet as back
        self.stopped = False

    def before_step(self, model: Sequence[Any], iteration: int) -> None:
        """Connect to the engines before the first step, and push loaded weights."""
        args = _args()
        if not args.refit_engines or self._session is not None:
            return
        try:
            self._session = self._open(args, model)
            if iteration > 0 or args.finetune or args.load_hf is not None or _has_loaded(args):
                self._push(iteration)
        except RefitError as error:  # no step was taken, so nothing is lost
            end_with(error)

    def after_step(self, iteration: int) -> None:
        """Push if the interval is due. ``iteration`` is the number of completed steps.

        If the run must stop, Megatron saves a checkpoint of this step and leaves its training loop.
        """
        if self._session is None or iteration % _args().refit_interval != 0:
            return
        try:
            self._push(iteration)
        except PartyFailedError as error:
            self._stop(error)
            _args().exit_interval = 1

    def finish(self) -> None:
        """Wait for the last commit and disconnect from the engines; the run is already complete."""
        session, self._session = self._session, None
        if session is not None:
            try:
                for name, report in session.wait().items():
                    _print(f"refit: {name}: {report.reason}")
            except PartyFailedError as error:
                self._stop(error)
            finally:
                session.close()
                self._close_telemetry()

    def end(self) -> None:
        """Do what :meth:`finish` does if this rank exits by itself: its daemon thread would abandon the last commit."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.end()
            except PartyFailedError:
                logger.exception("refit: the last commit failed")
                self.stopped = _args().refit_on_failure == "stop"
            finally:
                self._close_telemetry()

    def _close_telemetry(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()

    def _stop(self, error: PartyFailedError) -> None:
        if not self.stopped:
            _print(f"refit: the run ends, as an engine failed (--refit-on-failure stop): {error}")
        self.stopped = True

    def _open(self, args: argparse.Namespace, model: Sequence[Any]) -> RefitSession:
        import torch.distributed as dist

        credentials = push_flags.credentials_from(args, _PREFIX)
        engines = []
        if dist.get_rank() == 0:
            engines = http_engines(args.refit_engines, args.refit_timeout, credentials)
            self._telemetry = telemetry_from_args(args)
        session = RefitSession(
            model,
            engines,
            vocab_size=_vocab_size(args),
            options=options_from_args(args),
            telemetry=self._telemetry,
        )
        digest = session.prepare()
        self._tell(session.reports, 0)
        _print(f"refit: {len(session.state())} engine(s) follow plan {digest[:12]}")
        return session

    def _push(self, iteration: int) -> None:
        if self._session is None:
            return
        started = time.monotonic()
        report = self._session.push(iteration, wait=_args().refit_wait)
        self._tell(report.engines, iteration)
        served = {one.fate for one in report.engines.values()} - {Fate.FAILED, Fate.BACK, Fate.LEFT}
        if not served and not self._alone:
            _print(f"refit: no engine answers; weights are sent to nobody from version {iteration} on")
        self._alone = not served
        if any(one.fate in _TAKE_PART for one in report.engines.values()):
            _print(_line(report, time.monotonic() - started if _args().refit_wait else None))

    def _tell(self, reports: Mapping[str, EngineReport], version: int) -> None:
        """Say what users should know of engines that did not just receive the version."""
        told = {
            Fate.FAILED: "{name} is left out until it answers again, and training goes on; at version {version}: {why}",
            Fate.BACK: "{name} answers again, and takes part once it has joined",
            Fate.LAGS: "{name} still commits an earlier version, and misses version {version}",
        }
        for name, report in reports.items():
            if report.fate in told:
                _print(f"refit: {told[report.fate].format(name=name, version=version, why=report.reason)}")
            elif name in self._lost and report.fate in _TAKE_PART:  # it has joined between two pushes
                _print(f"refit: {name} answers again, and takes part from version {version} on")
            if report.fate is Fate.FAILED:
                self._lost.add(name)
            else:
                self._lost.discard(name)


def _line(report: PushReport, until_served: float | None) -> str:
    seconds = report.seconds["send"]
    rate = report.nbytes / 1e6 / seconds if seconds else 0.0
    line = f"refit: version {report.version} sent, {report.nbytes / 1e6:.2f} MB in {seconds:.3f} s ({rate:.0f} MB/s)"
    return line if until_served is None else f"{line}, served {max(until_served - seconds, 0.0):.3f} s later"


def end_with(error: RefitError) -> NoReturn:
    """End the run on all ranks, with one line from the first.

    Raises:
        SystemExit: always.
    """
    import torch.distributed as dist

    last_line.leave(str(error))
    first = dist.get_rank() == 0
    raise SystemExit(fail(error, speaks=first, leads=first)) from error


def _vocab_size(args: argparse.Namespace) -> int:
    """Rows of the engines' embedding: of the published model that the run began with, or the tokenizer's tokens.

    Raises:
        RefitError: if neither is known.
    """
    from megatron_patches.refit.checkpoints.megatron_checkpoint import vocabulary_of
    from megatron_patches.refit.models.config_traits import family_from_config, read_config

    if args.load_hf is None:
        return vocabulary_of(args)
    return family_from_config(read_config(Path(args.load_hf))).traits.vocab_size


def _has_loaded(args: argparse.Namespace) -> bool:
    """Whether a run that begins at step 0 has weights from ``--load``: a release's, such as ``refit import`` writes."""
    from megatron.training.checkpointing import checkpoint_exists

    return bool(checkpoint_exists(args.load))


def _args() -> argparse.Namespace:
    from megatron.training.global_vars import get_args

    args: argparse.Namespace = get_args()
    return args


def _print(text: str) -> None:
    """Print on the rank that prints Megatron's own progress."""
    from megatron.training.utils import print_rank_last

    print_rank_last(text)


def records(pusher: Pusher | None = None) -> tuple[PatchRecord, ...]:
    """The replacements in Megatron's training loop.

    Args:
        pusher: pushes the weights; a new one by default.
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
            try:
                result = train(*args, **kwargs)
            except SystemExit as ending:  # --exit-interval, --exit-duration-in-mins, --exit-signal-handler
                pushing.end()
                raise SystemExit(ending.code or int(pushing.stopped)) from None
            pushing.finish()
            return result

        return replacement

    module = "megatron.training.training"
    reason = "pushes weights into engines between steps"
    return (
        PatchRecord(target=f"{module}:train_step", replace=around_step, reason=reason, sha256="275be60d0831f482"),
        PatchRecord(target=f"{module}:train", replace=around_training, reason=reason, sha256="e94d5fc0508fd2fa"),
    )
