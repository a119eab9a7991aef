"""Agreement among the ranks of one side: gathers small objects from all, and fails a phase on all ranks or on none."""

from __future__ import annotations

import errno
import shutil
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_patches.refit.errors import ExportError, PartyFailedError, RefitError, first_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


_LATE_S = 5.0  # interval at which ranks that wait for the first one meet


class Exchange:
    """Ranks that call the same methods in the same order; by itself, those of a single process.

    Attributes:
        rank: this process's rank, from 0.
        size: number of ranks.
    """

    rank = 0
    size = 1

    def gather[T](self, value: T) -> list[T]:
        """The ``value`` of every rank, in rank order. Collective."""
        return [value]

    def take_largest(self, values: torch.Tensor) -> None:
        """Replaces each element, in place, by its largest value on any rank. Collective; shapes must be equal."""


class GroupExchange(Exchange):
    """The ranks of a process group. Every wait ends with the group's timeout.

    Args:
        group: the group, all of whose ranks take part; None for the default group.

    Raises:
        ValueError: if this process is not a member of the group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is no member of the group that was given")

    def gather[T](self, value: T) -> list[T]:
        """See :class:`Exchange`."""
        import torch.distributed as dist

        gathered: list[T] = [value] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def take_largest(self, values: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        import torch.distributed as dist

        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)


def default_exchange(group: ProcessGroup | None = None) -> Exchange:
    """The exchange of ``group`` or, if None, of all processes; of one process if torch.distributed is uninitialized."""
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Exchange()
    exchange = GroupExchange(group)
    return exchange if exchange.size > 1 else Exchange()


def on_first[T](exchange: Exchange, work: Callable[[], T]) -> T:
    """Runs ``work`` on the first rank. Every rank gets its result or its error.

    The other ranks wait in collectives of a few seconds each. In a single long one, the group's timeout would end the
    collective and, over NCCL, the process.

    Raises:
        PartyFailedError: on every rank, if ``work`` failed.
    """
    with ThreadPoolExecutor(1, "refit-on-first") as pool:
        task = pool.submit(work) if exchange.rank == 0 else None
        while True:
            (found, *_) = exchange.gather(_outcome(task))
            if found is None:
                continue
            value, reason = found
            if reason is None:
                return value
            raise PartyFailedError(reason) from (task.exception() if task is not None else None)


def _outcome[T](task: Future[T] | None) -> tuple[T, str | None] | None:
    """A task's result, and why it failed; None if it has not ended within seconds."""
    if task is None or not wait([task], _LATE_S).done:
        return None
    error = task.exception()
    return (task.result(), None) if error is None else (cast(T, None), describe_error(error))


def together[T](exchange: Exchange, what: str, work: Callable[[], T], kind: type[RefitError] = ExportError) -> list[T]:
    """Runs ``work`` on every rank. If it fails on any, raises on all with every reason.

    Args:
        exchange: the ranks.
        what: the activity, for messages, such as "export to /data/model".
        work: this rank's part.
        kind: the error to raise.

    Returns:
        The results, by rank.

    Raises:
        RefitError: of the given kind, with each rank that failed, its host and reason. On those ranks its cause is the
            original error.
    """
    mine: Exception | None = None
    outcome: tuple[bool, T | str]
    try:
        outcome = True, work()
    except Exception as error:  # noqa: BLE001 - carried to every rank below, and raised on this one as the cause
        mine = error
        outcome = False, f"rank {exchange.rank} on {socket.gethostname()}: {describe_error(error)}"
    outcomes = exchange.gather(outcome)
    reasons = [str(value) for good, value in outcomes if not good]
    if reasons:
        raise kind(f"{what} failed on {first_of(reasons, '; ')}") from mine
    return [value for _, value in outcomes]  # type: ignore[misc]


def describe_error(error: BaseException) -> str:
    """One line: the system's message and the file for an OSError, otherwise the error's message.

    For a full disk, it also says how much is free. For an assertion without a message, as many of Megatron's are, it is
    the condition.
    """
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{error.strerror}{where}"
        free = f"; {free_text(Path(error.filename).parent)}" if error.filename else ""
        return f"{error.strerror}{where}{free}; make room there"
    text = " ".join(str(error).split())
    if not text and isinstance(error, AssertionError):
        text = "".join(frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:])
    return text or type(error).__name__


def free_text(directory: Path) -> str:
    """How much is free on the disk of a directory that exists."""
    return f"{shutil.disk_usage(directory).free / 1e6:.1f} MB are free"
