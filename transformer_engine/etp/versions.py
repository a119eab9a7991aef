"""Versions of the shards: when each became final, and which version has been published to peers.

[Note: observation] The first visit of a forward pass *observes* the shards: it records an event after which they are
final and, with a transport that publishes, publishes them. Gathers of that pass and of the backward passes after it
wait only for this event, not for compute that was enqueued later. A shard must not change within a pass. If it does, it
is observed again at the next forward visit. With a transport that publishes, a backward visit raises StaleWeightError.

[Note: formats] Weights that are gathered in a format are published with every transport: their shards are quantized,
in one burst for all weights of a process group, before they are gathered. The first pass learns the formats of the
groups. To quantize few at a time, a visit in a format guesses that groups which were never visited have it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from etp.errors import EtpStateError, StaleWeightError
from etp.formats.base import Quantization, WeightFormat
from etp.group import WeightGroup
from etp.routes import Route
from etp.stack import Stack
from etp.streams import enqueue


@dataclass(frozen=True)
class _Quantized:
    """The quantized copies of the groups that have ever had a format, and the shards that they are of."""

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
        self._replayed_unseen = False
        self._forward = 0
        self._observed: dict[WeightGroup, tuple[Any, ...]] = {}
        self._final: dict[torch.device, Any] = {}
        self._quantizations: dict[tuple[dist.ProcessGroup, WeightFormat], _Quantized] = {}
        self._captured = False
        """Whether there has been a capture, which may refer to quantized copies."""
        self.trusted = reuse_across_forwards
        """Whether weights can be assumed unchanged unless a change was counted or announced."""

    def change_mode(self, *, capturing: bool, replayed_unseen: bool) -> None:
        """Change modes: a CUDA graph capture begins or has ended.

        Args:
            capturing: True if it begins.
            replayed_unseen: whether whole training steps will be replayed, whose changes of weights go unnoticed.
        """
        self._replayed_unseen |= replayed_unseen
        self._captured |= capturing
        self.trusted = self._reuse and (capturing or not self._replayed_unseen)
        self._final.clear()

    def begin_forward(self) -> None:
        """Begin a forward pass: shards may have changed since the last one."""
        self._forward += 1
        self._final.clear()

    def _version(self, group: WeightGroup) -> tuple[Any, ...]:
        return (self.epoch, 0 if self.trusted else self._forward, group.format, *group.version)

    def is_published(self, group: WeightGroup, route: Route) -> bool:
        """Whether gathers of ``group`` read published copies rather than the shards themselves."""
        return route.transport.publishes or group.format is not None

    def is_observed(self, group: WeightGroup, route: Route) -> bool:
        """Whether ``group`` may be gathered ahead of its visit."""
        return not self.is_published(group, route) or self._observed.get(group) == self._version(group)

    def forget(self, group: WeightGroup) -> None:
        """Forget ``group``, because another runtime drives it from now on."""
        self._observed.pop(group, None)
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
            StaleWeightError: if the shard changed since the forward pass, with a transport that would not see it.
        """
        device, publishes = route.device, self.is_published(group, route)
        if not in_backward and device not in self._final:
            self._final[device] = route.gather.mark()
            if not route.transport.publishes:
                on_device = [group for group in self._groups if group.spec.device == device]
                self._note([group for group in on_device if group.format is None], pass_number)
        if not publishes or self._observed.get(group) == self._version(group):
            return
        if in_backward and group in self._observed:
            raise StaleWeightError(
                f"{group.name} changed between its forward and its backward pass, and its peers were not told; change "
                "weights after the backward pass"
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

        def publish() -> None:
            chosen = [(form, [member for member in members if member.format == form]) for form in formats]
            quantizations = [self._quantization(form, groups, route) for form, groups in chosen]

            def quantize() -> None:
                for quantization in quantizations:
                    # See [Note: phases] in etp/formats/base.py.
                    quantization.cast(route.transport.exchange(quantization.measure(), f"scales of the {label}"))

            route.transport.publish([member.sources() for member in members], quantize)

        if route.transport.publishes:
            route.order_publication()
        route.gather.start(enqueue(publish), label=label)

    def _quantization(self, format_: WeightFormat, groups: Sequence[WeightGroup], route: Route) -> Quantization:
        """The buffers for quantized copies of ``groups``, of one process group, which will gather them. Collective."""
        key = groups[0].process_group, format_
        quantized = self._quantizations.get(key)
        # Once there is a graph, a group that has left the format stays, so that what the graph refers to does too.
        former = quantized.groups if quantized is not None and self._captured else ()
        every = list(dict.fromkeys([*former, *groups]))
        shards = [group.local_shards() for group in every]
        if quantized is None or quantized.shards != shards:
            if quantized is not None and self._captured:
                raise EtpStateError(
                    f"the weights that are gathered in {format_.name} have changed after a CUDA graph was captured: "
                    f"there were {len(quantized.groups)} groups of them, now there are {len(every)}, or a shard is in "
                    "other memory. Run every layer under its recipe before the capture"
                )
            memory = route.transport.published_memory(sum(len(stack) * stack.numel for stack in shards))
            quantization = format_.quantization(shards, [group.layout for group in every], memory)
            quantized = self._quantizations[key] = _Quantized(every, shards, quantization)
        for group in groups:
            group.set_quantized(quantized.quantization, quantized.groups.index(group))
        return quantized.quantization

    def _note(self, groups: Sequence[WeightGroup], pass_number: int) -> None:
        for group in groups:
            group.read_shards(pass_number)
            self._observed[group] = self._version(group)

    def gather_waits(self, group: WeightGroup, route: Route) -> list[Any] | None:
        """Events that a gather into the group's slot must wait for; see :meth:`etp.streams.Lane.start`."""
        slot = group.slot
        published = self.is_published(group, route)
        if not published:
            for hook in group.before_gather:
                hook()
        if not slot.reads:
            # New memory, which compute enqueued so far may have used before the allocator recycled it.
            return None
        reads = [event or route.gather.mark(stream) for stream, event in slot.reads.items()]
        if published:
            # The publication is earlier on the same lane.
            return reads
        final = self._final.get(route.device)
        if final is None or group.before_gather or self._observed.get(group) != self._version(group):
            return None
        return [final, *reads]
