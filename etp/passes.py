"""Tracks which forward or backward pass a runtime is in, and learns the order of visits, to predict the next ones.

A *forward pass* begins when the *root* (the adopted module) is called, at the first forward visit after a backward
visit or, without a root, when the pass's first group is visited again. A *backward pass* begins at the first visit
inside an autograd graph task and ends with that task; activation recompute happens inside it. A backward pass whose
task ended in an exception is *abandoned*: gradients not yet added to ``grad`` are dropped before the next pass begins.

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

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from etp.group import Reading, WeightGroup
from etp.mode import Mode
from etp.terms import inside_applied_function
from etp.versions import WeightVersions

if TYPE_CHECKING:
    from etp.reductions import Reductions
    from etp.replicated import ReplicatedGrads

# Passes of an iteration that are recorded.
_MOST_PASSES = 4096

# Average number of visits per group after which a forward pass that does not end is treated as several passes.
_MOST_VISITS = 64


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
        """Record that the next pass is the first of an iteration."""
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


class _BackwardToken:
    """Lives as long as autograd's graph task, whose callback holds the only reference."""


class Passes:
    """The passes of one runtime, and the order of visits in them.

    Args:
        groups: the runtime's own list of groups, shared so that later additions are seen.
        weights: versions of the shards; notified when a forward pass begins.
        at_end: called at the end of a backward pass. If it raises, the pass counts as abandoned.

    Attributes:
        forward_order: the visits of forward passes; see [Note: chain].
        backward_order: those of backward passes.
        collectors: the parts of the runtime that collect gradients. They learn when a pass begins, before its first
            visit, and when one was abandoned.
        number: unique number of the latest pass.
        forward_number: number of the latest forward pass.
        in_backward: whether the latest pass is a backward pass, in progress or finished.
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        weights: WeightVersions,
        *,
        at_end: Callable[[], None],
    ) -> None:
        self.forward_order: Timeline[Reading] = Timeline()
        self.backward_order: Timeline[Reading] = Timeline()
        self.collectors: Sequence[Reductions | ReplicatedGrads] = ()
        self.number = self.forward_number = 0
        self.in_backward = False
        self._groups = groups
        self._weights = weights
        self._at_end = at_end
        self._sequence: PassSequence[Timeline[Reading]] = PassSequence()
        self._in_sequence = False
        self._began_differentiable = False
        """:meth:`may_have_backward` when the pass began; during a layer's own operation, autograd is off."""
        self._epoch = weights.epoch
        self._token: weakref.ref[_BackwardToken] | None = None
        self._root: weakref.ref[nn.Module] | None = None

    # The root ------------------------------------------------------------------------------------------------

    def set_root(self, module: nn.Module) -> None:
        """Let calls of ``module`` delimit forward passes; the caller hooks them to :meth:`begin_forward`."""
        self._root = weakref.ref(module)

    @property
    def had_root(self) -> bool:
        """Whether there has ever been a root."""
        return self._root is not None

    @property
    def has_root(self) -> bool:
        """Whether there is a root, so that calls of it delimit forward passes."""
        return self._root is not None and self._root() is not None

    # Passes --------------------------------------------------------------------------------------------------

    def enter(self, group: WeightGroup) -> Timeline[Reading]:
        """The timeline that a visit of ``group`` belongs to now; begins a new pass if the visit starts one.

        Also detects groups that one forward pass uses more than once. The caller records the visit.
        """
        if torch._C._current_graph_task_id() != -1:
            self.enter_backward()
            return self.backward_order
        forward = self.forward_order
        if self.in_backward:
            self.begin_forward()
        elif group.rows in forward.visited:
            # Without a backward pass or a call of the root, nothing ends a pass: bound the record of visits.
            revisits_first = forward.visits[0] is group.rows and not self.has_root
            if revisits_first or len(forward.visits) > _MOST_VISITS * len(self._groups):
                self.begin_forward()
            elif self._began_differentiable or self.may_have_backward():
                group.used_more_than_once = True
        return forward

    def may_have_backward(self) -> bool:
        """Whether the current forward pass may be followed by a backward pass: not while evaluating.

        Reentrant checkpointing runs its forward pass with gradients off, so a root in training mode counts too. So does
        running inside the forward of an autograd function, because layers apply none during an evaluation.
        """
        root = self._root() if self._root is not None else None
        return torch.is_grad_enabled() or root is None or root.training or inside_applied_function()

    def begin_forward(self) -> None:
        """Begin a forward pass."""
        self.drop_abandoned()
        self.in_backward = False
        self.number += 1
        self.forward_number = self.number
        for collector in self.collectors:
            collector.begin_pass(backward=False)
        self._weights.begin_forward()
        self.forward_order.begin()
        if self._epoch != self._weights.epoch:
            self._epoch = self._weights.epoch
            self._sequence.begin_iteration()
        # The next training iteration does not repeat the passes of an evaluation.
        self._began_differentiable = self._in_sequence = self.may_have_backward()
        if self._in_sequence:
            self._sequence.begin(self.forward_order)

    def enter_backward(self) -> None:
        """Begin a backward pass, inside autograd's graph task, unless one is in progress."""
        if self._token is not None:
            if self._token() is not None:
                return
            self.drop_abandoned()
        token = _BackwardToken()
        self._token = weakref.ref(token, self._settle)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, token))
        self.in_backward = True
        self.number += 1
        for collector in self.collectors:
            collector.begin_pass(backward=True)
        # The first one is expected to reverse the forward pass.
        self.backward_order.begin(guess=(self.forward_order.visits or self.forward_order.learned)[::-1])
        self._in_sequence = True
        self._sequence.begin(self.backward_order)

    def expected(self, count: int) -> Sequence[Reading]:
        """Up to ``count`` first visits of the pass after the current one; empty if they cannot be predicted.

        See [Note: iterations]. Predicts only if weights are trusted to stay the same across passes,
        and not during an evaluation, which is not part of an iteration.
        """
        following = self._sequence.next if self._in_sequence and self._weights.trusted else None
        return () if following is None else following.beginning(count)

    @property
    def backward_is_under_way(self) -> bool:
        """Whether a backward pass has begun and its graph task is still alive."""
        return self._token is not None and self._token() is not None

    def drop_abandoned(self) -> None:
        """Drop the gradients in flight of a backward pass that ended in an exception: they are incomplete."""
        # The end callback resets the reference; a dead one means that the task died in an exception.
        if self._token is None or self._token() is not None:
            return
        for collector in self.collectors:
            collector.discard()
        self._token = None

    def _settle(self, _: object) -> None:
        """Order the reductions of an abandoned pass before what follows it: zeros in ``main_grad``, which none sees."""
        for collector in self.collectors:
            collector.settle()

    def _end_backward(self, token: _BackwardToken) -> None:
        del token
        self._at_end()
        # Last: if a hook raised above, the pass counts as abandoned and the rest of its gradients are dropped.
        self._token = None

    def change_mode(self, mode: Mode) -> None:
        """Start a new pass at the next visit; see :attr:`etp.mode.Modes.parts`."""
        del mode
        self._token = None
        self.in_backward = False
        self.number += 1
        self.forward_number = self.number
        self._in_sequence = False
        self.forward_order.begin()

    def forget_orders(self) -> None:
        """Forget the learned orders, because the runtime has lost groups."""
        self.forward_order, self.backward_order = Timeline(), Timeline()
        self._sequence = PassSequence()


def inside_backward() -> bool:
    """Whether the calling thread runs an autograd graph task."""
    return torch._C._current_graph_task_id() != -1
