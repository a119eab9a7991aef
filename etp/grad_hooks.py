"""Tracks what autograd reports about shards: which get a gradient, what it delivers itself, when all uses have ended.

[Note: once a backward] A weight can be used several times in one backward pass. Only autograd knows whether another use
is still to come: it visits the shard's own node once all uses in its graph have been differentiated, even if they all
returned None. Hooks wait for that visit, so that they run once and see the whole gradient, as an unsharded parameter's
hooks do. If a reduction ends before the visit, its hooks are *owed*: they run when the pass ends. If autograd itself
delivers a gradient and nothing is reduced, they run once autograd has accumulated it.

[Note: gradients beside uses] A loss may contain a term of the weights themselves, such as a penalty. Each rank
differentiates the term by its own shard, and autograd delivers this gradient to the shard's node, without a reduction.
It is ordered after any reduction that adds to the same memory. If gradients are summed over the ranks, the term's
gradient must count once per rank, because each rank has the term in its loss; ``etp/terms.py`` scales it. That module
cannot scale what a user's own ``torch.autograd.Function`` of a shard returns, so a gradient that it has not scaled is
scaled here. If autograd has added gradients of both kinds, or one that is reduced already, they cannot be told apart:
that is refused.
If the shard has ``main_grad``, the gradient is added to it here: Megatron takes what autograd leaves in ``grad`` for
part of what the reduction has added, and drops it. If Transformer Engine fuses the accumulation, autograd has added
TE's placeholder to this gradient. Both are then left to be dropped, as in Megatron without sharding. Its hooks run as
those of other shards, unless it is captured: Megatron itself runs them after each replay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from etp.config import EtpConfig, GradReduction
from etp.differentiate import is_asked_for
from etp.errors import EtpStateError
from etp.grads import Destinations, PendingReduction
from etp.group import WeightGroup
from etp.mode import Modes
from etp.shard import Shard, can_be_trained, needs_grad

Chosen = tuple[bool, ...] | None
"""Which of a group's shards ``backward(inputs=...)`` names; None if it names all that are trained."""


