"""The order in which a pass visits weight groups, learned from earlier passes, and what comes next in it.

[Note: chain] A chain has two timelines: one for forward passes, one for backward passes. The backward one holds
recomputation and gradient visits in the order in which they happen, so activation recompute needs no special
case. A timeline is the list of visits of the latest pass plus a cursor; the next entries after the cursor are
what will probably be visited next, and therefore worth gathering now. Orders are kept by their first visit, so that a
pass over a part of the model is not taken for one over the whole. A wrong guess costs a gather, never a wrong
number: a group that was not prefetched is gathered when it is visited. All ranks of a shard group must visit in
the same order, as with any collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Timeline[T]:
    """Visits of one kind of pass."""

    def __init__(self) -> None:
        self._order: list[T] = []
        self._visits: list[T] = []
        self._orders: dict[int, list[T]] = {}
        self._seen: set[int] = set()
        self._cursor = -1

    def __len__(self) -> int:
        """Visits of the pass under way."""
        return len(self._visits)

    @property
    def learned(self) -> Sequence[T]:
        """The order that predictions come from; empty before the first complete pass."""
        return tuple(self._order)

    @property
    def visits(self) -> Sequence[T]:
        """What the pass under way has visited so far."""
        return tuple(self._visits)

    @property
    def head(self) -> T | None:
        """The first visit of the pass under way."""
        return self._visits[0] if self._visits else None

    def begin(self, guess: Sequence[T] = ()) -> None:
        """Start a pass. The last one becomes the prediction; before any, ``guess`` does."""
        if self._visits:
            self._order = self._orders[id(self._visits[0])] = self._visits
        elif not self._order:
            self._order = list(guess)
        self._visits = []
        self._seen = set()
        self._cursor = -1

    @property
    def knows_pass(self) -> bool:
        """Whether an earlier pass began like the one under way."""
        return bool(self._visits) and id(self._visits[0]) in self._orders

    def seen(self, item: T) -> bool:
        """Whether the pass under way has visited ``item``."""
        return id(item) in self._seen

    def visit(self, item: T) -> None:
        """Record a visit and move the cursor to it: the next occurrence ahead, else the first one in the order."""
        if not self._visits:
            self._order = self._orders.get(id(item), self._order)
        self._visits.append(item)
        self._seen.add(id(item))
        following = self._cursor + 1
        if following < len(self._order) and self._order[following] is item:
            self._cursor = following
            return
        for position in (*range(following, len(self._order)), *range(min(following, len(self._order)))):
            if self._order[position] is item:
                self._cursor = position
                return

    def upcoming(self) -> Iterator[T]:
        """What should come next, nearest first."""
        for position in range(self._cursor + 1, len(self._order)):
            yield self._order[position]


class Chain[T]:
    """Both timelines of one model (or one virtual pipeline stage)."""

    def __init__(self) -> None:
        self.forward: Timeline[T] = Timeline()
        self.backward: Timeline[T] = Timeline()

    def begin_forward(self) -> None:
        """Start a forward pass."""
        self.forward.begin()

    def begin_backward(self) -> None:
        """Start a backward pass; before one was seen, expect the reverse of the forward pass."""
        forward = self.forward.visits or self.forward.learned
        self.backward.begin(guess=tuple(reversed(forward)))

    def next_of(self, item: T) -> T | None:
        """What the last complete forward pass visited right after ``item``'s first visit."""
        return self._neighbour(item, +1)

    def prev_of(self, item: T) -> T | None:
        """What the last complete forward pass visited right before ``item``'s first visit."""
        return self._neighbour(item, -1)

    def _neighbour(self, item: T, step: int) -> T | None:
        order = self.forward.learned or self.forward.visits
        for position, entry in enumerate(order):
            if entry is item:
                return order[position + step] if 0 <= position + step < len(order) else None
        return None
