"""NIXL (https://github.com/ai-dynamo/nixl): the destination reads the source's memory, over whatever UCX finds.

Within a host that is shared memory, or NVLink between GPUs; between hosts it is RDMA or TCP. Boxes that are contiguous
on both sides are read from the weights into their places. Others are read from slots, which are in the same kind of
memory as the party's storages. Rows would need one transfer each; packing them was measured to be faster, whatever
their length. The two sides may run different versions of torch.

A source registers its storages once, and again when they have moved. A destination registers the memory of a version
only while something is read into it, because it is not notified when that memory is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.loads import Load, Reach
from megatron_patches.refit.memory.ports import Memory, Payload, Pending
from megatron_patches.refit.memory.staging import SLOTS
from megatron_patches.refit.transports import frames
from megatron_patches.refit.transports.base import IncomingWire, LinkEnd, OutgoingWire, Place, Transport
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.transports.nixl_agent import MemoryRange, NixlAgent, Peer, Spans, range_of


class _Remote(msgspec.Struct):
    """What a destination must know to read its source's slots.

    Attributes:
        agent: NIXL metadata of the source's agent.
        kind: ``DRAM`` or ``VRAM``.
        device: number of the GPU in the source's process; 0 for host memory.
        address: address of the first slot.
    """

    agent: bytes
    kind: str
    device: int
    address: int


class _Told(msgspec.Struct):
    """What a destination must know to read its source's storages.

    Attributes:
        agent: current NIXL metadata of the source's agent.
        anew: whether registered memory was deregistered since the last message.
        addresses: address of each storage.
    """

    agent: bytes
    anew: bool
    addresses: dict[str, int]


_decode_remote = msgspec.msgpack.Decoder(_Remote).decode
_decode_told = msgspec.msgpack.Decoder(_Told).decode


class NixlTransport(Transport):
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party runs.

    Raises:
        RefitError: if NIXL is not installed, or none of the NICs that the place names can be used.
    """

    reach = Reach.CONTIGUOUS

    def __init__(self, place: Place) -> None:
        self._place = place
        self._agent = NixlAgent(place.party, place.device, place.host, place.nics)
        self._storages = RegisteredStorages(self._agent)
        self._told: tuple[int, Mapping[str, int]] = self._storages.generation, {}

    def hidden(self, memory: Memory) -> frozenset[str]:
        """Storages that NIXL cannot register."""
        return self._storages.hide(memory)

    def begin(self, memory: Memory) -> bytes | None:
        """The addresses of storages, if they have changed."""
        addresses, generation = self._storages.locate(memory), self._storages.generation
        if (generation, addresses) == self._told:
            return None
        anew, self._told = generation != self._told[0], (generation, addresses)
        return msgspec.msgpack.encode(_Told(self._agent.metadata, anew, addresses))

    def outgoing(self, end: LinkEnd) -> NixlOutgoing:
        """Sends the destination what it must know to read the slots."""
        agent = self._agent
        slots = _Slots(agent, self._place, end.slot_bytes)
        try:
            remote = _Remote(agent.metadata, agent.kind, agent.device, slots.region.address)
            frames.send(end.connection, msgspec.msgpack.encode(remote), end.patience)
        except BaseException:
            slots.release()
            raise
        return NixlOutgoing(agent, slots)

    def incoming(self, end: LinkEnd) -> NixlIncoming:
        """Receives what is needed to read the source's slots."""
        remote = _decode_remote(frames.receive(end.connection, end.patience))
        peer = Peer(self._agent.meet(remote.agent), remote.kind, remote.device)
        slots = _Slots(self._agent, self._place, end.slot_bytes)
        return NixlIncoming(self._agent, slots, peer, remote.address, end)

    def stop(self) -> None:
        """Waits a little for transfers under way."""
        self._agent.drain()

    def close(self) -> None:
        """Closes the agent."""
        self._agent.close()


