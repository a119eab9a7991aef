"""The runtime, which owns the state shared by one model's sharded weights and decides the order of their collectives.

A runtime drives the groups of one model, or of one virtual pipeline stage. It connects its parts, each with one
responsibility: passes (``etp/passes.py``), gathers (``etp/gathers.py``), gradient reductions (``etp/reductions.py``),
and whether work is eager or captured into a CUDA graph (``etp/mode.py``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from etp.chain import Chain
from etp.collectives.base import Transport
from etp.config import EtpConfig, GradReduction
from etp.errors import EtpStateError, PeerMismatchError
from etp.gathers import Gathers
from etp.group import ShardDriver, WeightGroup
from etp.mode import Modes
from etp.param import ETPShardedParam
from etp.passes import Passes, inside_backward
from etp.reductions import Reductions
from etp.replicated import ReplicatedGrads
from etp.routes import Routes
from etp.scalars import GroupScalars
from etp.shard_states import guard_states
from etp.traffic import TrafficCounters
from etp.versions import WeightVersions


class EtpRuntime(ShardDriver):
    """Drives the sharded weights of one model. Made by :func:`etp.shard_module`.

    Args:
        config: options.
        finish_with_backward: finish all reductions when ``backward()`` ends. If False, the caller must call
            :meth:`wait`, as Megatron's gradient finalization does; in a CUDA graph of a whole step, before the capture
            ends.

    Attributes:
        in_forward: whether the adopted module's forward pass is under way.
        modes: whether work is eager or captured, with the gather slots and gradient buffers of each mode.
        sums_gradients: whether gradients are summed over the ranks rather than averaged.
    """

    def __init__(self, config: EtpConfig | None = None, *, finish_with_backward: bool = True) -> None:
        self.config = config or EtpConfig()
        self.finish_with_backward = finish_with_backward
        self.in_forward = False
        self.sums_gradients = self.config.grad_reduction is GradReduction.SUM
        self.groups: list[WeightGroup] = []
        self._routes = Routes(self.config)
        self.modes = Modes(self.config, self.groups)
        self.replicated = ReplicatedGrads(
            self.config.grad_reduction,
            on_collect=lambda: self._passes.enter_backward(),  # noqa: PLW0108  # the passes are made below
            modes=self.modes,
            routes=self._routes,
            timeout_s=self.config.timeout_s,
            fp32_accumulation=self.config.fp32_accumulation,
        )
        self.counters = TrafficCounters(self.groups)
        self._reductions = Reductions(self.config, self._routes, self.modes)
        self._scalars = GroupScalars(self.config.timeout_s, self._routes.watch)
        self._weights = WeightVersions(self.groups, reuse_across_forwards=self.config.reuse_across_forwards)
        self._passes = Passes(
            self.groups, self._reductions, self.replicated, self._weights, at_end=self._finish_backward
        )
        self._gathers = Gathers(self.config, self._routes, self.modes, self._weights, self._passes, self.groups)
        self.modes.parts = (self._reductions, self._gathers, self._routes, self._weights, self._passes)
        self._hooks: list[RemovableHandle] = []
        self._process, self._thread = os.getpid(), threading.get_ident()

    @property
    def chain(self) -> Chain[WeightGroup]:
        """The order in which passes visit the groups."""
        return self._passes.chain

    @property
    def transports(self) -> Mapping[dist.ProcessGroup, Transport]:
        """The transport of each process group that has been used so far."""
        return self._routes.transports

    # Adoption ------------------------------------------------------------------------------------------------

    def adopt(self, module: nn.Module, prefix: str = "") -> None:
        """Drive every sharded parameter under ``module``, and start a forward pass whenever it is called.

        Raises:
            EtpStateError: if a parameter's group belongs to another runtime that cannot release it now.
        """
        self.require_adoptable(module)
        shards = _shards(module)
        groups = _groups(shards)
        for former in self._formers(shards):
            former.release(groups)
            if not former.groups:
                self._routes.take_over(former._routes)
        for name, param in shards.items():
            param.attach(self, f"{prefix}{name}")
        for group in groups:
            self.add(group)
        self._hooks.append(module.register_forward_pre_hook(self._on_root_forward))
        self._hooks.append(module.register_forward_hook(self._after_root_forward))
        self._hooks.append(module.register_forward_hook(self._leave_root_forward, always_call=True))
        self._hooks += guard_states(module)
        self._passes.set_root(module)

    def agree_on_name(self, process_group: dist.ProcessGroup, module: nn.Module) -> None:
        """Agree on a name, so that ranks that use different modules with equal names are detected. Collective."""
        self._routes.agree_on_name(process_group, type(module).__name__)

    def require_adoptable(self, module: nn.Module) -> None:
        """Raise what :meth:`adopt` would raise, before anything is changed."""
        shards = _shards(module)
        for former in self._formers(shards):
            former._require_releasable(_groups(shards))

    def _formers(self, shards: Mapping[str, ETPShardedParam]) -> list[EtpRuntime]:
        """The other runtimes that drive these shards, each once."""
        drivers = {id(param.driver): param.driver for param in shards.values() if param.has_driver}
        return [driver for driver in drivers.values() if driver is not self and isinstance(driver, EtpRuntime)]

    def keep(self, hook: RemovableHandle) -> None:
        """Remove ``hook`` when another runtime adopts this one's groups."""
        self._hooks.append(hook)

    def add(self, group: WeightGroup) -> None:
        """Drive one more group. Its parameters must be attached to this runtime."""
        if not any(group is known for known in self.groups):
            self.groups.append(group)

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop driving these groups, because another runtime adopts them.

        Raises:
            EtpStateError: if this runtime has adopted a module and would keep some of its groups, or if a backward pass
                is in progress.
        """
        kept = self._require_releasable(groups)
        leaving = {id(group) for group in groups}
        self.release_buffers()
        for group in self.groups:
            if id(group) in leaving:
                group.detach()
                self._routes.forget(group)
                self._weights.forget(group)
                group.reset_counts()
        self.groups[:] = kept
        self._passes.forget_orders()
        self._reductions.release(groups)
        if not kept:
            self.replicated.release()
            while self._hooks:
                self._hooks.pop().remove()

    def _require_releasable(self, groups: Sequence[WeightGroup]) -> list[WeightGroup]:
        """Raise EtpStateError if :meth:`release` cannot release these groups now; returns the groups that stay."""
        leaving = {id(group) for group in groups}
        kept = [group for group in self.groups if id(group) not in leaving]
        if kept and self._passes.had_root:
            raise EtpStateError(
                f"a runtime cannot be split: it also drives {kept[0].name}; pass etp.shard_module the module that has "
                "all its weights"
            )
        if self._passes.backward_is_under_way:
            raise EtpStateError("weights change their runtime inside a backward pass; shard modules between steps")
        return kept

    def _on_root_forward(self, module: nn.Module, args: Any) -> None:
        del module, args
        self._require_usable()
        self.in_forward = True
        if inside_backward():
            return
        self.modes.update()
        if self.modes.now.is_part:
            # Weights change between two replays of this capture, so it must publish them itself, once.
            self.modes.begin_step()
            self.mark_weights_changed()
        self._passes.begin_forward()
        if self.modes.now.replays_parts:
            self.publish_weights()

    def _require_usable(self) -> None:
        """Raise EtpStateError where a forward pass could only hang, or be wrong."""
        if os.getpid() != self._process:
            raise EtpStateError(
                f"the model is used in process {os.getpid()} and was sharded in {self._process}: its peers would wait "
                "for each other. Run the model in the main process, not in a DataLoader's worker"
            )
        if self.in_forward and threading.get_ident() != self._thread:
            raise EtpStateError(
                "the model is used by two threads at a time, which would order its collectives by chance: use it in "
                "one thread, or in one after the other"
            )
        self._thread = threading.get_ident()
        if torch._C._functorch.maybe_current_level() is not None:
            raise EtpStateError(
                "a transform of torch.func (vmap, grad, jvp) cannot go through the gathers of sharded weights: "
                "transform the model before etp.shard_module, or pass the modules that need it in replicated_modules"
            )
        if torch._C._get_tracing_state() is not None:
            raise EtpStateError(
                "torch.jit.trace cannot record the gathers of sharded weights: trace the model that "
                "etp.full_state_dict(module) is loaded into"
            )

    def _after_root_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if inside_backward():
            return
        if self.modes.now.capture is not None:
            # The graph may end here, and a pass that deviated from the learned order may have left a gather in flight.
            self._gathers.finish()
        elif not self._passes.may_have_backward():
            self._compare_orders()

    def _leave_root_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self.in_forward = False

    def publish_weights(self) -> None:
        """Make the current weights visible to captured parts of the model that the current stream replays next.

        Forward passes of the sharded module do this automatically. If a captured part is replayed outside of them, call
        this method after every change of weights. Collective.

        Raises:
            EtpStateError: inside a capture.
        """
        if self.modes.capturing:
            raise EtpStateError("publish_weights inside a capture; call it before the graph is replayed")
        for group in {group.process_group: group for group in self.groups}.values():
            route = self._routes.of(group)
            group.read_shards(self._passes.number)
            self._weights.observe(group, route, self._passes.number, in_backward=False)
            route.gather.join()

    def drain(self) -> None:
        """Finish all reductions and gathers in flight, inside or outside of a capture."""
        self.modes.update()
        self._reductions.finish()
        self._gathers.finish()

    # Weights -------------------------------------------------------------------------------------------------

    def mark_weights_changed(self) -> None:
        """Announce a change of weights that PyTorch does not count, such as one by ``torch.distributed``."""
        self._weights.announce_change()

    def materialize(self, group: WeightGroup) -> list[torch.Tensor]:
        """See :class:`etp.group.ShardDriver`. Collective over the group's ranks."""
        if self.modes.possible:
            self.modes.update()
        timeline = self._passes.enter(group)
        if group not in self._reductions.hooks.watched:
            self._reductions.hooks.watch(group)
        return self._gathers.visit(group, timeline)

    def gather_full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """See :class:`etp.group.ShardDriver`. Collective over the group's ranks."""
        return self._gathers.full(group, index)

    # Gradients -----------------------------------------------------------------------------------------------

    def wgrad_buffers(self, group: WeightGroup, dtype: torch.dtype) -> list[torch.Tensor]:
        """See :class:`etp.group.ShardDriver`. Of the weights' logical shape; arbitrary content."""
        if self.modes.possible:
            self.modes.update()
        return self._reductions.buffers(group, dtype)

    def wgrad_buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`etp.group.ShardDriver`. Of the weight's logical shape; arbitrary content."""
        self.modes.update()
        return self._reductions.buffer(group, index, dtype)

    def reduce_wgrads(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """See :class:`etp.group.ShardDriver`. Collective over the group's ranks, now or in :meth:`wait`.

        Raises:
            EtpStateError: if a part of the model is captured and its replays would lose gradients or skip hooks.
        """
        if self.modes.possible:
            self.modes.update()
        self._passes.enter_backward()
        return self._reductions.take(group, wgrads)

    def returns_gradients(self, group: WeightGroup) -> bool:
        """See :class:`etp.group.ShardDriver`, and [Note: returned gradients] in ``etp/reductions.py``."""
        return bool(self._reductions.returns_gradients(group))

    def gradient_norms(
        self, parts: Sequence[torch.Tensor], process_group: dist.ProcessGroup, norm_type: float
    ) -> list[torch.Tensor]:
        """See :class:`etp.group.ShardDriver`. Collective over the process group."""
        return self._scalars.norms(parts, process_group, norm_type)

    def gathered(self, own: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`etp.group.ShardDriver`. Collective over the process group."""
        return self._scalars.gathered(own, process_group, "all-gather of total norms")

    def spread_overflow(self, found: torch.Tensor) -> None:
        """See :class:`etp.group.ShardDriver`. Collective over all process groups of this runtime."""
        # Over all groups, whichever weights overflowed: experts in their own group must not skip a step alone.
        self._scalars.spread(found, list(dict.fromkeys(group.process_group for group in self.groups)))

    def require_complete(self, group: WeightGroup) -> None:
        """See :class:`etp.group.ShardDriver`."""
        self._reductions.require_complete(group)

    def gradient_zeroed(self, group: WeightGroup) -> None:
        """See :class:`etp.group.ShardDriver`."""
        self._reductions.forget_sums(group)

    def _finish_reductions(self, *, compare: bool) -> None:
        """Finish all reductions in flight: every gradient is complete, and hooks of shards have run.

        Args:
            compare: whether the ranks compare the order of their collectives.
        """
        self._reductions.finish()
        self.replicated.announce()
        if compare:
            # First: if orders differ, these parameters would be added to others on other ranks.
            self._compare_orders()
        self.replicated.reduce()

    def _finish_backward(self) -> None:
        if self.finish_with_backward:
            self._finish_reductions(compare=True)
        if self.modes.now.is_part or (self.modes.now.capture is not None and self.finish_with_backward):
            # The graph may end here. Otherwise it ends after a call of wait(), and the next microbatch can hide the
            # last reduction.
            self.drain()

    def wait(self) -> None:
        """Finish all communication; with ``reduce_once_per_iteration``, first reduce the microbatches' local sums."""
        self.modes.update()
        self._passes.drop_abandoned()
        self._reductions.reduce_local_sums()
        self._finish_reductions(compare=not self.finish_with_backward)
        if self.modes.now.capture is not None:
            self.drain()
        self._routes.finish_reading()

    def _compare_orders(self) -> None:
        # Every replay has the captured order, which is not recorded.
        if self.modes.now.capture is not None:
            return
        try:
            self._routes.compare_orders()
        except PeerMismatchError:
            # The slots hold wrong weights. Ranks that have learned different orders, or reserved slots in different
            # orders, would prefetch and reuse differently from now on.
            for group in self.groups:
                group.detach()
            self._passes.forget_orders()
            raise

    def symmetric_memory(self, group: WeightGroup, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for shards that the transport of ``group``'s process group reads in place; None if it does not.

        The owner of shards in this memory must call :meth:`wait` before changing them. Collective over the process
        group.

        Returns:
            ``[numel]`` elements of ``dtype``, zero.
        """
        return self._routes.symmetric_memory(group, numel, dtype)

    # Memory and description ----------------------------------------------------------------------------------

    def release_buffers(self) -> None:
        """Free gather slots and idle gradient buffers, for example before generation; they are reallocated on demand.

        Buffers of CUDA graphs are kept, because replays use them.

        Raises:
            EtpStateError: while a backward pass is in progress.
        """
        if self._passes.backward_is_under_way:
            raise EtpStateError("release_buffers inside a backward pass; call it between steps")
        self.wait()
        self._gathers.release()
        self.modes.now.pool.clear()

    def describe_chain(self) -> str:
        """The learned forward order, one group a line: name, shapes, shards, slot, bytes."""
        return self._gathers.describe_chain()


def _shards(module: nn.Module) -> dict[str, ETPShardedParam]:
    return {name: param for name, param in module.named_parameters() if isinstance(param, ETPShardedParam)}


def _groups(shards: Mapping[str, ETPShardedParam]) -> list[WeightGroup]:
    return list({id(param.weight_group): param.weight_group for param in shards.values()}.values())
