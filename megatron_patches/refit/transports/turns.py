"""Decides which destination a source sends to next if all of a party's traffic goes through one queue.

[Note: turns] A GPU executes operations on an NCCL communicator in the order in which they were started, and each ends
only together with its counterpart. Two sources and two destinations with different orders would deadlock: source 0
sends to B while B still waits for source 1, which sends to A, which still waits for source 0. One rule prevents this,
for any number of parties and any transfers: **all that a source has under way leads to one destination.** It announces
packets to others only when that has ended. Destinations start to receive in the order in which they read announcements.

Proof: Consider a destination that has started anything, and its first operation that has not ended. The operation was
announced, so its source has started it or starts it next. Ahead of it in the source's queue is only what leads to the
same destination and was announced there before, and that has ended. So the counterpart is first in the source's queue,
and the operation ends. This requires no common order, no knowledge of other parties' transfers and no second
communicator, and on a GPU only one kernel at a time can wait for a peer.

Sources start with different destinations (:class:`megatron_patches.refit.memory.sender.Sender`) and go round. A turn is
long, so that the pause between turns is small in comparison, but limited, so that destinations are served evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_patches.refit.memory.ports import Pending

WINDOW_BYTES = 768 << 20
"""Limit of what is under way, plus one load: enough to keep the GPU busy, and short to wait for."""

TURN_BYTES = 1 << 30
"""Bytes that one destination gets before another that waits."""


class Turns:
    """The turns of one source."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Pending[None], int]] = deque()
        self._nbytes = 0  # bytes under way
        self._destination: int | None = None
        self._given = 0  # bytes sent in the current turn

    def choose(self, waiting: Sequence[int]) -> int | None:
        """The destination to send to now. The caller must then call :meth:`started`.

        Args:
            waiting: ranks of the destinations for which something is ready.

        Returns:
            None if what is under way must end first.
        """
        while self._under_way and self._under_way[0][0].done():
            self._nbytes -= self._under_way.popleft()[1]
        if not waiting:
            return None
        if self._under_way:
            over = self._given >= TURN_BYTES and any(rank != self._destination for rank in waiting)
            more = self._destination in waiting and not over and self._nbytes < WINDOW_BYTES
            return self._destination if more else None
        self._destination, self._given = self._after(waiting), 0
        return self._destination

    def started(self, pending: Pending[None], nbytes: int) -> None:
        """Records a transfer that was started to the chosen destination."""
        self._under_way.append((pending, nbytes))
        self._nbytes += nbytes
        self._given += nbytes

    def finish(self) -> None:
        """Forgets all transfers. All must have arrived."""
        self._under_way.clear()
        self._nbytes = 0

    def _after(self, waiting: Sequence[int]) -> int:
        """The next destination in the round; at first, the one that is ready first."""
        last = self._destination
        if last is None:
            return waiting[0]
        return min(waiting, key=lambda rank: (rank <= last, rank))
