"""When hooks that wait for a shard's gradient run: once in a backward pass, and on the whole gradient.

[Note: once a backward] A weight can be used several times in one backward pass. Only autograd knows whether another use
is still to come: it visits the shard's own node once all uses in its graph have been differentiated, even if they all
returned None. Hooks wait for that visit, so that they run once and see the whole gradient, as an unsharded parameter's
hooks do. Those of a reduction that ends before the visit are *owed* until the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from etp.grads import Destinations, PendingReduction
from etp.graphs import GraphModes
from etp.group import Shard, WeightGroup

Chosen = tuple[bool, ...] | None
"""Which of a group's shards ``backward(inputs=...)`` names; None if it leaves out none that is trained."""


class GradHooks:
    """Runs the hooks of one runtime's weight groups and shards.

    Args:
        graphs: whether work is being captured into a CUDA graph.
        pending: the runtime's own queue of reductions in flight, shared so that later ones are seen.
        beside: called once all uses of a shard in a graph are differentiated, with the gradient that autograd brings
            itself, or None; returns what takes its place, or None.

    Attributes:
        watched: the groups that autograd tells of, each with the shard by which it does.
        used_further: groups with a reduction in this pass, of which autograd has not yet said that it was the last use.
        owed: groups and shards by ``id``, whose hooks run when the pass ends. (Tensors do not compare to a bool.)
        behind_autograd: by ``id``, shards whose hooks run when autograd has accumulated their gradient.
        brought: ``id`` of the shard to which autograd itself brings a gradient, which it accumulates next.
    """

    def __init__(
        self,
        graphs: GraphModes,
        pending: Collection[PendingReduction],
        beside: Callable[[Shard, torch.Tensor | None], torch.Tensor | None],
    ) -> None:
        self._graphs = graphs
        self._pending = pending
        self._beside = beside
        self.watched: dict[WeightGroup, Shard] = {}
        self.used_further: set[WeightGroup] = set()
        self.owed: dict[int, WeightGroup | Shard] = {}
        self.behind_autograd: dict[int, RemovableHandle] = {}
        self.brought: int | None = None
        self._handles: dict[int, RemovableHandle] = {}
        """Those of watched shards, by ``id``."""

    def forget(self) -> None:
        """Run none of the hooks that were to run: the pass was abandoned, or a capture begins or has ended."""
        self.used_further.clear()
        self.owed.clear()

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop watching these groups."""
        for group in groups:
            self.watched.pop(group, None)
        for shard in (shard for group in groups for shard in group.shards):
            for handles in (self._handles, self.behind_autograd):
                handle = handles.pop(id(shard), None)
                if handle is not None:
                    handle.remove()

    # Uses in one backward pass -------------------------------------------------------------------------------

    def watch(self, group: WeightGroup) -> None:
        """Register to learn from autograd when all uses of the group's shards are differentiated; at every visit.

        The group's weights are used together, so one of them tells of all.
        """
        if group in self.watched:
            return
        for shard, is_trained in zip(group.shards, group.trained(), strict=True):
            if not is_trained or id(shard) in self._handles:
                continue
            differentiated = self._beside
            if group not in self.watched:
                self.watched[group] = shard
                differentiated = partial(self._differentiated, group)
            self._handles[id(shard)] = shard.watch_uses(partial(differentiated, shard))

    def _differentiated(self, group: WeightGroup, shard: Shard, grad: torch.Tensor | None) -> torch.Tensor | None:
        """All uses of ``group`` in the graph are differentiated, as autograd says of ``shard``."""
        own = self._beside(shard, grad)
        self.used_further.discard(group)
        return own

    # Complete gradients --------------------------------------------------------------------------------------

    def complete(
        self, group: WeightGroup, trained: Sequence[Shard], into: Destinations, chosen: Chosen, run_hooks: bool
    ) -> None:
        """A reduction has ended: make the gradients visible on their shards, and run the hooks or owe them.

        Args:
            group: the group that was reduced.
            trained: those of its shards that got a gradient.
            into: where these went.
            chosen: whether that was all that are trained.
            run_hooks: no if another pass has begun since the reduction was started.
        """
        into.publish()
        for shard in trained:
            if hasattr(shard, "grad_added_to_main_grad"):
                shard.grad_added_to_main_grad = True
        if self._graphs.is_part:
            # Nothing is there before a replay.
            for shard in trained:
                if getattr(shard, "main_grad", None) is None:
                    self.run_behind_autograd(shard)
        elif not run_hooks:
            pass
        elif chosen is not None:
            # Not those of the whole group, nor before the last use: autograd may visit another shard than these.
            self.owed.update((id(shard), shard) for shard in trained)
        elif group in self.used_further:
            self.owed[id(group)] = group
        else:
            self.owed.pop(id(group), None)
            group.run_reduce_hooks()

    def run_owed(self) -> None:
        """Run the hooks that are owed to groups and shards with no reduction in flight; its end runs the others."""
        in_flight = {id(one) for pending in self._pending for one in (pending.group, *pending.group.shards)}
        for key in [key for key in self.owed if key not in in_flight]:
            self.owed.pop(key).run_reduce_hooks()

    def run_behind_autograd(self, shard: Shard) -> None:
        """Run the hooks of ``shard`` whenever autograd has accumulated a gradient that a replay returned.

        Where a reduction is in flight, or was, whose end runs them, nothing is left to do.
        """
        if id(shard) in self.behind_autograd:
            return

        def accumulated() -> None:
            if self.brought != id(shard) or id(shard) in self.owed or id(shard.weight_group) in self.owed:
                return
            own = [pending for pending in self._pending if pending.group is shard.weight_group]
            if not own:
                shard.run_reduce_hooks()
            elif all(pending.belated for pending in own):
                self.owed[id(shard)] = shard

        self.behind_autograd[id(shard)] = shard.watch_accumulation(accumulated)
