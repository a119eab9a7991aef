"""Decides which destination a source sends to next where all of a party's traffic goes through one queue.

[Note: turns] A GPU carries out what is begun on an NCCL communicator one after the other, and what is begun ends only
with its counterpart. Two sources and two destinations whose orders differ would wait for each other for ever: 0 sends
to B while B still waits for 1, which sends to A, which still waits for 0. One rule keeps that from happening, with any
number of parties and whatever is to move: **what a source has under way leads to one destination.** It announces to
others only when that has ended. Destinations begin to receive in the order in which they read announcements.

Of a destination that has begun anything, look at the first thing that has not ended. It was announced, so its source
has begun it, or does next, behind nothing but what leads here and was announced here before, which has ended. So its
counterpart is first in the source's queue: it ends. Nothing else is needed: no common order, no knowledge of what
others send, no second communicator; on a GPU there is one kernel at a time that can wait for a peer.

Sources begin at different destinations (:class:`megatron_patches.refit.packets.Sender`) and go round. A turn is long,
so that the pause between two is small beside it, but not endless, so that destinations are shared evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_patches.refit.ports import Pending

WINDOW_BYTES = 768 << 20
"""The most that is under way, but for one load: enough for the next to be there always, little for one in a hurry."""

TURN_BYTES = 1 << 30
"""What one destination gets before another that waits."""


class Turns:
    """The turns of one source."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Pending[None], int]] = deque()
        self._nbytes = 0  # of it
        self._destination: int | None = None
        self._given = 0  # bytes of its turn

    def choose(self, waiting: Sequence[int]) -> int | None:
        """The destination to send something to now, of which :meth:`started` must be told.

        Args:
            waiting: ranks of those for which something is ready.

        Returns:
            None if what is under way comes first.
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
        """Something has been sent to the destination that was chosen."""
        self._under_way.append((pending, nbytes))
        self._nbytes += nbytes
        self._given += nbytes

    def finish(self) -> None:
        """All that was sent has arrived: lets go of it."""
        self._under_way.clear()
        self._nbytes = 0

    def _after(self, waiting: Sequence[int]) -> int:
        """The next in the round; at first, the one that is ready first."""
        last = self._destination
        if last is None:
            return waiting[0]
        return min(waiting, key=lambda rank: (rank <= last, rank))
