"""The gradient half of a runtime: local sums, reductions in flight, and when hooks may run.

[Note: once a backward] A weight can be used several times in one backward pass. Only autograd knows whether another use
is still to come: it visits the shard's own node once all uses in its graph have been differentiated, even if they all
returned None. Hooks wait for that visit, so that they run once and see the whole gradient, as an unsharded parameter's
hooks do. Several uses in one forward pass (tied weights) are added locally first and reduced once.

[Note: returned gradients] Under ``torch.autograd.grad`` a shard's gradient is returned through autograd. The same holds
in graphed callables: ``torch.cuda.make_graphed_callables`` captures under ``torch.autograd.grad``, Transformer Engine's
version takes what it finds in ``grad``, and both replay inside an autograd function that returns what was captured. The
capture gives them the memory that the reduction fills, the replay returns that memory, autograd accumulates it, and
hooks run after that.

[Note: gradients beside uses] A loss may have a term of the weights themselves, such as a penalty. Each rank
differentiates it by its own shard, and autograd brings that gradient to the shard's node, not to a reduction. It is
ordered after a reduction that adds to the same memory; where gradients are summed over the ranks, each of which has the
term in its loss, it counts once for each. A ``main_grad`` gets it here: Megatron takes what autograd leaves in ``grad``
for a part of what the reduction has added, and drops it. Where Transformer Engine fuses the accumulation, its
placeholder has been added to that gradient, and both are left to be dropped, as Megatron does without shards.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from etp.collectives.base import GradSink
from etp.config import EtpConfig, GradReduction
from etp.errors import EtpStateError
from etp.grads import PendingReduction, gradient_is_absent, gradient_sink, padded_wgrad
from etp.graphs import GraphModes
from etp.group import ReduceState, Shard, WeightGroup
from etp.routes import Routes
from etp.te import te_is_capturing
from etp.traffic import TrafficCounters


class Reductions:
    """Reduces the gradients of one runtime's weight groups.

    Args:
        config: options of the runtime.
        routes: transports and lanes.
        counters: where traffic is counted.
        graphs: whether work is being captured into a CUDA graph, and the buffers for full gradients.
    """

    def __init__(self, config: EtpConfig, routes: Routes, counters: TrafficCounters, graphs: GraphModes) -> None:
        self.pool = graphs.buffers.pool
        self._graphs = graphs
        self._config = config
        self._routes = routes
        self._counters = counters
        self._pending: deque[PendingReduction] = deque()
        self._local_sums: dict[WeightGroup, list[torch.Tensor]] = {}
        self._largest = 0
        self._watched: dict[int, RemovableHandle] = {}
        # By id, since tensors do not compare to a bool. See [Note: once a backward].
        self._used_further: set[int] = set()
        self._hooks_owed: dict[int, Shard] = {}
        self._behind_autograd: dict[int, RemovableHandle] = {}

    def __len__(self) -> int:
        """Number of reductions in flight."""
        return len(self._pending)

    def require_complete(self, group: WeightGroup) -> None:
        """See :class:`etp.shard_grad.GradDriver`.

        Raises:
            EtpStateError: if a gradient of ``group`` has not been fully reduced.
        """
        if group in self._local_sums or any(pending.group is group for pending in self._pending):
            raise EtpStateError(
                f"the gradient of {group.name} is not complete yet, so neither is its norm; call "
                "etp.wait_async_comms(module) after the last backward pass of the iteration"
            )

    @property
    def idle(self) -> bool:
        """Whether every gradient has been reduced into its shards."""
        return not self._pending and not self._local_sums

    def change_mode(self) -> None:
        """A CUDA graph capture begins, with the device idle, or has ended: forget what was in flight."""
        self._pending.clear()
        self._local_sums.clear()
        self._used_further.clear()
        self._hooks_owed.clear()
        self.pool = self._graphs.buffers.pool

    def begin_pass(self) -> None:
        """A new pass begins: mark reductions in flight as belonging to an earlier one."""
        for pending in self._pending:
            pending.belated = True
        self._hooks_owed.clear()

    # One group's gradient ------------------------------------------------------------------------------------

    def buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for one full gradient, of the weight's logical shape; arbitrary content."""
        layout, device = group.shards[index].layout, group.specs[index].device
        self._recycle(layout.padded_shape, dtype, device)
        whole = self.pool.lease(layout.padded_shape, dtype, device)
        return whole if layout.pad_rows == 0 else whole[: layout.rows]

    def take(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Take the group's full gradients of one use, in a backward pass. Collective, unless only added locally.

        Args:
            group: the group whose weights were used.
            wgrads: a gradient of each weight, of its logical shape.

        Returns:
            what to pass to autograd for each shard; None where the sum goes into the shard's ``grad``.

        Raises:
            EtpStateError: if a part is captured whose replays would lose gradients or skip hooks.
        """
        if self._graphs.is_part and self._config.reduce_once_per_iteration:
            raise EtpStateError(
                f"{group.name} is captured in a part of the model, with reduce_once_per_iteration: what its graph adds "
                "up is not seen outside. Capture whole iterations, or reduce each microbatch"
            )
        if self.returns_gradients(group):
            return self._add_returned(group, wgrads)
        if self._graphs.is_part and not _has_main_grads(group) and not te_is_capturing():
            raise EtpStateError(
                f"a backward pass into .grad of {group.name} is captured without the forward pass of the module that "
                "was sharded: its replays would leave out hooks and replicated parameters. Capture the whole step, or "
                "use make_graphed_callables"
            )
        self._add(group, wgrads)
        return [None] * len(group.shards)

    def returns_gradients(self, group: WeightGroup) -> bool:
        """Whether the gradients of the group's shards go to autograd; see [Note: returned gradients]."""
        return not _has_main_grads(group) and any(_returned_by_autograd(shard) for shard in group.shards)

    def _add(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> None:
        padded = [
            padded_wgrad(wgrad, shard.layout.padded_shape, self.pool)
            for shard, wgrad in zip(group.shards, wgrads, strict=True)
        ]
        if self._config.reduce_once_per_iteration or group.used_more_than_once:
            # A weight with several uses (tied embeddings) is reduced once, at the end of the backward pass.
            self._add_locally(group, padded)
        else:
            self._start(group, padded)
            self._used_further.update(key for key in map(id, group.shards) if key in self._watched)

    def _add_returned(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Reduce the group's full gradients for autograd; see [Note: returned gradients]. Collective.

        Returns:
            for each shard its gradient, of the shard's shape; inside a capture, the memory that holds it after a
            replay. None for a frozen shard.
        """
        padded = [
            padded_wgrad(wgrad, shard.layout.padded_shape, self.pool)
            for shard, wgrad in zip(group.shards, wgrads, strict=True)
        ]
        trained = [shard for shard in group.shards if shard.requires_grad]
        sinks = [GradSink(torch.empty_like(shard.local_shard()), accumulate=False) for shard in trained]
        self._start(group, padded, returned=sinks)
        if not self._graphs.is_part or group.used_more_than_once:
            # Autograd reads it right away; a capture of one use only passes it on.
            self._finish_pending()
        if self._graphs.is_part:
            for shard in trained:
                self._run_hooks_behind_autograd(shard)
        filled = iter(sinks)
        return [next(filled).tensor if shard.requires_grad else None for shard in group.shards]

    def _run_hooks_behind_autograd(self, shard: Any) -> None:
        """Run the hooks of ``shard`` when autograd has accumulated a gradient that a replay returned."""
        if id(shard) in self._behind_autograd:
            return

        def accumulated() -> None:
            if any(shard is other for pending in self._pending for other in pending.group.shards):
                self._hooks_owed[id(shard)] = shard
            else:
                shard.run_reduce_hooks()

        self._behind_autograd[id(shard)] = shard.watch_accumulation(accumulated)

    def _start(
        self, group: WeightGroup, padded: list[torch.Tensor], returned: Sequence[GradSink] | None = None
    ) -> None:
        if group.reduce_state is not ReduceState.NONE:
            self._finish_pending()
        is_trained = group.trained()
        trained = list(itertools.compress(group.shards, is_trained))
        wgrads = list(itertools.compress(padded, is_trained))
        sinks = [gradient_sink(shard) for shard in trained] if returned is None else returned  # type: ignore[arg-type]
        divisor = group.size if self._config.grad_reduction is GradReduction.MEAN else 1
        route, label = self._routes.of(group), f"reduce-scatter of {group.name}'s gradient"
        transport = route.transport
        ready = route.reduce.start(lambda: transport.reduce_scatter(wgrads, sinks, divisor, label))
        # Only now: if the start fails, for lack of memory for example, the next step can start it again.
        group.set_reduce_state(ReduceState.ISSUED)
        self._counters.reduced(group, wgrads)
        publish = partial(self._publish, trained, sinks) if returned is None else _nothing_to_publish
        self._pending.append(PendingReduction(group, ready, padded, self.pool, publish))
        # See [Note: deferred accumulation] in etp/grads.py.
        self._largest = max(self._largest, self._pending[-1].nbytes)
        while len(self._pending) > 1 and sum(p.nbytes for p in self._pending) > 2 * self._largest:
            self._pending.popleft().finish()

    def _recycle(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Finish reductions that keep a buffer of this shape, except the newest, rather than allocate another."""
        if self.pool.has_free(shape, dtype, device):
            return
        older = list(self._pending)[:-1]
        oldest_holder = next((i for i, p in enumerate(older) if p.holds(shape, dtype, device)), -1)
        for _ in range(oldest_holder + 1):
            self._pending.popleft().finish()

    def _publish(self, shards: Sequence[Any], sinks: Sequence[GradSink], run_hooks: bool) -> None:
        for shard, sink in zip(shards, sinks, strict=True):
            if not sink.accumulate:
                if shard.grad is None:
                    shard.grad = sink.tensor
                else:
                    # Autograd has put a gradient there meanwhile, for example of a penalty on the shard itself.
                    shard.grad.add_(sink.tensor)
            if hasattr(shard, "grad_added_to_main_grad"):
                shard.grad_added_to_main_grad = True
            if self._graphs.is_part:
                # Nothing is there before a replay.
                if getattr(shard, "main_grad", None) is None:
                    self._run_hooks_behind_autograd(shard)
            elif not run_hooks:
                continue
            elif id(shard) in self._used_further:
                self._hooks_owed[id(shard)] = shard
            else:
                self._hooks_owed.pop(id(shard), None)
                shard.run_reduce_hooks()

    # Uses in one backward pass -------------------------------------------------------------------------------

    def watch(self, group: WeightGroup) -> None:
        """Register to learn from autograd when all uses of the group's shards are differentiated; at every visit."""
        for shard in group.shards:
            # In this order, because reading requires_grad of a tensor subclass is slow.
            if id(shard) not in self._watched and shard.requires_grad:
                self._watched[id(shard)] = shard.watch_uses(partial(self._differentiated, shard))

    def _differentiated(self, shard: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        """All uses of ``shard`` in the graph are differentiated; see [Note: gradients beside uses].

        Args:
            shard: the shard.
            grad: what autograd itself brings, or None.

        Returns:
            what autograd shall add, in memory of its own: a replay would overwrite what a graphed callable returns.
            None leaves it as it is: a placeholder, or what the capture of a part returns and may not be there yet.
        """
        own = None
        is_placeholder = shard.take_placeholder()
        if grad is not None and not is_placeholder and not (self._graphs.is_part and _captured_now(grad)):
            for pending in self._pending:
                if any(shard is other for other in pending.group.shards):
                    pending.order()
            own = grad * self._times(shard)
            main_grad: torch.Tensor | None = getattr(shard, "main_grad", None)
            if main_grad is not None:
                main_grad.add_(own)
                own.zero_()
        self._used_further.discard(id(shard))
        return own

    def _times(self, shard: Any) -> int:
        """How often a gradient counts that autograd brings to ``shard``; once if it has been reduced already."""
        if self._config.grad_reduction is GradReduction.MEAN:
            return 1
        reduced = id(shard) in self._behind_autograd or _returned_by_autograd(shard)
        return 1 if reduced else shard.layout.num_shards

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop watching these groups."""
        for shard in (shard for group in groups for shard in group.shards):
            for watched in (self._watched, self._behind_autograd):
                handle = watched.pop(id(shard), None)
                if handle is not None:
                    handle.remove()

    def end_backward(self) -> None:
        """End the pass: the graph has no further uses of any weight."""
        # Including weights that autograd never visited, because their consumer hid them from it.
        self._used_further.clear()
        if not self._config.reduce_once_per_iteration:
            self.reduce_local_sums()
        self._run_owed_hooks()

    def _run_owed_hooks(self) -> None:
        """Run the deferred hooks of shards that have no reduction in flight; finishing a reduction runs the others."""
        pending = {id(shard) for reduction in self._pending for shard in reduction.group.shards}
        for shard_id in [key for key in self._hooks_owed if key not in pending]:
            self._hooks_owed.pop(shard_id).run_reduce_hooks()

    # Local sums ----------------------------------------------------------------------------------------------

    def _add_locally(self, group: WeightGroup, padded: list[torch.Tensor]) -> None:
        sums = self._local_sums.get(group)
        if sums is None or self._was_dropped(group):
            self._expect_gradients(group)
            wide = torch.float32 if self._config.fp32_accumulation else padded[0].dtype
            dtype = torch.promote_types(padded[0].dtype, wide)
            self._local_sums[group] = [wgrad.to(dtype, copy=True) for wgrad in padded]
        else:
            for total, wgrad in zip(sums, padded, strict=True):
                total.add_(wgrad)
        for wgrad in padded:
            if self.pool.owns(wgrad):
                self.pool.restore(wgrad)

    def _expect_gradients(self, group: WeightGroup) -> None:
        """Set gradients that are reduced only at the iteration's end to zeros, so that ``zero_grad()`` is detected."""
        if self._config.reduce_once_per_iteration:
            for param in group.shards:
                if gradient_is_absent(param):
                    param.grad = torch.zeros_like(param.local_shard())  # type: ignore[attr-defined]

    def _was_dropped(self, group: WeightGroup) -> bool:
        """Whether ``zero_grad()`` was called after the first microbatch, so that the iteration was abandoned."""
        return self._config.reduce_once_per_iteration and any(gradient_is_absent(param) for param in group.shards)

    def forget_sums(self, group: WeightGroup) -> None:
        """Drop the local sums of ``group``, because its gradient was set to zero within the iteration."""
        self._local_sums.pop(group, None)

    def reduce_local_sums(self) -> None:
        """Start reducing the local sums. Collective."""
        sums, self._local_sums = self._local_sums, {}
        for group, totals in sums.items():
            if not self._was_dropped(group):
                self._start(group, totals)

    # Ends ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Finish all reductions in flight: their gradients are complete and their hooks have run."""
        self._finish_pending()
        self._run_owed_hooks()

    def _finish_pending(self) -> None:
        while self._pending:
            self._pending.popleft().finish()

    def discard(self) -> None:
        """Drop the gradients of a backward pass that ended in an exception: they are incomplete."""
        while self._pending:
            self._pending.popleft().discard()
        self.pool.write_off()
        self._local_sums.clear()
        self._used_further.clear()
        self._hooks_owed.clear()


def _has_main_grads(group: WeightGroup) -> bool:
    return any(getattr(shard, "main_grad", None) is not None for shard in group.shards)


def _returned_by_autograd(shard: Any) -> bool:
    """Whether the current graph task is a ``torch.autograd.grad`` that returns the gradient of ``shard``.

    Never for a shard with ``main_grad``, because its gradient goes there.
    """
    if not shard.requires_grad or getattr(shard, "main_grad", None) is not None:
        return False
    node = torch.autograd.graph.get_gradient_edge(shard).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # What autograd answers for a leaf whose gradient torch.autograd.grad was asked for.
        if "autograd.grad" not in str(error):
            raise
        return True
    return False


def _nothing_to_publish(run_hooks: bool) -> None:
    """Do nothing: autograd delivers the gradient."""
    del run_hooks


def _captured_now(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
