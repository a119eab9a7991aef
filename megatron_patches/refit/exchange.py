"""Agreement among the ranks of one side: gathers small objects from all, and fails a phase on all ranks or on none."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from megatron_patches.refit.errors import ExportError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


def describe_error(error: Exception) -> str:
    """One line: the system's words and the file for an OSError, else the message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text or type(error).__name__
