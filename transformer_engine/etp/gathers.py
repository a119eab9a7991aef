"""Decides when weights are gathered: at a visit, unless their slot still holds them, and ahead of later visits.

[Note: reuse] In a backward pass, a weight that its slot still holds is returned without a gather: between a
forward and its backward, weights do not change. A forward pass gathers every weight, unless
``EtpConfig.reuse_across_forwards`` guarantees that all changes of weights are counted or announced. These rules use
nothing that could differ between ranks, so all ranks skip the same gathers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from etp.cache import BufferCache
from etp.chain import Timeline
from etp.collectives.c10d import C10dTransport
from etp.config import EtpConfig
from etp.errors import EtpStateError
from etp.graphs import GraphModes
from etp.group import WeightGroup
from etp.passes import Passes
from etp.routes import Route, Routes
from etp.traffic import TrafficCounters
from etp.versions import WeightVersions

# Entries of a timeline that a visit considers for prefetching, or prefetch_depth if that is more; bounds the host's
# work per visit.
_LOOKAHEAD = 8


class Gathers:
    """Gathers the weights of one runtime's groups.

    Args:
        config: options of the runtime.
        routes: transports and lanes.
        counters: where traffic is counted.
        graphs: whether work is being captured into a CUDA graph, and the slots that gathers land in.
        weights: versions of the shards.
        passes: which pass visits belong to.

    Attributes:
        drained_after_parts: whether everything started in a captured part is finished at its end. Forward passes of
            captured parts prefetch only then.
    """

    def __init__(
        self,
        config: EtpConfig,
        routes: Routes,
        counters: TrafficCounters,
        graphs: GraphModes,
        weights: WeightVersions,
        passes: Passes,
    ) -> None:
        self.drained_after_parts = False
        self._config = config
        self._routes = routes
        self._counters = counters
        self._graphs = graphs
        self._weights = weights
        self._passes = passes
        self._in_use: WeightGroup | None = None
        self._largest_group = 0

    @property
    def cache(self) -> BufferCache:
        """Where gathers land, in the mode (inside or outside of a CUDA graph) that the runtime is in."""
        return self._graphs.buffers.cache

    # One visit -----------------------------------------------------------------------------------------------

    def visit(self, group: WeightGroup, timeline: Timeline[WeightGroup]) -> list[torch.Tensor]:
        """Return ``group``'s full weights, and start to gather what comes next. Collective over its ranks.

        Args:
            group: the group that a layer asks for.
            timeline: the timeline of the current pass; see :meth:`etp.passes.Passes.enter`.

        Returns:
            the weights in the group's order, each of its logical shape, valid on the current stream.

        Raises:
            EtpStateError: if a part of the model is captured and nothing outside it would publish its weights.
            StaleWeightError: if a shard changed since the forward pass and the transport would not see the change.
        """
        timeline.visit(group)
        group.attach(self.cache)
        route = self._routes.of(group)
        if self._in_use is not None:
            self._in_use.read_until_here(route.gather)
        self._observe(group, route)
        if not self._usable(group):
            self._make_room(group)
            self._issue(group, route)
        weights = group.take(route.gather)
        self._in_use = group
        if self._prefetches(timeline):
            self._prefetch(timeline)
        return weights

    def _observe(self, group: WeightGroup, route: Route) -> None:
        if not self._graphs.is_part:
            self._weights.observe(group, route, in_backward=self._passes.in_backward)
        elif route.publisher is not None and not self._passes.has_root:
            raise EtpStateError(
                f"{group.name} is captured into a CUDA graph, and nothing outside of the graph would tell it when the "
                "weight changes: pass the module whose forward replays the graph to etp.shard_module, or use the c10d "
                "transport"
            )

    def _usable(self, group: WeightGroup) -> bool:
        if not group.holds(self._weights.epoch):
            return False
        if self._passes.in_backward or self._weights.trusted:
            return True
        return group.pending and group.issued_in_pass == self._passes.number

    def _make_room(self, group: WeightGroup) -> None:
        group.abandon_gather()
        if group.slot.tenant is not None:
            group.slot.tenant.abandon_gather()

    def _issue(self, group: WeightGroup, route: Route) -> None:
        self._largest_group = max(self._largest_group, group.nbytes)
        self._counters.gathered(group)
        waits = self._weights.gather_waits(group, route)
        group.issue_gather(
            route.transport, route.gather, pass_number=self._passes.number, epoch=self._weights.epoch, waits=waits
        )

    # Ahead of visits -----------------------------------------------------------------------------------------

    def _prefetches(self, timeline: Timeline[WeightGroup]) -> bool:
        """Whether to prefetch: not if the gather might still be unused at the end of a graph, which must join it."""
        if not self._graphs.is_part:
            return True
        return timeline.knows_pass and (self._passes.in_backward or self.drained_after_parts)

    def _prefetch(self, timeline: Timeline[WeightGroup]) -> None:
        """Start the next gathers, until ``prefetch_depth`` times the largest group's bytes are in flight."""
        budget = self._config.prefetch_depth * self._largest_group
        if budget == 0:
            return
        in_flight = 0
        needed_earlier = {id(self._in_use.slot)} if self._in_use is not None else set()
        ahead = itertools.chain(timeline.upcoming(), self._expected(timeline))
        for group in itertools.islice(ahead, max(_LOOKAHEAD, self._config.prefetch_depth)):
            if in_flight >= budget:
                return
            group.attach(self.cache)
            slot = id(group.slot)
            if self._usable(group):
                in_flight += group.nbytes if group.pending else 0
            else:
                route = self._routes.of(group)
                if slot in needed_earlier or not self._may_prefetch(group, route):
                    return
                self._make_room(group)
                self._issue(group, route)
                in_flight += group.nbytes
            needed_earlier.add(slot)

    def _expected(self, timeline: Timeline[WeightGroup]) -> Iterator[WeightGroup]:
        """The beginning of the pass after the current one; empty unless the current order is known.

        In a capture only after a backward pass; any forward pass may be the graph's last, which would leave it behind.
        """
        may_be_last = self._graphs.capture is not None and not self._passes.in_backward
        return iter(()) if may_be_last or not timeline.knows_pass or self._graphs.is_part else self._passes.expected()

    def _may_prefetch(self, group: WeightGroup, route: Route) -> bool:
        return self._graphs.is_part or self._weights.is_observed(group, route)

    # Outside of passes ---------------------------------------------------------------------------------------

    def full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """One full weight of ``group``, of its logical shape, in memory of its own. Collective over its ranks."""
        shard = group.shards[index]
        layout = shard.layout
        local = shard.local_shard()
        full = local.new_empty(layout.padded_shape)
        # Not by the group's own transport: it may move shards as they were last published, and full weights may be
        # requested before the shards are on the device on which they are trained.
        transport = C10dTransport(group.process_group, fp32_accumulation=True, timeout_s=self._config.timeout_s)
        transport.all_gather([full], [local], f"all-gather of {shard.fqn} (full tensor)").join()
        return full[: layout.rows] if layout.pad_rows == 0 else full[: layout.rows].clone()

    def change_mode(self, groups: Sequence[WeightGroup]) -> None:
        """A CUDA graph capture begins, with the device idle, or has ended: void everything gathered so far."""
        for group in groups:
            group.change_mode()
        self._in_use = None

    def finish(self, groups: Sequence[WeightGroup]) -> None:
        """Finish prefetches whose visits have not happened. What they gathered stays in its slots."""
        for group in groups:
            group.abandon_gather()

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Finish gathers in flight and free the slots of the current mode (inside or outside of a capture)."""
        self.finish(groups)
        self._in_use = None
        self.cache.clear()

    def describe_chain(self) -> str:
        """The learned forward order, one group a line: name, shapes, shards, slot, bytes."""
        chain = self._passes.chain
        order = chain.forward.learned or chain.forward.visits
        lines = [f"chain of {len(order)} weight groups, prefetch depth {self._config.prefetch_depth}"]
        slots = {id(slot): number for number, slot in enumerate(self.cache.slots())}
        for group in order:
            shapes = " ".join(str(list(shard.layout.shape)) for shard in group.shards[:1])
            # None right after a capture has begun or ended.
            slot = f"slot {slots[id(group.slot)]}" if group.has_slot else "no slot"
            lines.append(f"  {group.name}: {shapes} over {group.size} ranks, {slot}, {group.nbytes} bytes")
        return "\n".join(lines)
