"""Versions of the shards: when each became final, and which version has been published to peers.

[Note: observation] The first visit of a forward pass *observes* the shards: it records an event after which they are
final and, with a transport that publishes, publishes them. Gathers of that pass and of the backward passes after it
wait only for this event, not for compute that was enqueued later. A shard must not change within a pass. If it does, it
is observed again at the next forward visit. With a transport that publishes, a backward visit raises StaleWeightError.

[Note: formats] Weights that are gathered in a format are published with every transport: their shards are quantized,
in one burst for all weights of a process group, before they are gathered. The first pass learns the formats of the
groups. So that groups are not quantized a few at a time, a visit in a format guesses that groups that were never
visited use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from etp.collectives.base import Route
from etp.errors import EtpStateError, StaleWeightError
from etp.formats.base import Quantization, WeightFormat
from etp.group import WeightGroup
from etp.mode import Mode
from etp.optimizer_steps import after_optimizer_steps
from etp.stack import Stack


@dataclass(frozen=True)
class _Quantized:
    """The quantized copies of the groups that have a format, or had it when a graph was captured, and their shards."""

    groups: list[WeightGroup]
    shards: list[Stack]
    quantization: Quantization


class WeightVersions:
    """Versions of the shards of one runtime.

    Args:
        groups: the runtime's own list of groups, shared so that later additions are seen.
        reuse_across_forwards: whether every change of weights is counted by PyTorch or announced. Otherwise each
            forward pass observes all shards again.
    """

    def __init__(self, groups: list[WeightGroup], *, reuse_across_forwards: bool) -> None:
        self.epoch = 0
        """Number of announced changes."""
        self._groups = groups
        self._reuse = reuse_across_forwards
        self._forward = 0
        self.final: dict[torch.device, Any] = {}
        """For each device, an event of this forward pass after which the observed shards are final."""
        self._quantizations: dict[tuple[dist.ProcessGroup, WeightFormat], _Quantized] = {}
        self._capturing = self._captured = False
        """Whether there is, or has been, a capture, which may refer to quantized copies."""
        self.trusted = reuse_across_forwards
        """Whether weights can be assumed unchanged unless a change was counted or announced."""
        self.stamp: tuple[int, int]
        """The stamp of observations that are still valid; see :meth:`etp.group.WeightGroup.is_observed`."""
        self._renew_stamp()
        if reuse_across_forwards:
            self.watch_optimizers()

    def _renew_stamp(self) -> None:
        self.stamp = self.epoch, 0 if self.trusted else self._forward

    def announce_change(self) -> None:
        """Count a change of weights that PyTorch may not count."""
        self.epoch += 1
        self._renew_stamp()

    def watch_optimizers(self) -> None:
        """Count every optimizer step as a change from now on, because PyTorch does not count writes of fused ones."""
        after_optimizer_steps(self, lambda weights, _: weights.announce_change())

    def change_mode(self, mode: Mode) -> None:
        """Forget events, and decide anew what can be assumed; see :attr:`etp.mode.Modes.parts`."""
        self.trusted = self._reuse and not mode.replays_steps
        self._renew_stamp()
        self.final.clear()
        self._capturing = mode.capture is not None
        if self._capturing:
            self._captured = True
            self.watch_optimizers()

    def begin_forward(self) -> None:
        """Begin a forward pass: shards may have changed since the last one."""
        self._forward += 1
        self._renew_stamp()
        self.final.clear()

    def forget(self, group: WeightGroup) -> None:
        """Forget ``group``, because another runtime drives it from now on."""
        group.observed = None
        for key in [key for key, quantized in self._quantizations.items() if group in quantized.groups]:
            del self._quantizations[key]

    def observe(self, group: WeightGroup, route: Route, pass_number: int, *, in_backward: bool) -> None:
        """Update the record at a visit of ``group``. Collective with a publishing transport.

        Args:
            group: the group that is visited; its shards have been read.
            route: how it communicates.
            pass_number: the runtime's count of passes.
            in_backward: whether the visit is in a backward pass.

        Raises:
            StaleWeightError: if the shard changed since the forward pass, and the transport would not see the change.
        """
        device = route.device
        if not in_backward and device not in self.final:
            self.final[device] = route.gather.mark()
            if not route.transport.publishes:
                on_device = [group for group in self._groups if group.spec.device == device]
                self._note([group for group in on_device if group.format is None], pass_number)
        if not group.is_published or group.is_observed(self.stamp):
            return
        if in_backward and group.observed is not None:
            # Otherwise it has not changed, and a forward pass in another format has come between.
            (epoch, _), _, version = group.observed
            if epoch != self.epoch or version != group.version:
                raise StaleWeightError(
                    f"{group.name} changed between its forward and its backward pass, and its peers were not told; "
                    "change weights after the backward pass"
                )
        self._publish(group, route, pass_number)

    def _publish(self, group: WeightGroup, route: Route, pass_number: int) -> None:
        members = [other for other in self._groups if other.process_group == group.process_group]
        if group.format is not None:
            for member in members:
                if not member.format_is_known and not group.format.obstacle(member.layout):
                    member.guess_format(group.format)
        if not route.transport.publishes:
            members = [member for member in members if member.format is not None]
        for member in members:
            for hook in member.before_gather:
                hook()
        # After the hooks, which change the shards.
        self._note(members, pass_number)
        formats = dict.fromkeys(member.format for member in members if member.format is not None)
        label = f"publication of {members[0].name} and {len(members) - 1} other weight groups"

        # Outside inference mode even when called inside: quantized copies outlive the caller's mode.
        @torch.inference_mode(False)
        @torch.no_grad()
        def publish() -> None:
            chosen = [(form, [member for member in members if member.format == form]) for form in formats]
            quantizations = [self._quantization(form, groups, route) for form, groups in chosen]

            def quantize() -> None:
                for quantization in quantizations:
                    # See [Note: phases] in etp/formats/base.py.
                    numbers = quantization.measure()
                    if len(numbers):
                        numbers = route.transport.exchange(numbers, f"scales of the {label}")
                    quantization.cast(numbers)

            route.transport.publish([part for member in members for part in member.published()], quantize)

        if route.transport.publishes:
            # See [Note: flags] in etp/collectives/copy_engine.py.
            route.reduce.join(route.gather)
        route.gather.start(publish, label=label)

    def _quantization(self, format_: WeightFormat, groups: Sequence[WeightGroup], route: Route) -> Quantization:
        """The buffers for quantized copies of ``groups``, of one process group, which will gather them. Collective."""
        key = groups[0].process_group, format_
        quantized = self._quantizations.get(key)
        # Once there is a graph, a group that has left the format stays, so that what the graph refers to does too.
        former = quantized.groups if quantized is not None and self._captured else ()
        every = list(dict.fromkeys([*former, *groups]))
        shards = [group.local_shards() for group in every]
        if quantized is None or quantized.shards != shards:
            if self._capturing or (self._captured and quantized is not None):
                count = 0 if quantized is None else len(quantized.groups)
                raise EtpStateError(
                    f"the weights that are gathered in {format_.name} have changed since a capture of a CUDA graph "
                    f"began: there were {count} groups of them, now there are {len(every)}, or a shard is in other "
                    "memory. Run every layer under its recipe before the capture"
                )
            layouts = [group.layout for group in every]
            numel = sum(len(stack) * format_.copied(layout) for stack, layout in zip(shards, layouts, strict=True))
            quantization = format_.quantization(shards, layouts, route.transport.published_memory(numel))
            if quantized is not None:
                # Each group refers to the copies of all.
                for group in set(quantized.groups).difference(every):
                    group.forget_quantized(quantized.quantization)
            quantized = self._quantizations[key] = _Quantized(every, shards, quantization)
        for index, group in enumerate(quantized.groups):
            if group.format == format_:
                group.set_quantized(quantized.quantization, index)
        return quantized.quantization

    def _note(self, groups: Sequence[WeightGroup], pass_number: int) -> None:
        for group in groups:
            group.read_shards(pass_number)
            group.observed = self.stamp, group.format, group.version
