"""The sending side: packs boxes into packets and digests them meanwhile.

A :class:`Sender` packs a load straight into the memory from which it is sent, and digests each box while packing. The
boxes of a direct load are only digested. Relative to a base version, it replaces a packed load by what differs from the
base (the module ``delta``). Digests are those of all elements either way. Transports move the packets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

import numpy as np

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.memory.base_copy import BaseCopy, renewed
from megatron_patches.refit.memory.delta import Base
from megatron_patches.refit.memory.loads import Load, LoadKey, Terms, cut_into_loads
from megatron_patches.refit.memory.packets import Packet, Packing
from megatron_patches.refit.memory.port_choice import open_port
from megatron_patches.refit.memory.ports import Batch, Memory, Payload, Shared, Writing
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.planning.plan import Link, Plan

_GROWTH = 3  # factor by which groups of loads that are digested together grow
_MOST = 12  # loads of a group: what is digested together leaves together, once the last of it has been quantized


class Sender:
    """The sending side of one source rank.

    Args:
        plan: the plan.
        rank: this source rank.
        memory: its storages, by the names of its manifest.
        terms: the agreed terms, by link; None for one packet per link.
        pool: staging memory of the party, which a GPU needs.
        urgent: whether a GPU packs and digests before other work that is ready, such as quantizing what is sent later.

    Attributes:
        urgent: as given: what is sent may still be written, in the order of the direct loads.
        loads: loads by destination. Sources start with different destinations, so that none is the first of all.

    Raises:
        TransferError: if a box would have to be converted on the way.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        memory: Memory,
        terms: Mapping[Link, Terms] | None = None,
        pool: StagingPool | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        self._plan, self._rank, self._pool = plan, rank, pool
        self.urgent = urgent
        self._port = open_port(memory, f"source rank {rank}", pool, urgent=urgent)
        self._base: BaseCopy | None = None  # of the version under way
        self._kept: BaseCopy | None = None  # the same, or that of an earlier version: ports cache what they compute
        shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = cut_into_loads((item for item in plan.transfers if item.source == rank), terms)
        links = list(mine.items())
        first = rank % max(1, len(links))
        self.loads = {destination: loads for (_, destination), loads in links[first:] + links[:first]}
        self._waves: dict[tuple[LoadKey, ...], Batch] = {}
        self._batches = {load.key: load.batch(shapes, read=True) for loads in self.loads.values() for load in loads}

    def renew(self, memory: Memory, writing: Writing | None = None) -> None:
        """Switches to the current storages, for the next version.

        Args:
            memory: the storages, by name.
            writing: what is still writing to them; None if they are written.

        Raises:
            TransferError: if their kind of memory has changed.
        """
        self._port.renew(memory, writing)

    def relate_to(self, base: Base | None) -> None:
        """Sends packed loads as what differs from a base, where that is less; or all of them whole.

        Args:
            base: what all destinations hold; None if that is not known.

        Raises:
            TransferError: if the base is in another kind of memory than the storages.
        """
        self._base = None
        if base is not None:
            self._base = self._kept = renewed(self._kept, base, self._port, f"source rank {self._rank}", self._pool)

    def waves(self) -> Iterator[tuple[Load, ...]]:
        """The direct loads of all destinations, interleaved, in groups to be digested together.

        On a GPU groups grow, so that the first loads leave soon and the total number of kernel launches stays small.
        """
        turns = zip_longest(*([load for load in loads if load.direct] for loads in self.loads.values()))
        loads = [load for turn in turns for load in turn if load is not None]
        begin, count = 0, 1
        while begin < len(loads):
            yield tuple(loads[begin : begin + count])
            begin += count
            count = min(count * _GROWTH, _MOST) if self._port.asynchronous else 1

    def pack(self, version: int) -> Iterator[tuple[Packet, Payload]]:
        """All packets and their payloads, in the order of :attr:`loads`, each in its own memory.

        Raises:
            TransferError: if a box would have to be converted, or a storage has elements of the wrong width.
        """
        for loads in self.loads.values():
            for load in loads:
                payload = np.empty(load.nbytes, dtype=np.uint8)
                packet = self.pack_into(load, version, payload).result()
                yield packet, payload[: packet.nbytes]

    def pack_into(self, load: Load, version: int, payload: Payload) -> Packing:
        """Starts to pack a load into ``payload``, which must be large enough; raises as :meth:`pack`."""
        self._check_types(load)
        payload, batch = payload[: load.nbytes], self._batches[load.key]
        packet = self._packet(load, version)
        if self._base is None:
            return Packing(packet, load, self._port.pack(batch, payload))
        return Packing(packet, load, *self._base.pack(load, batch, payload))

    def digest(self, loads: tuple[Load, ...], version: int) -> list[Packing]:
        """Starts to digest direct loads together; their packets have no payload. Raises as :meth:`pack`."""
        keys = tuple(load.key for load in loads)
        if keys not in self._waves:
            for load in loads:
                self._check_types(load)
            self._waves[keys] = Batch(tuple(piece for key in keys for piece in self._batches[key].pieces))
        digests = Shared(self._port.digest(self._waves[keys]))
        found, begin = [], 0
        for load in loads:
            end = begin + len(load.items)
            found.append(Packing(self._packet(load, version), load, digests.part(begin, end)))
            begin = end
        return found

    def storages(self, load: Load) -> Memory:
        """The storages, among which are those of the boxes of a load."""
        return self._port.storages(self._batches[load.key])

    def close(self) -> None:
        """Waits until packing has ended, returns leased memory, and forgets the base."""
        self._port.close()
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def _packet(self, load: Load, version: int) -> Packet:
        digest = self._plan.digests[self._rank, load.destination]
        return Packet(digest, version, load.number, self._rank, load.destination, (), load.nbytes)

    def _check_types(self, load: Load) -> None:
        for item in load.items:
            if item.source_dtype != item.dtype:
                raise TransferError(
                    f"{item.box} is {item.source_dtype} on source rank {self._rank} and {item.dtype} on "
                    f"destination rank {item.destination}; transports move bits and convert nothing"
                )
