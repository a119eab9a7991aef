"""Which transport and which lanes serve a weight group: one transport for each process group, one lane a direction."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from etp.collectives import select_transport
from etp.collectives.base import Transport
from etp.config import EtpConfig
from etp.group import WeightGroup
from etp.streams import Lane
from etp.versions import GraphableTransport, InPlaceTransport, enqueue

logger = logging.getLogger(__name__)


class Routes:
    """The transports and lanes of one runtime, made where they are first needed.

    Args:
        config: options of the runtime.
    """

    def __init__(self, config: EtpConfig) -> None:
        self._config = config
        self.transports: dict[dist.ProcessGroup, Transport] = {}
        """What moves shards, by process group."""
        self._lanes: dict[tuple[str, dist.ProcessGroup, torch.device], Lane] = {}

    def transport(self, group: WeightGroup) -> Transport:
        """What moves ``group``'s shards. Collective over its process group when it is the first of it."""
        transport = self.transports.get(group.process_group)
        if transport is None:
            transport = select_transport(self._config, group.process_group, group.specs[0].device)
            logger.info("%s moves the shards of %s and the like", type(transport).__name__, group.name)
            self.transports[group.process_group] = transport
        return transport

    def symmetric_memory(self, group: WeightGroup, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for shards that ``group``'s transport reads in place; None if it reads none. Collective.

        Returns:
            ``[numel]`` elements of ``dtype``, zero.
        """
        transport = self.transport(group)
        return transport.symmetric_memory(numel, dtype) if isinstance(transport, InPlaceTransport) else None

    def gather_lane(self, group: WeightGroup) -> Lane:
        """Where ``group``'s gathers run."""
        return self._lane("gather", group)

    def reduce_lane(self, group: WeightGroup) -> Lane:
        """Where ``group``'s reductions run."""
        return self._lane("reduce", group)

    def _lane(self, direction: str, group: WeightGroup) -> Lane:
        key = (direction, group.process_group, group.specs[0].device)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key[2])
        return lane

    def order_publication(self, group: WeightGroup, lane: Lane) -> None:
        """Let ``group``'s gathers come after its reductions so far; see [Note: flags] of the copy-engine transport."""
        reductions = self._lanes.get(("reduce", group.process_group, group.specs[0].device))
        if reductions is not None:
            lane.follow(reductions)

    def change_mode(self, *, capturing: bool) -> None:
        """A capture into a CUDA graph begins, with the device idle, or has ended."""
        for lane in self._lanes.values():
            lane.change_mode()
        for transport in self.transports.values():
            if isinstance(transport, GraphableTransport):
                transport.change_mode(capturing=capturing)

    def watch_replays(self) -> None:
        """Expect the replays so far of graphs in which ranks wait for each other to end in time."""
        for transport in self.transports.values():
            if isinstance(transport, GraphableTransport):
                transport.watch_replays()

    def finish_reading(self) -> None:
        """Where peers read shards in place, let the caller's stream wait until they have: it may change them next."""
        for process_group, transport in self.transports.items():
            if isinstance(transport, InPlaceTransport) and transport.reads_in_place:
                for (direction, group, _), lane in self._lanes.items():
                    if direction == "gather" and group == process_group:
                        lane.start(enqueue(transport.finish_reading)).wait()