class GradHooks:
    """Runs the hooks of one runtime's weight groups and shards.

    Args:
        config: options of the runtime.
        modes: whether work is being captured into a CUDA graph.
        pending: the runtime's own queue of reductions in flight, shared so that later ones are seen.
        summed: the groups that the runtime's own local sums are of, shared so that later ones are seen.
        before_own: called with a group before autograd delivers a gradient to one of its shards.

    Attributes:
        used_further: groups with a reduction in this pass whose last use autograd has not reported yet, each with the
            shard that reports it.
        done: groups whose hooks the end of a reduction has run in this pass.
        owed: what runs the hooks of a group or a shard when the pass ends, by ``id`` of that group or shard.
        replayed: ``id`` of the shards whose gradients the replays of a captured part return.
        brought: ``id`` of the shard whose gradient autograd itself delivers and accumulates next; None if there is
            none.
    """

    def __init__(
        self,
        config: EtpConfig,
        modes: Modes,
        pending: Collection[PendingReduction],
        summed: Collection[WeightGroup],
        before_own: Callable[[WeightGroup], None],
    ) -> None:
        self._config = config
        self._modes = modes
        self._pending = pending
        self._summed = summed
        self._before_own = before_own
        self.used_further: dict[WeightGroup, Shard] = {}
        self.done: set[WeightGroup] = set()
        self.owed: dict[int, Callable[[], None]] = {}
        self.replayed: set[int] = set()
        self.brought: int | None = None
        self._told_of_replays: set[int] = set()
        """``id`` of the captured shards with ``main_grad``, whose hooks Megatron runs after a replay."""
        self._handles: dict[int, list[RemovableHandle]] = {}
        """Handles of autograd's hooks on watched shards, by ``id``: of the use and, once it was needed, of the
        accumulation, because autograd calls that one for every shard in every pass."""

    def forget(self) -> None:
        """Drop the hooks still due: the pass was abandoned, or a capture begins or has ended."""
        self.used_further.clear()
        self.done.clear()
        self.owed.clear()

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop watching these groups."""
        for shard in (shard for group in groups for shard in group.shards):
            self.replayed.discard(id(shard))
            self._told_of_replays.discard(id(shard))
            for handle in self._handles.pop(id(shard), ()):
                handle.remove()

    # Uses in one backward pass -------------------------------------------------------------------------------

    def watch(self, group: WeightGroup) -> None:
        """Hook the group's shards, to learn from autograd when all their uses are differentiated.

        Frozen ones too, because they may be trained later.
        """
        for shard in group.shards:
            if id(shard) not in self._handles and can_be_trained(shard):
                self._handles[id(shard)] = [shard.watch_uses(partial(self._differentiated, shard))]

    def _differentiated(self, shard: Shard, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Record that all uses of ``shard`` in the graph are differentiated.

        The weights of a group are used together, so one shard reports for all of them.
        """
        self.brought = None
        own = None if grad is None else self._beside(shard, grad)
        if self.used_further.get(shard.weight_group) is shard:
            del self.used_further[shard.weight_group]
        return own

    def _beside(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor | None:
        """Adjust the gradient that autograd itself delivers to ``shard``; see [Note: gradients beside uses].

        Args:
            shard: the shard; all its uses in the graph are differentiated.
            grad: what autograd itself delivers.

        Returns:
            the gradient for autograd to add, in new memory: a replay would overwrite what a graphed callable returns.
            None leaves ``grad`` as it is: it is a placeholder, or the capture of a part returned it and a replay will
            compute it.
        """
        is_placeholder = shard.placeholder_due == torch._C._current_graph_task_id()
        if is_placeholder or self._modes.captures_part(grad):
            return None
        main_grad: torch.Tensor | None = getattr(shard, "main_grad", None)
        if (shard.has_reduce_hooks or shard.weight_group.reduce_hooks) and id(shard) not in self._told_of_replays:
            self._run_when_accumulated(shard)
        self._before_own(shard.weight_group)
        for pending in self._pending:
            if any(shard is other for other in pending.group.shards):
                # It adds to the same memory.
                pending.ready.wait()
        times = self._times(shard)
        # A user's own function may return what it has computed from a copy of the shard, which refuses rows by number.
        with torch._C.DisableTorchFunctionSubclass():
            own = grad * times
            # A term may have a gradient there, which may not even be finite, and a loss scaler would see it.
            own[own.shape[0] - shard.padding :] = 0
        if main_grad is not None:
            main_grad.add_(own)
            own.zero_()
        return own

    def _times(self, shard: Any) -> int:
        """Factor for a gradient that autograd delivers to ``shard``: 1 if it was scaled or reduced already.

        Raises:
            EtpStateError: if only a part of it may have been scaled or reduced.
        """
        is_right = shard.term_counted == torch._C._current_graph_task_id()
        unseen, shard.used_by_function = shard.used_by_function is not None, None
        if self._config.grad_reduction is GradReduction.MEAN:
            return 1
        is_right = is_right or id(shard) in self.replayed or bool(returned_by_autograd(shard))
        if is_right and unseen:
            raise EtpStateError(
                f"a torch.autograd.Function of your own got the shard {shard.fqn} itself, in this pass or in one that "
                "failed before it. Its gradient must count once per rank, but autograd has added it to one that is "
                "summed over the ranks already: pass the function weight * 1 instead of the weight"
            )
        return 1 if is_right else shard.layout.num_shards

    # Complete gradients --------------------------------------------------------------------------------------

    def complete(
        self, group: WeightGroup, trained: Sequence[Shard], into: Destinations, chosen: Chosen, run_hooks: bool
    ) -> None:
        """Publish the gradients of a finished reduction on their shards, and run the hooks or mark them as owed.

        Args:
            group: the group that was reduced.
            trained: those of its shards that got a gradient.
            into: where the gradients went.
            chosen: None if these are all that are trained.
            run_hooks: False if another pass has begun since the reduction was started.
        """
        if into.fresh:
            into.publish()
        for shard in trained:
            if hasattr(shard, "grad_added_to_main_grad"):
                shard.grad_added_to_main_grad = True
        if self._modes.now.is_part:
            # Only a replay computes the gradient.
            for shard in trained:
                is_returned = getattr(shard, "main_grad", None) is None
                (self.replayed if is_returned else self._told_of_replays).add(id(shard))
        elif not run_hooks:
            pass
        elif chosen is not None:
            # Only these shards' hooks, and not before the pass ends: the shard that reports may not be among them.
            self.owed.update((id(shard), partial(group.run_hooks_of, shard)) for shard in trained)
        elif group in self.used_further:
            self.owed[id(group)] = group.run_reduce_hooks
        else:
            self.owed.pop(id(group), None)
            self.done.add(group)
            group.run_reduce_hooks()

    def run_owed(self) -> None:
        """Run the owed hooks of groups and shards with no reduction in flight; the end of a reduction runs its own."""
        in_flight = {id(one) for pending in self._pending for one in (pending.group, *pending.group.shards)}
        for key in [key for key in self.owed if key not in in_flight]:
            self.owed.pop(key)()

    def _run_when_accumulated(self, shard: Shard) -> None:
        """Run the hooks of ``shard`` once autograd has accumulated the gradient that it is about to deliver."""
        self.brought = id(shard)
        handles = self._handles[id(shard)]
        if len(handles) == 1:
            handles.append(shard.watch_accumulation(partial(self._accumulated, shard)))

    def _accumulated(self, shard: Shard, _: torch.Tensor) -> None:
        """Run the hooks of ``shard`` unless autograd brought nothing, or the end of a reduction runs them."""
        group = shard.weight_group
        if self.brought != id(shard) or id(shard) in self.owed or id(group) in self.owed:
            return
        if group in self.done or group in self._summed:
            return
        own = [pending for pending in self._pending if pending.group is group]
        if not own:
            group.run_hooks_of(shard)
        elif all(pending.belated for pending in own):
            self.owed[id(shard)] = partial(group.run_hooks_of, shard)


def chosen_shards(group: WeightGroup) -> Chosen:
    """The shards of the group that get a gradient from the operation being differentiated.

    A shard that is not an input of this operation counts as named, because autograd does not know of its use. So does
    an input of ``torch.autograd.grad``, as in Megatron's graphs, although its gradient goes to ``main_grad``.
    """
    operation = torch._C._current_autograd_node()
    edges = () if operation is None else operation.next_functions
    nodes = {id(getattr(node, "variable", None)): node for node, _ in edges if node is not None}
    trained, known = group.trained(), [nodes.get(id(shard)) for shard in group.shards]
    try:
        named = [node is None or torch._C._will_engine_execute_node(node) for node in known]
    except RuntimeError:
        # From a shard whose gradient is returned.
        named = [node is None or executes(node) is not False for node in known]
    chosen = map(operator.and_, trained, named)
    return None if (found := tuple(chosen)) == trained else found


def returned_by_autograd(shard: Shard) -> bool | None:
    """Whether the current graph task is a ``torch.autograd.grad`` that returns the gradient of ``shard``.

    Never for a shard with ``main_grad``, because its gradient goes there. None if the task leaves the shard out.
    """
    # Through __torch_function__, these reads would cost more than the reduction.
    with torch._C.DisableTorchFunctionSubclass():
        if not needs_grad(shard) or getattr(shard, "main_grad", None) is not None:
            return None
        # As torch.autograd.graph.get_gradient_edge, which would ask the shard twice whether it is trained.
        with torch.enable_grad():
            view: Any = shard.view_as(shard)
    node = view.grad_fn.next_functions[0][0]
    try:
        # Not :func:`executes`, to save the call in every reduction.
        return False if torch._C._will_engine_execute_node(node) else None
    except RuntimeError as error:
        if not is_asked_for(error):
            raise
        return True


def executes(node: Any) -> bool | None:
    """Whether the current backward pass executes ``node``; None for a leaf's node whose gradient is returned instead.

    ``torch.autograd.grad`` returns it.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if not is_asked_for(error):
            raise
        return None