class RegisteredStorages:
    """Keeps the memory of storages registered from version to version while it does not move.

    Memory that was freed in between and reused for other weights at the same address may be read with its old content
    if NIXL has pinned it. Digests detect this like any other corruption.

    Args:
        agent: the source's agent.

    Attributes:
        generation: number of times that registered memory was deregistered.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._registered: set[MemoryRange] = set()
        self._hidden: frozenset[str] = frozenset()
        self.generation = 0

    def hide(self, memory: Memory) -> frozenset[str]:
        """Registers storages. Those that NIXL cannot register count as hidden from now on.

        Args:
            memory: the storages by name.
        """
        self._hidden = frozenset(memory) - frozenset(self._register(memory))
        return self._hidden

    def locate(self, memory: Memory) -> dict[str, int]:
        """Address of each storage that other parties can read. Registers moved storages again.

        Args:
            memory: the storages by name.

        Raises:
            PartyFailedError: if a storage can no longer be registered.
        """
        found = self._register(memory)
        lost = sorted(frozenset(memory) - frozenset(found) - self._hidden)
        if lost:
            raise PartyFailedError(
                f"{lost[0]} (and {len(lost) - 1} more) has moved into memory that NIXL cannot register; the next push "
                "finds another way for it"
            )
        return found

    def _register(self, memory: Memory) -> dict[str, int]:
        regions = {name: range_of(storage) for name, storage in memory.items()}
        homes = _merge(region for region in regions.values() if region.nbytes)
        wanted = set(homes.values())
        gone = self._registered - wanted
        for region in gone:
            self._agent.forget(region)
        self.generation += bool(gone)
        self._registered &= wanted
        for region in sorted(wanted - self._registered):
            try:
                self._agent.register(region)
            except PartyFailedError:
                continue  # its storages are packed instead
            self._registered.add(region)
        return {name: region.address for name, region in regions.items() if homes.get(region) in self._registered}


def _merge(regions: Iterable[MemoryRange]) -> dict[MemoryRange, MemoryRange]:
    """For each region, the union of all regions that it overlaps. Adjacent regions may be separate allocations."""
    found: dict[MemoryRange, MemoryRange] = {}
    group: list[MemoryRange] = []
    begin = end = 0
    for region in sorted(set(regions)):
        if group and region.address >= end:
            found |= dict.fromkeys(group, MemoryRange(begin, end - begin))
            group = []
        if not group:
            begin = end = region.address
        group.append(region)
        end = max(end, region.address + region.nbytes)
    return found | dict.fromkeys(group, MemoryRange(begin, end - begin))


class _Slots:
    """Registered memory of one side of a link.

    Attributes:
        memory: the memory of all slots.
        payloads: the memory of each slot.
        region: address and size of the memory.
    """

    def __init__(self, agent: NixlAgent, place: Place, slot_bytes: int) -> None:
        self._agent, self.slot_bytes = agent, slot_bytes

        def make(nbytes: int) -> Payload:
            if place.device == "cpu":
                return np.zeros(nbytes, dtype=np.uint8)
            import torch

            return torch.zeros(nbytes, dtype=torch.uint8, device=place.device)

        self._lease = place.pool.lease(SLOTS * slot_bytes, make)
        self.memory = self._lease.buffer
        self.payloads = [self.memory[index * slot_bytes : (index + 1) * slot_bytes] for index in range(SLOTS)]
        self.region: MemoryRange = range_of(self.memory)
        try:
            agent.register(self.region)
        except BaseException:
            self._lease.release()
            raise

    def release(self) -> None:
        """Deregisters and returns the memory."""
        self._agent.forget(self.region)
        self._lease.release()


class NixlOutgoing(OutgoingWire):
    """A source's side of a link. The destination does the work, where UCX allows it.

    Args:
        agent: this party's agent.
        slots: memory to pack into.
    """

    def __init__(self, agent: NixlAgent, slots: _Slots) -> None:
        self._agent, self._slots = agent, slots
        self.slots = slots.payloads

    def start(self, slot: int, payload: Payload) -> None:
        """Does nothing: the destination reads the slot after the announcement."""

    def start_direct(self, load: Load, memory: Memory) -> None:
        """Does nothing; see :meth:`start`."""

    def check(self) -> None:
        """Answers the destination. Transfers fail at the destination, not here."""
        self._agent.poll()

    def close(self) -> None:
        """Releases the slots."""
        self._slots.release()


class NixlIncoming(IncomingWire):
    """A destination's side of a link.

    Args:
        agent: this party's agent.
        slots: this side's slots.
        peer: the source's agent.
        address: address of its slots.
        end: the link.
    """

    def __init__(self, agent: NixlAgent, slots: _Slots, peer: Peer, address: int, end: LinkEnd) -> None:
        self._agent, self._slots, self._peer, self._address = agent, slots, peer, address
        self._what = f"reading a packet of source rank {end.peer}"
        self._addresses: Mapping[str, int] = {}

    def begin(self, told: bytes, patience: Patience) -> None:
        """Receives what is needed to read the source's storages.

        Raises:
            PartyFailedError: if NIXL cannot reach them.
        """
        del patience  # it needs no answer
        storages = _decode_told(told)
        if storages.anew:
            self._agent.part(self._peer.name)
        self._agent.meet(storages.agent)
        self._addresses = storages.addresses

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Reads into this side's slot of the same number, which is free if the source's is."""
        offset = slot * self._slots.slot_bytes
        spans = Spans(
            np.array([self._slots.region.address + offset], dtype=np.uint64),
            np.array([self._address + offset], dtype=np.uint64),
            np.array([nbytes], dtype=np.uint64),
        )
        payload = self._slots.payloads[slot][:nbytes]
        return self._agent.read(self._peer, spans, [self._slots.memory], payload, self._what)

    def fetch_direct(self, load: Load, memory: Memory) -> Pending[object]:
        """Reads each box from the source's weights into its place.

        Raises:
            PartyFailedError: if the source has not sent a storage's address, or NIXL fails.
        """
        names = [item.read.storage for item in load.items]
        untold = [name for name in names if name not in self._addresses]
        if untold:
            raise PartyFailedError(f"source rank {load.source} has not told where {untold[0]} lies")
        sizes = [item.nbytes for item in load.items]
        widths = [itemsize(item.dtype) for item in load.items]
        targets = [memory[item.write.storage] for item in load.items]
        own = [
            range_of(target).address + width * item.write.offset
            for target, width, item in zip(targets, widths, load.items, strict=True)
        ]
        theirs = [
            self._addresses[name] + width * item.read.offset
            for name, width, item in zip(names, widths, load.items, strict=True)
        ]
        spans = Spans(*(np.array(column, dtype=np.uint64) for column in (own, theirs, sizes)))
        return self._agent.read(self._peer, spans, targets, None, self._what)

    def close(self) -> None:
        """Closes the wire."""
        self._agent.part(self._peer.name)
        self._slots.release()
