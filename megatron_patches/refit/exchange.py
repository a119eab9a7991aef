"""Agreement among the ranks of one side: gathers small objects from all, and fails a phase on all ranks or on none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from megatron_patches.refit.errors import ExportError, PartyFailedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_LATE_S = 5.0  # after which ranks that wait for the first one meet, and wait on


class Exchange(Protocol):
    """Ranks that call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The own rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather[T](self, value: T) -> list[T]:
        """``value`` of every rank, by rank, on every rank."""


class SingleProcess:
    """The exchange of a process that is alone."""

    rank = 0
    size = 1

    def gather[T](self, value: T) -> list[T]:
        """``value`` alone."""
        return [value]


class GroupExchange:
    """Gathers objects over a process group; every wait ends with the group's time-out.

    Args:
        group: the group, all of whose ranks take part; None for the default group.

    Raises:
        ValueError: if this process is no member of the group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is no member of the group that was given")

    def gather[T](self, value: T) -> list[T]:
        """``value`` of every rank, by rank, on every rank."""
        import torch.distributed as dist

        gathered: list[T] = [value] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


def default_exchange(group: ProcessGroup | None = None) -> Exchange:
    """Over ``group`` or, if None, over all processes; alone where torch.distributed is not initialised."""
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    return GroupExchange(group)


def on_first[T](exchange: Exchange, work: Callable[[], T]) -> T:
    """What ``work`` gives on the first rank, on every rank; raises on all what it raises there.

    The others wait for a few seconds at a time, however long it takes: a collective that one rank comes late to is
    ended by its group's time-out, and with it, over NCCL, the process.

    Raises:
        PartyFailedError: on every rank, if it fails.
    """
    with ThreadPoolExecutor(1, "refit-on-first") as pool:
        task = pool.submit(work) if exchange.rank == 0 else None
        while True:
            (found, *_) = exchange.gather(_outcome(task))
            if found is None:
                continue
            if found.reason is None:
                return found.value
            raise PartyFailedError(found.reason, found.engines) from (task.exception() if task is not None else None)


@dataclass(frozen=True)
class _Outcome[T]:
    """What became of some work: what it gave, or why it failed, and whose fault that was."""

    value: T
    reason: str | None = None
    engines: tuple[str, ...] = ()


def _outcome[T](task: Future[T] | None) -> _Outcome[T] | None:
    """None if it has not ended soon."""
    if task is None or not wait([task], _LATE_S).done:
        return None
    error = task.exception()
    if error is None:
        return _Outcome(task.result())
    engines = error.engines if isinstance(error, PartyFailedError) else ()
    return _Outcome(cast(T, None), describe_error(error), engines)


def on_all(exchange: Exchange, work: Callable[[], None], blamed: Callable[[], Iterable[str]] = tuple) -> None:
    """Runs ``work`` on every rank, each of which comes to its end at about the same time.

    Args:
        exchange: the ranks.
        work: this rank's part.
        blamed: gives, on the first rank, the names of engines whose fault it was if it failed.

    Raises:
        PartyFailedError: on every rank if it failed on any, with every reason; the cause is this rank's own error.
    """
    mine: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - carried to every rank, and raised on this one as the cause
        mine = error
    outcomes = exchange.gather((None if mine is None else describe_error(mine), tuple(blamed())))
    reasons = dict.fromkeys(reason for reason, _ in outcomes if reason is not None)
    if reasons:
        raise PartyFailedError("; ".join(reasons), outcomes[0][1]) from mine


def together[T](exchange: Exchange, what: str, work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every rank; if it fails on any, raises on all with every reason.

    Args:
        exchange: the ranks.
        what: what is being done, for the message: "export to /data/model".
        work: this rank's part.

    Returns:
        The results, by rank.

    Raises:
        ExportError: naming each rank that failed, its host and reason. On those ranks its cause is the original.
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
        shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
        raise ExportError(f"{what} failed on {shown}") from mine
    return [value for _, value in outcomes]  # type: ignore[misc]


def describe_error(error: BaseException) -> str:
    """One line: the system's words and the file for an OSError, else the message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text or type(error).__name__
