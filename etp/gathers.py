"""Decides when weights are gathered: at a visit, unless their slot still holds them, and ahead of later visits.

[Note: reuse] In a backward pass, a weight that its slot still holds is returned without a gather: between a
forward and its backward, weights do not change. A forward pass gathers every weight, unless
``EtpConfig.reuse_across_forwards`` guarantees that all changes of weights are counted or announced. These rules use
nothing that could differ between ranks that make the same changes and optimizer steps, so all ranks skip the same
gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from etp.cache import Slot
from etp.collectives import direct_transport
from etp.collectives.base import Route
from etp.config import EtpConfig
from etp.errors import EtpStateError
from etp.formats.base import WeightFormat
from etp.group import Reading, WeightGroup
from etp.mode import Mode, Modes
from etp.passes import Passes, Timeline
from etp.routes import Routes
from etp.stack import Stack
from etp.versions import WeightVersions

# Entries of a timeline that a visit considers for prefetching, or prefetch_depth if that is more; bounds the host's
# work per visit.
_LOOKAHEAD = 8


class Gathers:
    """Gathers the weights of one runtime's groups.

    Args:
        config: options of the runtime.
        routes: transports and lanes.
        modes: whether work is being captured into a CUDA graph, and the slots that gathers land in.
        weights: versions of the shards.
        passes: which pass visits belong to.
        groups: the runtime's own list of groups, shared so that later additions are seen.
    """

    def __init__(
        self,
        config: EtpConfig,
        routes: Routes,
        modes: Modes,
        weights: WeightVersions,
        passes: Passes,
        groups: Sequence[WeightGroup],
    ) -> None:
        self._config = config
        self._routes = routes
        self._modes = modes
        self._groups = groups
        self._weights = weights
        self._passes = passes
        self._in_use: WeightGroup | None = None
        self._largest_group = 0
        self._lookahead = max(_LOOKAHEAD, config.prefetch_depth)

    # One visit -----------------------------------------------------------------------------------------------

    def visit(
        self, group: WeightGroup, format_: WeightFormat | None = None, *, transposed: bool = False
    ) -> list[torch.Tensor]:
        """Return ``group``'s full weights, and start to gather what comes next. Collective over its ranks.

        Args:
            group: the group whose weights a layer needs.
            format_: the format in which the layer needs them; None: as they are stored.
            transposed: in a format, whether the layer reads columns.

        Returns:
            the weights in the group's order, each of its logical shape, valid on the current stream.

        Raises:
            EtpStateError: if a part of the model is captured and nothing outside it would publish its weights.
            StaleWeightError: if a shard changed since the forward pass and the transport would not see the change.
        """
        if self._modes.possible:
            self._modes.update()
        if format_ is not group.format or not group.format_is_known:
            group.use_format(format_)
        timeline = self._passes.enter(group)
        # See [Note: apart] in etp/formats/base.py.
        reading = group.columns if transposed and format_ is not None and format_.apart else group.rows
        timeline.visit(reading)
        group.read_shards(self._passes.number)
        slot = group.attach(self._modes.now.cache)
        route = group.route or self._routes.of(group)
        if self._in_use is not None:
            self._in_use.read_until_here(route.gather)
        in_backward, is_part = self._passes.in_backward, self._modes.now.is_part
        if is_part:
            self._require_observer(group)
        elif not (in_backward or route.device in self._weights.final) or (
            not group.is_observed(self._weights.stamp) and group.is_published
        ):
            self._weights.observe(group, route, self._passes.number, in_backward=in_backward)
        # See [Note: reuse].
        gathered_in = None if in_backward or self._weights.trusted else self._passes.number
        if not group.holds(self._weights.epoch, gathered_in=gathered_in, columns=reading.columns):
            self._issue(reading, slot, route)
        weights = group.take(route.gather, transposed=transposed)
        self._in_use = group
        # A gather that might still be unused at the end of a graph would have to be joined there.
        if not is_part or (timeline.knows_pass and (in_backward or self._modes.drained_after_parts)):
            self._prefetch(slot, timeline, gathered_in)
        return weights

    def _require_observer(self, group: WeightGroup) -> None:
        if group.is_published and not self._passes.has_root:
            raise EtpStateError(
                f"{group.name} is captured into a CUDA graph, and nothing outside of the graph would tell it when the "
                "weight changes: pass the module whose forward replays the graph to etp.shard_module, or use the c10d "
                "transport"
            )

    def _issue(self, reading: Reading, slot: Slot, route: Route) -> None:
        """Start to gather what ``reading`` reads, after the gather that its slot may still be receiving."""
        group = reading.group
        for former in (group, slot.owner):
            if former is not None and former.pending:
                former.abandon_gather()
        self._largest_group = max(self._largest_group, group.spec.nbytes)
        is_published = group.is_published
        if not is_published:
            for hook in group.before_gather:
                hook()
        number, epoch = self._passes.number, self._weights.epoch
        waits = None
        # Otherwise new memory, which compute enqueued so far may have used before the allocator recycled it; or no
        # streams.
        if slot.reads and None not in slot.reads:
            waits = [event or route.gather.mark(stream) for stream, event in slot.reads.items()]
            # A publication is earlier on the same lane.
            if not is_published:
                waits.append(self._final(group, route))
        group.issue_gather(route, pass_number=number, epoch=epoch, waits=waits, columns=reading.columns)

    def _final(self, group: WeightGroup, route: Route) -> Any:
        """An event after which the shards are final, where gathers read them in place."""
        final = self._weights.final.get(route.device)
        if final is None or group.before_gather or not group.is_observed(self._weights.stamp):
            # The shards may have been written last by work that the caller has enqueued just now.
            return route.gather.mark()
        return final

    # Ahead of visits -----------------------------------------------------------------------------------------

    def _prefetch(self, in_use: Slot, timeline: Timeline[Reading], gathered_in: int | None) -> None:
        """Start the next gathers, until ``prefetch_depth`` times the largest group's bytes are in flight."""
        budget = self._config.prefetch_depth * self._largest_group
        if budget == 0:
            return
        in_flight, number, epoch = 0, self._passes.number, self._weights.epoch
        needed_earlier: set[Slot | None] = {in_use}
        stamp = self._weights.stamp
        cache = self._modes.now.cache
        # The next visits, nearest first, in this pass and the next one.
        readings = timeline.upcoming(self._lookahead)
        if len(readings) < self._lookahead and self._knows_next(timeline):
            readings = [*readings, *self._passes.expected(self._lookahead - len(readings))]
        for reading in readings:
            if in_flight >= budget:
                return
            group = reading.group
            # What this pass has started already is not looked at again: its visit does that.
            if not group.pending or group.issued_in_pass != number or group.gathered_columns is not reading.columns:
                if group.read_in_pass < self._passes.forward_number:
                    # Weights do not change until the backward pass ends. If they do, their visit notices.
                    group.read_shards(number)
                slot = group.attach(cache)
                if not group.holds(epoch, gathered_in=gathered_in, columns=reading.columns):
                    if slot in needed_earlier:
                        return
                    route = group.route or self._routes.of(group)
                    if not (self._modes.now.is_part or group.is_observed(stamp) or not group.is_published):
                        return
                    self._issue(reading, slot, route)
            if group.pending:
                in_flight += group.spec.nbytes
            needed_earlier.add(group._slot)

    def _knows_next(self, timeline: Timeline[Reading]) -> bool:
        """Whether gathers may be started for the next pass.

        In a capture only after a backward pass: any forward pass may be the graph's last, and leave gathers unfinished.
        """
        may_be_last = self._modes.now.capture is not None and not self._passes.in_backward
        return not may_be_last and not self._modes.now.is_part and timeline.knows_pass

    # Outside of passes ---------------------------------------------------------------------------------------

    def full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """One full weight of ``group``, of its logical shape, newly allocated. Collective over its ranks."""
        shard = group.shards[index]
        layout = shard.layout
        local = shard.local_shard()
        full = local.new_empty(layout.padded_shape)
        # Not with the group's own transport, which may move shards as they were last published. Full weights may also
        # be requested before the shards are on the device on which they are trained.
        transport = direct_transport(self._config, group.process_group)
        transport.all_gather(Stack([full]), Stack([local]), f"all-gather of {shard.fqn} (full tensor)").join()
        return full[: layout.rows] if layout.pad_rows == 0 else full[: layout.rows].clone()

    def change_mode(self, mode: Mode) -> None:
        """Void everything gathered so far; see :attr:`etp.mode.Modes.parts`."""
        del mode
        for group in self._groups:
            group.change_mode()
        self._in_use = None

    def finish(self) -> None:
        """Finish prefetches whose visits have not happened. The gathered weights stay in their slots."""
        for group in self._groups:
            group.abandon_gather()

    def release(self) -> None:
        """Finish gathers in flight and free the slots of the current mode (inside or outside of a capture)."""
        self.finish()
        self._in_use = None
        self._modes.now.cache.clear()

    def describe_chain(self) -> str:
        """The learned forward order, one group a line: name, shapes, shards, slot, bytes."""
        forward = self._passes.forward_order
        order = [reading.group for reading in forward.learned or forward.visits]
        lines = [f"chain of {len(order)} weight groups, prefetch depth {self._config.prefetch_depth}"]
        slots = {id(slot): number for number, slot in enumerate(self._modes.now.cache.slots())}
        for group in order:
            shapes = " ".join(str(list(shard.layout.shape)) for shard in group.shards[:1])
            # None right after a capture has begun or ended.
            number = slots.get(id(group._slot))
            slot = "no slot" if number is None else f"slot {number}"
            lines.append(f"  {group.name}: {shapes} over {group.size} ranks, {slot}, {group.spec.nbytes} bytes")
        return "\n".join(lines)
