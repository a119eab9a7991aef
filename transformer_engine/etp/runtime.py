"""The owner of everything that one model's sharded weights share, and the order in which their collectives run.

A runtime drives the groups of one model, or of one virtual pipeline stage: it alone decides when a gather or a
reduction is started and finished. Passes are delimited as follows. A *forward pass* begins when the adopted module
is called, at the first forward visit after a backward one, or when its first group is visited again. A *backward
pass* begins at the first visit inside an autograd graph task and ends when that task does; activation recompute
happens inside it.

[Note: reuse] In a backward pass, a weight that its slot still holds is handed out without a gather: between a
forward and its backward, weights do not change. A forward pass gathers every weight, unless
``EtpConfig.reuse_across_forwards`` says that all changes of weights are counted or announced. These rules use
nothing that could differ between ranks, so all ranks skip the same gathers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from etp.cache import BufferCache
from etp.chain import Chain, Timeline
from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.config import EtpConfig
from etp.errors import EtpStateError
from etp.grads import WgradPool
from etp.graphs import Buffers, GraphModes
from etp.group import WeightGroup
from etp.param import ETPShardedParam
from etp.reductions import Reductions, returned_by_autograd
from etp.replicated import ReplicatedGrads
from etp.routes import Routes
from etp.scalars import GroupScalars
from etp.streams import Lane
from etp.te import te_is_capturing
from etp.traffic import TrafficCounters
from etp.versions import InPlaceTransport, PublishingTransport, WeightVersions

logger = logging.getLogger(__name__)

# Entries of a timeline that a visit looks at when it decides what to prefetch: bounds the host's work per visit.
_LOOKAHEAD = 8
# Visits to one group that a single forward pass may have, on average, before it is taken for many passes.
_MOST_VISITS = 64


class _BackwardToken:
    """Lives as long as autograd's graph task does: the task's callback holds the only reference."""


class EtpRuntime:
    """Drives the sharded weights of one model. Made by :func:`etp.shard_module`.

    Args:
        config: options.
        finish_with_backward: finish all reductions when ``backward()`` ends. Without it the caller must call
            :meth:`wait`, as Megatron's gradient finalisation does.
    """

    def __init__(self, config: EtpConfig | None = None, *, finish_with_backward: bool = True) -> None:
        self.config = config or EtpConfig()
        self.finish_with_backward = finish_with_backward
        self.chain: Chain[WeightGroup] = Chain()
        self.groups: list[WeightGroup] = []
        self.replicated = ReplicatedGrads(
            self.config.grad_reduction,
            on_collect=self._enter_backward,
            is_captured=lambda: self._graphs.is_part,
            fp32_accumulation=self.config.fp32_accumulation,
        )
        self._graphs = GraphModes(lambda: BufferCache(self.config.prefetch_depth + 1, self.config.resident_bytes))
        self.counters = TrafficCounters()
        self._routes = Routes(self.config)
        self._reductions = Reductions(self.config, self._routes, self.counters, self._graphs)
        self._scalars = GroupScalars(self.config.timeout_s)
        self._in_use: WeightGroup | None = None
        self._pass_number = 0
        self._weights = WeightVersions(
            self.groups,
            reuse_across_forwards=self.config.reuse_across_forwards,
            before_publication=self._routes.order_publication,
        )
        self._largest_group = 0
        self._backward_token: weakref.ref[_BackwardToken] | None = None
        self._in_backward_run = False
        self._root: weakref.ref[nn.Module] | None = None
        self._hooks: list[RemovableHandle] = []
        self.drained_after_parts = False
        """Whether :meth:`drain` is called at the end of each captured part; its forward gathers ahead only then."""
        self._sees_optimizer_steps = False
        if self.config.reuse_across_forwards:
            self._watch_optimizer_steps()

    @property
    def cache(self) -> BufferCache:
        """Where gathers land, in the mode (inside or outside of a CUDA graph) that the runtime is in."""
        return self._graphs.buffers.cache

    @property
    def wgrad_pool(self) -> WgradPool:
        """Where buffers for full gradients come from, in that mode."""
        return self._reductions.pool

    @property
    def buffers(self) -> Sequence[Buffers]:
        """What gathers and gradients of both modes use."""
        return self._graphs.all_buffers

    @property
    def transports(self) -> Mapping[dist.ProcessGroup, Transport]:
        """What moves shards, for each process group that was used so far."""
        return self._routes.transports

    # Adoption ------------------------------------------------------------------------------------------------

    def adopt(self, module: nn.Module, prefix: str = "") -> None:
        """Drive every sharded parameter under ``module``, and start a forward pass whenever it is called.

        Raises:
            EtpStateError: if a parameter's group already belongs to a runtime that has work under way.
        """
        shards = {name: p for name, p in module.named_parameters() if isinstance(p, ETPShardedParam)}
        groups = {id(param.weight_group): param.weight_group for param in shards.values()}
        for former in {id(p.driver): p.driver for p in shards.values() if p.has_driver}.values():
            if former is not self and isinstance(former, EtpRuntime):
                former.release(list(groups.values()))
        for name, param in shards.items():
            param.attach(self, f"{prefix}{name}")
        for group in groups.values():
            self.add(group)
        self._hooks.append(module.register_forward_pre_hook(self._on_root_forward))
        self._root = weakref.ref(module)

    def add(self, group: WeightGroup) -> None:
        """Drive one more group. Its parameters must be attached to this runtime."""
        if not any(group is known for known in self.groups):
            self.groups.append(group)

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop driving these groups, because another runtime adopts them.

        Raises:
            EtpStateError: if this runtime was given a module with replicated parameters and would keep part of it.
        """
        leaving = {id(group) for group in groups}
        kept = [group for group in self.groups if id(group) not in leaving]
        if kept and self._root is not None:
            raise EtpStateError(
                f"a runtime cannot be split: it also drives {kept[0].name}; adopt the module that has all its weights"
            )
        self.release_buffers()
        for group in self.groups:
            if id(group) in leaving:
                group.detach()
        self.groups[:] = kept
        self.chain = Chain()
        self._reductions.release(groups)
        if not kept:
            self.replicated.release()
            while self._hooks:
                self._hooks.pop().remove()

    def _on_root_forward(self, module: nn.Module, args: Any) -> None:
        del module, args
        if _inside_backward():
            return
        self._sync_mode()
        if self._graphs.is_part:
            # Weights change between two replays of this capture: it has to publish them itself, once.
            self._graphs.whole = True
            self.mark_weights_changed()
        self._begin_forward()
        if self._graphs.has_parts and self._graphs.capture is None:
            self.publish_weights()

    # CUDA graphs: see [Note: graphs] in etp/graphs.py -------------------------------------------------------

    @property
    def capturing(self) -> bool:
        """Whether sharded weights are being captured into a CUDA graph."""
        self._sync_mode()
        return self._graphs.capture is not None

    def _sync_mode(self) -> None:
        """Notice that a capture has begun or ended since the last call."""
        if not self.groups:
            return
        capture = self._graphs.current_capture(self.groups[0].specs[0].device)
        if capture == self._graphs.capture:
            return
        if self._graphs.capture is not None:
            self._leave_capture()
        if capture is not None:
            self._enter_capture(capture)

    def _enter_capture(self, capture: int) -> None:
        if not self._reductions.idle:
            raise EtpStateError(
                f"a CUDA graph is being captured while {len(self._reductions)} gradients are on their way, or others "
                "only added up; call etp.wait_async_comms(module) before the capture"
            )
        self._graphs.enter(capture)
        self._change_mode(replayed_unseen=False)
        self._watch_optimizer_steps()

    def _leave_capture(self) -> None:
        was_whole = self._graphs.leave()
        self._change_mode(replayed_unseen=was_whole)

    def _change_mode(self, *, replayed_unseen: bool) -> None:
        capturing = self._graphs.capture is not None
        for group in self.groups:
            group.change_mode()
        self._reductions.change_mode()
        self._routes.change_mode(capturing=capturing)
        self._weights.change_mode(capturing=capturing, replayed_unseen=replayed_unseen)
        self._in_use = self._backward_token = None
        self._in_backward_run = False
        self._pass_number += 1
        self.chain.begin_forward()

    def publish_weights(self) -> None:
        """Let captured parts of the model see the weights as they are now, in whatever the current stream runs next.

        Forward passes of the sharded module do it by themselves. Call it where a captured part is replayed outside of
        them, after every change of weights. Collective.

        Raises:
            EtpStateError: inside a capture.
        """
        if self.capturing:
            raise EtpStateError("publish_weights inside a capture; call it before the graph is replayed")
        for group in {group.process_group: group for group in self.groups}.values():
            lane = self._routes.gather_lane(group)
            self._weights.observe(group, lane, self._routes.transport(group), in_backward=False)
            lane.join()

    def drain(self) -> None:
        """Finish all that was started, inside a capture or outside: a graph must not leave work behind."""
        self._sync_mode()
        self._reductions.finish()
        for group in self.groups:
            group.abandon_gather()

    def _watch_optimizer_steps(self) -> None:
        if not self._sees_optimizer_steps:
            self._sees_optimizer_steps = True
            _announce_optimizer_steps(self)

    # Weights -------------------------------------------------------------------------------------------------

    def mark_weights_changed(self) -> None:
        """Announce a change of weights that PyTorch does not count, such as a write through ``param.data``."""
        self._weights.epoch += 1

    def materialize(self, group: WeightGroup) -> list[torch.Tensor]:
        """See :class:`etp.param.ShardDriver`. Collective over the group's ranks."""
        self._sync_mode()
        timeline = self._enter(group)
        timeline.visit(group)
        group.attach(self.cache)
        self._reductions.watch(group)
        lane = self._routes.gather_lane(group)
        if self._in_use is not None:
            self._in_use.read_until_here(lane)
        self._observe(group, lane)
        if not self._usable(group):
            self._make_room(group)
            self._issue(group, lane)
        weights = group.take(lane)
        self._in_use = group
        if self._prefetches(timeline):
            self._prefetch(timeline)
        return weights

    def _prefetches(self, timeline: Timeline[WeightGroup]) -> bool:
        """Whether to gather ahead: not what nobody might take before the end of a graph, which must join it."""
        if not self._graphs.is_part:
            return True
        return timeline.knows_pass and (self._in_backward_run or self.drained_after_parts)

    def _observe(self, group: WeightGroup, lane: Lane) -> None:
        transport = self._routes.transport(group)
        if not self._graphs.is_part:
            self._weights.observe(group, lane, transport, in_backward=self._in_backward_run)
        elif isinstance(transport, PublishingTransport) and not self._has_root():
            raise EtpStateError(
                f"{group.name} is captured into a CUDA graph, and nothing outside of the graph would tell it when the "
                "weight changes: pass the module whose forward replays the graph to etp.shard_module, or use the c10d "
                "transport"
            )

    def gather_full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """See :class:`etp.param.ShardDriver`. Collective over the group's ranks."""
        shard = group.shards[index]
        layout = shard.layout
        local = shard.local_shard()
        full = local.new_empty(layout.padded_shape)
        # Not by the group's own transport: that may move shards as they were when they were last published.
        transport = C10dTransport(group.process_group, fp32_accumulation=True, timeout_s=self.config.timeout_s)
        label = f"all-gather of {shard.fqn} (full tensor)"
        self._routes.gather_lane(group).start(lambda: transport.all_gather([full], [local], label)).wait()
        return full[: layout.rows] if layout.pad_rows == 0 else full[: layout.rows].clone()

    def _enter(self, group: WeightGroup) -> Timeline[WeightGroup]:
        if _inside_backward():
            self._enter_backward()
            return self.chain.backward
        forward = self.chain.forward
        revisits_head = forward.head is group and not self._has_root()
        # Without a backward pass or a call of the root, nothing ends a pass; do not record visits for ever.
        if self._in_backward_run or revisits_head or len(forward) > _MOST_VISITS * len(self.groups):
            self._begin_forward()
        elif forward.seen(group) and self._may_have_backward():
            group.used_more_than_once = True
        return forward

    def _may_have_backward(self) -> bool:
        """Whether the forward pass under way can be differentiated: not while evaluating.

        Reentrant checkpointing runs its forward without gradients, so the module's mode counts too.
        """
        root = self._root() if self._root is not None else None
        return torch.is_grad_enabled() or root is None or root.training

    def _has_root(self) -> bool:
        return self._root is not None and self._root() is not None

    def _begin_forward(self) -> None:
        if self._backward_is_abandoned():
            self._discard_reductions()
        self._in_backward_run = False
        self._pass_number += 1
        self._reductions.begin_pass()
        self._weights.begin_forward()
        self.chain.begin_forward()
        self.replicated.watch()

    def _enter_backward(self) -> None:
        if self._backward_token is not None and self._backward_token() is not None:
            return
        if self._backward_is_abandoned():
            self._discard_reductions()
        token = _BackwardToken()
        self._backward_token = weakref.ref(token)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, token))
        self._in_backward_run = True
        self._pass_number += 1
        self._reductions.begin_pass()
        self.chain.begin_backward()

    def _backward_is_abandoned(self) -> bool:
        # The end callback resets the reference; a dead one means that the task died in an exception.
        return self._backward_token is not None and self._backward_token() is None

    def _end_backward(self, token: _BackwardToken) -> None:
        del token
        self._reductions.end_backward()
        if self.finish_with_backward:
            self.finish_reductions()
        if self._graphs.capture is not None:
            self.drain()
        # Last: if a hook raised above, the pass counts as abandoned and the rest of its gradients are dropped.
        self._backward_token = None

    def _usable(self, group: WeightGroup) -> bool:
        if not group.holds(self._weights.epoch):
            return False
        if self._in_backward_run or self._weights.trusted:
            return True
        return group.pending and group.issued_in_pass == self._pass_number

    def _make_room(self, group: WeightGroup) -> None:
        group.abandon_gather()
        if group.slot.tenant is not None:
            group.slot.tenant.abandon_gather()

    def _issue(self, group: WeightGroup, lane: Lane) -> None:
        self._largest_group = max(self._largest_group, group.nbytes)
        self.counters.gathered(group)
        waits = self._weights.gather_waits(group, lane, self._routes.transport(group))
        group.issue_gather(
            self._routes.transport(group), lane, pass_number=self._pass_number, epoch=self._weights.epoch, waits=waits
        )

    def _prefetch(self, timeline: Timeline[WeightGroup]) -> None:
        """Start what comes next, until ``prefetch_depth`` times the largest group's bytes are under way."""
        budget = self.config.prefetch_depth * self._largest_group
        if budget == 0:
            return
        in_flight = 0
        spoken_for = {id(self._in_use.slot)} if self._in_use is not None else set()
        for count, group in enumerate(timeline.upcoming()):
            if count == _LOOKAHEAD or in_flight >= budget:
                return
            group.attach(self.cache)
            slot = id(group.slot)
            if self._usable(group):
                in_flight += group.nbytes if group.pending else 0
            elif slot in spoken_for or not self._may_prefetch(group):
                return
            else:
                self._make_room(group)
                self._issue(group, self._routes.gather_lane(group))
                in_flight += group.nbytes
            spoken_for.add(slot)

    def _may_prefetch(self, group: WeightGroup) -> bool:
        return self._graphs.is_part or self._weights.is_observed(group, self._routes.transport(group))

    # Gradients -----------------------------------------------------------------------------------------------

    def wgrad_buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`etp.param.ShardDriver`. Of the weight's logical shape; arbitrary content."""
        self._sync_mode()
        return self._reductions.buffer(group, index, dtype)

    def reduce_wgrads(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """See :class:`etp.param.ShardDriver`. Collective over the group's ranks, now or in :meth:`wait`.

        Raises:
            EtpStateError: if a part is captured whose gradients are only added up, outside of the graph.
        """
        self._sync_mode()
        self._enter_backward()
        if self._graphs.is_part and self.config.reduce_once_per_iteration:
            raise EtpStateError(
                f"{group.name} is captured in a part of the model, with reduce_once_per_iteration: what its graph adds "
                "up is not seen outside. Capture whole iterations, or reduce each microbatch"
            )
        if self.returns_gradients(group):
            return self._reductions.add_returned(group, wgrads)
        if self._graphs.is_part and not self._has_main_grads(group) and not te_is_capturing():
            raise EtpStateError(
                f"a backward pass into .grad of {group.name} is captured without the forward pass of the module that "
                "was sharded: its replays would leave out hooks and replicated parameters. Capture the whole step, or "
                "use make_graphed_callables"
            )
        self._reductions.add(group, wgrads)
        return [None] * len(group.shards)

    def returns_gradients(self, group: WeightGroup) -> bool:
        """See :class:`etp.param.ShardDriver`, and [Note: returned gradients] in ``etp/reductions.py``."""
        return not self._has_main_grads(group) and any(returned_by_autograd(shard) for shard in group.shards)

    @staticmethod
    def _has_main_grads(group: WeightGroup) -> bool:
        return any(getattr(shard, "main_grad", None) is not None for shard in group.shards)

    def gradient_norms(
        self, parts: Sequence[torch.Tensor], process_group: dist.ProcessGroup, norm_type: float
    ) -> list[torch.Tensor]:
        """See :class:`etp.shard_grad.GradDriver`. Collective over the process group."""
        return self._scalars.norms(parts, process_group, norm_type)

    def gathered(self, own: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`etp.param.ShardDriver`. Collective over the process group."""
        return self._scalars.gathered(own, process_group, "all-gather of total norms")

    def spread_overflow(self, found: torch.Tensor) -> None:
        """See :class:`etp.shard_grad.GradDriver`. Collective over all process groups of this runtime."""
        # All of them, whichever weights overflowed: experts in a group of their own must not skip a step alone.
        self._scalars.spread(found, list(dict.fromkeys(group.process_group for group in self.groups)))

    def require_complete(self, group: WeightGroup) -> None:
        """See :class:`etp.shard_grad.GradDriver`.

        Raises:
            EtpStateError: if the group's gradient is still on its way.
        """
        if self._reductions.is_incomplete(group):
            raise EtpStateError(
                f"the gradient of {group.name} is not complete yet, so neither is its norm; call "
                "etp.wait_async_comms(module) after the last backward pass of the iteration"
            )

    def gradient_zeroed(self, group: WeightGroup) -> None:
        """See :class:`etp.shard_grad.GradDriver`."""
        self._reductions.forget_sums(group)

    def finish_reductions(self) -> None:
        """Finish all reductions under way; every shard's gradient is complete and its hooks have run."""
        self._reductions.finish()
        self.replicated.reduce(self.config.timeout_s)

    def wait(self) -> None:
        """Finish all communication; with ``reduce_once_per_iteration``, reduce what the microbatches added up."""
        self._sync_mode()
        if self._backward_is_abandoned():
            self._discard_reductions()
            self._backward_token = None
        self._reductions.reduce_local_sums()
        self.finish_reductions()
        if self._graphs.capture is not None:
            self.drain()
        self._routes.finish_reading()

    def watch_replays(self) -> None:
        """End the process if a replay that the current stream was given waits for a peer longer than the time-out."""
        self._routes.watch_replays()

    def symmetric_memory(self, group: WeightGroup, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for shards of ``group``'s process group that its transport reads in place; None if it reads none.

        Whoever keeps shards there calls :meth:`wait` before changing them. Collective over the process group.

        Returns:
            ``[numel]`` elements of ``dtype``, zero.
        """
        transport = self._routes.transport(group)
        return transport.symmetric_memory(numel, dtype) if isinstance(transport, InPlaceTransport) else None

    def _discard_reductions(self) -> None:
        """Forget the gradients of a backward pass that ended in an exception: half of them are missing anyway."""
        logger.info("a backward pass was abandoned; dropping %d reductions under way", len(self._reductions))
        self._reductions.discard()
        self.replicated.discard()
        self._backward_token = None

    # Memory and description ----------------------------------------------------------------------------------

    def release_buffers(self) -> None:
        """Free gather slots and idle gradient buffers, e.g. before generation; they come back on demand.

        Those of CUDA graphs stay: a replay uses them.

        Raises:
            EtpStateError: while a backward pass is under way.
        """
        if self._backward_token is not None and self._backward_token() is not None:
            raise EtpStateError("release_buffers inside a backward pass; call it between steps")
        self.wait()
        for group in self.groups:
            group.abandon_gather()
        self._in_use = None
        self.cache.clear()
        self.wgrad_pool.clear()

    def describe_chain(self) -> str:
        """The learned forward order, one group a line: name, shapes, shards, slot, bytes."""
        order = self.chain.forward.learned or self.chain.forward.visits
        lines = [f"chain of {len(order)} weight groups, prefetch depth {self.config.prefetch_depth}"]
        slots = {id(slot): number for number, slot in enumerate(self.cache.slots())}
        for group in order:
            shapes = " ".join(str(list(shard.layout.shape)) for shard in group.shards[:1])
            lines.append(
                f"  {group.name}: {shapes} over {group.size} ranks, slot {slots[id(group.slot)]}, {group.nbytes} bytes"
            )
        return "\n".join(lines)


def _announce_optimizer_steps(runtime: EtpRuntime) -> None:
    """Let every optimizer step announce a change of weights: PyTorch does not count what fused optimizers write."""
    reference = weakref.ref(runtime)

    def announce(optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        stepped = reference()
        if stepped is not None:
            stepped.mark_weights_changed()
            stepped.watch_replays()

    handle = register_optimizer_step_post_hook(announce)
    weakref.finalize(runtime, handle.remove)


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
