"""The order in which passes visit weight groups, learned from earlier passes, and predictions from it.

[Note: chain] A chain has two timelines: one for forward passes, one for backward passes. The backward one holds
the visits of recomputation and of gradients in the order in which they happen, so activation recompute needs no
special case. A timeline is the list of visits of the latest pass plus a cursor; the entries after the cursor are
probably visited next, and therefore worth gathering now. Orders are stored by their first visit, so that a pass over
part of the model is not mistaken for a pass over all of it. A wrong prediction costs a gather, never a wrong number:
a group that was not prefetched is gathered when it is visited. All ranks of a shard group must visit in the same
order, as with any collective.

[Note: iterations] Where weights are known not to change until a change is announced, the passes between two
announcements are an *iteration*. The sequence of their kinds is learned as well (:class:`PassSequence`), so that the
end of one microbatch's backward pass can gather what the next microbatch's forward pass begins with.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_PASSES = 4096


class Timeline[T]:
    """Visits of one kind of pass.

    Attributes:
        learned: the order that predictions come from; empty before the first complete pass.
        visits: what the current pass has visited so far, in order.
        visited: the same, as a set; items compare by identity.
    """

    def __init__(self) -> None:
        self.learned: Sequence[T] = ()
        self.visits: list[T] = []
        self.visited: set[T] = set()
        self._orders: dict[T, Sequence[T]] = {}
        self._cursor = -1

    def begin(self, guess: Sequence[T] = ()) -> None:
        """Start a pass. The previous pass becomes the prediction; before the first pass, ``guess`` does."""
        if self.visits:
            self.learned = self._orders[self.visits[0]] = self.visits
        elif not self.learned:
            self.learned = guess
        self.visits, self.visited = [], set()
        self._cursor = -1

    @property
    def knows_pass(self) -> bool:
        """Whether an earlier pass began like the one under way."""
        return bool(self.visits) and self.visits[0] in self._orders

    def visit(self, item: T) -> None:
        """Record a visit and move the cursor to it: the next occurrence ahead, else the first one in the order."""
        if not self.visits:
            self.learned = self._orders.get(item, self.learned)
        self.visits.append(item)
        self.visited.add(item)
        following = self._cursor + 1
        if following < len(self.learned) and self.learned[following] is item:
            self._cursor = following
            return
        for position in (*range(following, len(self.learned)), *range(min(following, len(self.learned)))):
            if self.learned[position] is item:
                self._cursor = position
                return

    def upcoming(self, count: int) -> Sequence[T]:
        """Up to ``count`` predicted next visits of the pass, nearest first."""
        following = self._cursor + 1
        return self.learned[following : following + count]

    def beginning(self, count: int) -> Sequence[T]:
        """Up to ``count`` predicted first visits of the next pass."""
        return (self.learned or self.visits)[:count]


class PassSequence[K]:
    """The kinds of the passes of an iteration, learned from the previous iteration."""

    def __init__(self) -> None:
        self._former: list[K] = []
        self._current: list[K] = []

    def begin_iteration(self) -> None:
        """The next pass is the first of an iteration."""
        if self._current:
            self._former, self._current = self._current, []

    def begin(self, kind: K) -> None:
        """Record that a pass begins."""
        # Without an announced change, as in a long evaluation, an iteration never ends: bound the record.
        if len(self._current) < _MOST_PASSES:
            self._current.append(kind)

    @property
    def next(self) -> K | None:
        """The kind of pass that came next at this point of the previous iteration.

        None if that iteration ended at this point, or if its pass before this point was of another kind.
        """
        done = len(self._current)
        if not 0 < done < len(self._former) or self._former[done - 1] is not self._current[-1]:
            return None
        return self._former[done]


class Chain[T]:
    """Both timelines of one model (or one virtual pipeline stage)."""

    def __init__(self) -> None:
        self.forward: Timeline[T] = Timeline()
        self.backward: Timeline[T] = Timeline()

    def begin_forward(self) -> None:
        """Start a forward pass."""
        self.forward.begin()

    def begin_backward(self) -> None:
        """Start a backward pass; the first one is expected to reverse the forward pass."""
        forward = self.forward.visits or self.forward.learned
        self.backward.begin(guess=forward[::-1])
