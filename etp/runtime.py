"""The runtime, which creates and connects the parts that drive one model's sharded weights, and finishes their work.

A runtime drives the groups of one model, or of one virtual pipeline stage. Each part has one responsibility: passes
(``etp/passes.py``), gathers (``etp/gathers.py``), gradient reductions (``etp/reductions.py``), gradients of other
parameters (``etp/replicated.py``), and whether work is eager or captured into a CUDA graph (``etp/mode.py``). Shards
call the parts themselves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from etp.config import EtpConfig, GradReduction
from etp.errors import EtpStateError, PeerMismatchError
from etp.gathers import Gathers
from etp.group import WeightGroup
from etp.mode import Modes
from etp.param import ETPShardedParam
from etp.passes import Passes, inside_backward
from etp.reductions import Reductions
from etp.replicated import ReplicatedGrads
from etp.routes import Routes
from etp.shard import uncompiled
from etp.shard_states import guard_states
from etp.traffic import TrafficCounters
from etp.versions import WeightVersions


class EtpRuntime:
    """Drives the sharded weights of one model. Made by :func:`etp.shard_module`.

    Args:
        config: options.
        finish_with_backward: finish all reductions when ``backward()`` ends. If False, the caller must call
            :meth:`wait`, as Megatron's gradient finalization does; in a CUDA graph of a whole step, before the capture
            ends.

    Attributes:
        in_forward: whether the adopted module's forward pass is under way.
        groups: the weight groups that it drives.
        counters: counts of collectives and of the bytes that they moved.
        routes: the transport of each process group.
        modes: whether work is eager or captured, with the gather slots and gradient buffers of each mode.
        passes: the current pass, and the learned order of visits.
        gathers: gathers weights.
        reductions: reduces the gradients of shards.
        replicated: combines the gradients of replicated parameters.
        sums_gradients: whether gradients are summed over the ranks rather than averaged.
    """

    def __init__(self, config: EtpConfig | None = None, *, finish_with_backward: bool = True) -> None:
        self.config = config or EtpConfig()
        self.finish_with_backward = finish_with_backward
        self.in_forward = False
        self.sums_gradients = self.config.grad_reduction is GradReduction.SUM
        self.groups: list[WeightGroup] = []
        self.counters = TrafficCounters(self.groups)
        self.routes = Routes(self.config)
        self.modes = Modes(self.config, self.groups)
        self._weights = WeightVersions(self.groups, reuse_across_forwards=self.config.reuse_across_forwards)
        self.passes = Passes(self.groups, self._weights, at_end=self._finish_backward)
        self.reductions = Reductions(self.config, self.routes, self.modes, self.passes)
        self.replicated = ReplicatedGrads(self.config, self.routes, self.modes, self.passes)
        self.gathers = Gathers(self.config, self.routes, self.modes, self._weights, self.passes, self.groups)
        self.passes.collectors = (self.reductions, self.replicated)
        parts = (self.reductions, self.gathers, self.routes, self._weights, self.passes)
        self.modes.parts = tuple(part.change_mode for part in parts)
        self._hooks: list[RemovableHandle] = []
        self._process, self._thread = os.getpid(), threading.get_ident()

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Every process group over which it shards weights, in the same order on all ranks."""
        return list(dict.fromkeys(group.process_group for group in self.groups))

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
                self.routes.take_over(former.routes)
        for name, param in shards.items():
            param.attach(self, f"{prefix}{name}")
        for group in groups:
            self.add(group)
        self._hooks.append(module.register_forward_pre_hook(self._on_root_forward))
        self._hooks.append(module.register_forward_hook(self._after_root_forward))
        self._hooks.append(module.register_forward_hook(self._leave_root_forward, always_call=True))
        self._hooks += guard_states(module)
        self.passes.set_root(module)

    def require_adoptable(self, module: nn.Module) -> None:
        """Raise what :meth:`adopt` would raise, before anything is changed."""
        shards = _shards(module)
        for former in self._formers(shards):
            former._require_releasable(_groups(shards))

    def _formers(self, shards: Mapping[str, ETPShardedParam]) -> list[EtpRuntime]:
        """The other runtimes that drive these shards, each once."""
        driven = (param for param in shards.values() if param.has_driver)
        return [runtime for runtime in runtimes_driving(driven) if runtime is not self]

    def keep(self, hook: RemovableHandle) -> None:
        """Remove ``hook`` when another runtime adopts this one's groups."""
        self._hooks.append(hook)

    def add(self, group: WeightGroup) -> None:
        """Drive one more group. Its parameters must be attached to this runtime."""
        if group not in self.groups:
            self.groups.append(group)
            self.reductions.hooks.watch(group)

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop driving these groups, because another runtime adopts them.

        Raises:
            EtpStateError: if this runtime has adopted a module and would keep some of its groups, or if a backward pass
                is in progress.
        """
        kept = self._require_releasable(groups)
        leaving = set(groups)
        self.release_buffers()
        for group in self.groups:
            if group in leaving:
                group.detach()
                group.route = None
                self._weights.forget(group)
                group.reset_counts()
        self.groups[:] = kept
        self.passes.forget_orders()
        self.reductions.release(groups)
        if not kept:
            self.replicated.release()
            while self._hooks:
                self._hooks.pop().remove()

    def _require_releasable(self, groups: Sequence[WeightGroup]) -> list[WeightGroup]:
        """Raise EtpStateError if :meth:`release` cannot release these groups now; returns the groups that stay."""
        leaving = set(groups)
        kept = [group for group in self.groups if group not in leaving]
        if kept and self.passes.had_root:
            raise EtpStateError(
                f"a runtime cannot be split: it also drives {kept[0].name}; pass etp.shard_module the module that has "
                "all its weights"
            )
        if self.passes.backward_is_under_way:
            raise EtpStateError("weights change their runtime inside a backward pass; shard modules between steps")
        return kept

    def _on_root_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            uncompiled(self._on_root_forward, module, args)
            return
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
        self.passes.begin_forward()
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
        if torch.compiler.is_dynamo_compiling():
            uncompiled(self._after_root_forward, module, args, output)
            return
        del module, args, output
        if inside_backward():
            return
        if self.modes.now.capture is not None:
            # The graph may end here, and a pass that deviated from the learned order may have left a gather in flight.
            self.gathers.finish()
        elif not self.passes.may_have_backward():
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
        # One group stands for all of its process group, preferably one in a format, which is published with every
        # transport.
        ordered = sorted(self.groups, key=lambda group: group.format is not None)
        for group in {group.process_group: group for group in ordered}.values():
            route = self.routes.of(group)
            group.read_shards(self.passes.number)
            changed = group
            if group.is_published and group.is_observed(self._weights.stamp):
                # PyTorch counts the changes of each shard alone.
                members = (other for other in self.groups if other.process_group == group.process_group)
                changed = next(filter(self._is_unpublished, members), group)
            self._weights.observe(changed, route, self.passes.number, in_backward=False)
            route.gather.join()

    def _is_unpublished(self, group: WeightGroup) -> bool:
        """Whether peers are to read a publication of ``group`` that there is not yet."""
        self.routes.of(group)
        group.read_shards(self.passes.number)
        return group.is_published and not group.is_observed(self._weights.stamp)

    def drain(self) -> None:
        """Finish all reductions and gathers in flight, inside or outside of a capture."""
        self.modes.update()
        self.reductions.finish()
        self.gathers.finish()

    # Weights -------------------------------------------------------------------------------------------------

    def mark_weights_changed(self) -> None:
        """Announce a change of weights that PyTorch does not count, such as one by ``torch.distributed``."""
        self._weights.announce_change()

    # Gradients -----------------------------------------------------------------------------------------------

    def _finish_reductions(self, *, compare: bool) -> None:
        """Finish all reductions in flight: every gradient is complete, and hooks of shards have run.

        Args:
            compare: whether the ranks compare the order of their collectives.
        """
        self.reductions.finish()
        self.replicated.announce()
        if compare:
            # First, because if orders differ, the all-reduce would add gradients of different parameters.
            self._compare_orders()
        self.replicated.reduce()

    def _finish_backward(self) -> None:
        self.reductions.end_backward()
        if self.finish_with_backward:
            self._finish_reductions(compare=True)
        if self.modes.now.is_part or (self.modes.now.capture is not None and self.finish_with_backward):
            # The graph may end here. Otherwise it ends after a call of wait(), and the next microbatch can hide the
            # last reduction.
            self.drain()

    def wait(self) -> None:
        """Finish all communication; with ``reduce_once_per_iteration``, first reduce the microbatches' local sums."""
        self.modes.update()
        self.passes.drop_abandoned()
        self.reductions.reduce_local_sums()
        self._finish_reductions(compare=not self.finish_with_backward)
        if self.modes.now.capture is not None:
            self.drain()
        self.routes.finish_reading()

    def _compare_orders(self) -> None:
        # Every replay has the captured order, which is not recorded.
        if self.modes.now.capture is not None:
            return
        try:
            self.routes.compare_orders()
        except PeerMismatchError:
            # The slots hold wrong weights. Ranks that have learned different orders, or reserved slots in different
            # orders, would prefetch and reuse differently from now on.
            for group in self.groups:
                group.detach()
            self.passes.forget_orders()
            raise

    # Memory --------------------------------------------------------------------------------------------------

    def release_buffers(self) -> None:
        """Free gather slots and idle gradient buffers, for example before generation; they are reallocated on demand.

        Buffers of CUDA graphs are kept, because replays use them.

        Raises:
            EtpStateError: while a backward pass is in progress.
        """
        if self.passes.backward_is_under_way:
            raise EtpStateError("release_buffers inside a backward pass; call it between steps")
        self.wait()
        self.gathers.release()
        self.modes.now.pool.clear()


def runtimes_driving(shards: Iterable[ETPShardedParam]) -> list[EtpRuntime]:
    """The runtimes that drive these shards, each once.

    Raises:
        EtpStateError: for a shard that has none.
    """
    return list(dict.fromkeys(shard.driver for shard in shards))


def _shards(module: nn.Module) -> dict[str, ETPShardedParam]:
    return {name: param for name, param in module.named_parameters() if isinstance(param, ETPShardedParam)}


def _groups(shards: Mapping[str, ETPShardedParam]) -> list[WeightGroup]:
    return list(dict.fromkeys(param.weight_group for param in shards.values()))
