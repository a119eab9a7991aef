"""Packs boxes into packets, and implements the sender's and receiver's steps that all transports share.

A :class:`Sender` packs a load straight into the memory from which it is sent, and digests each box while packing. The
boxes of a direct load are only digested. An :class:`Unpacker` unpacks the boxes of arriving packets into memory that
serves no requests meanwhile. :meth:`Unpacker.verify` then reads back every wanted box, at the place that the
destination's *manifest* states, not the plan, and compares digests. Transports move the packets.

Relative to a base version, a sender replaces a packed load by what differs from the base (the module ``delta``), and an
unpacker completes it from its own copy of the base before it unpacks it. Digests are those of all elements either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.delta import Base, Delta, decode, delta_bytes, encode
from megatron_patches.refit.errors import DigestError, PlanMismatchError, StaleVersionError, TransferError
from megatron_patches.refit.loads import Load, Terms, cut_into_loads
from megatron_patches.refit.manifest import Manifest, Placement
from megatron_patches.refit.plan import Link, Plan
from megatron_patches.refit.port_choice import open_port
from megatron_patches.refit.ports import (
    Batch,
    Bytes,
    Done,
    HostPort,
    Memory,
    Payload,
    Pending,
    Piece,
    Port,
    Shared,
    Spot,
    host_bytes,
)
from megatron_patches.refit.staging import Lease, StagingPool

_GROWTH = 3  # factor by which groups of loads that are digested together grow


@dataclass(frozen=True, slots=True)
class Part:
    """One box in a packet.

    Attributes:
        box: the box.
        dtype: its element type.
        digest: its digest, computed from what the sender read.
    """

    box: Box
    dtype: str
    digest: int


class PlannedParts(Sequence[Part]):
    """The boxes that the plan has in a load, with the digests computed by their sender.

    Parts are made on demand: every version has thousands of boxes, and a part is only needed if something is wrong.

    Args:
        load: the load.
        digests: digests of its boxes, in order.

    Raises:
        TransferError: if the number of digests differs from that of boxes.
    """

    def __init__(self, load: Load, digests: Sequence[int]) -> None:
        if len(digests) != len(load.items):
            raise TransferError(f"{len(digests)} digests came for {len(load.items)} boxes")
        self.load, self.digests = load, digests

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, at: int) -> Part: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Part, ...]: ...

    def __getitem__(self, at: int | slice) -> Part | tuple[Part, ...]:
        """One part, or several."""
        if isinstance(at, slice):
            pairs = zip(self.load.items[at], self.digests[at], strict=True)
            return tuple(Part(item.box, item.dtype, digest) for item, digest in pairs)
        item = self.load.items[at]
        return Part(item.box, item.dtype, self.digests[at])


@dataclass(frozen=True, slots=True)
class Packet:
    """A load in transfer.

    Attributes:
        plan_digest: digest of the link's part of the sender's plan.
        version: version of the weights.
        number: number of the packet within its link.
        source: rank that sends.
        destination: rank that receives.
        parts: the boxes, in the load's order.
        payload: their elements, one box after another, each in row-major order; empty for a direct load.
        delta: what the payload holds instead, if not all elements.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    parts: Sequence[Part]
    payload: Payload
    delta: Delta | None = None

    @property
    def digests(self) -> Sequence[int]:
        """The digests of the boxes."""
        if isinstance(self.parts, PlannedParts):
            return self.parts.digests
        return [part.digest for part in self.parts]


class Packing:
    """A packet whose boxes are being packed, or only digested."""

    def __init__(self, packet: Packet, load: Load, digests: Pending[list[int]]) -> None:
        self._packet, self.load, self._digests = packet, load, digests

    def done(self) -> bool:
        """Whether the packet is ready to send."""
        return self._digests.done()

    def result(self) -> Packet:
        """Waits until the packet is ready, and returns it."""
        return replace(self._packet, parts=PlannedParts(self.load, self._digests.result()))


class _BaseCopy:
    """One side's weights of a base version, and a buffer into which one load of them at a time is packed.

    Args:
        base: the weights.
        where: owner of the storages, for messages.
        pool: pool of the buffer; None to allocate it.

    Attributes:
        version: their number.

    Raises:
        TransferError: if they are not in host memory.
    """

    def __init__(self, base: Base, where: str, pool: StagingPool | None) -> None:
        self.version = base.version
        self._port, self._pool = HostPort(base.memory, where), pool
        self._buffer: Lease[Bytes] | None = None

    def packed(self, batch: Batch, nbytes: int) -> Bytes:
        """The elements of a load, valid until the next call."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self.close()
            pool = self._pool or StagingPool(nbytes)
            self._buffer = pool.lease(nbytes, lambda size: np.empty(size, dtype=np.uint8))
        found = self._buffer.buffer[:nbytes]
        self._port.copy_out(batch, found)
        return found

    def close(self) -> None:
        """Returns the buffer."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


class Sender:
    """The sending side of one source rank.

    Args:
        plan: the plan.
        rank: this source rank.
        memory: its storages, by the names of its manifest.
        terms: the agreed terms, by link; None for one packet per link.
        pool: staging memory of the party, which a GPU needs.

    Attributes:
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
    ) -> None:
        self._plan, self._rank, self._pool = plan, rank, pool
        self._port = open_port(memory, f"source rank {rank}", pool)
        self._base: _BaseCopy | None = None
        shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = cut_into_loads((item for item in plan.transfers if item.source == rank), terms)
        links = list(mine.items())
        first = rank % max(1, len(links))
        self.loads = {destination: loads for (_, destination), loads in links[first:] + links[:first]}
        self._waves: dict[tuple[_Key, ...], Batch] = {}
        self._batches = {_key(load): load.batch(shapes, read=True) for loads in self.loads.values() for load in loads}

    def renew(self, memory: Memory) -> None:
        """Switches to the current storages, for the next version.

        Raises:
            TransferError: if their kind of memory has changed.
        """
        self._port.renew(memory)

    def relate_to(self, base: Base | None) -> None:
        """Sends packed loads as what differs from a base, where that is less; or all of them whole.

        Args:
            base: what all destinations hold; None if that is not known.

        Raises:
            TransferError: if the base is not in host memory.
        """
        self._base = None if base is None else _BaseCopy(base, f"source rank {self._rank}", self._pool)

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
            count *= _GROWTH if self._port.asynchronous else 1

    def pack(self, version: int) -> Iterator[Packet]:
        """All packets, in the order of :attr:`loads`, each in its own memory.

        Raises:
            TransferError: if a box would have to be converted, or a storage has elements of the wrong width.
        """
        for loads in self.loads.values():
            for load in loads:
                yield self.pack_into(load, version, np.empty(load.nbytes, dtype=np.uint8)).result()

    def pack_into(self, load: Load, version: int, payload: Payload) -> Packing:
        """Starts to pack a load into ``payload``, which must be large enough; raises as :meth:`pack`."""
        self._check_types(load)
        payload, batch = payload[: load.nbytes], self._batches[_key(load)]
        digests = self._port.pack(batch, payload)
        packet = self._packet(load, version, payload)
        if self._base is not None:
            changed = encode(host_bytes(payload), self._base.packed(batch, load.nbytes), load.width)
            if changed is not None:
                delta = Delta(self._base.version, changed)
                packet = replace(packet, payload=payload[: payload_bytes(load, delta)], delta=delta)
        return Packing(packet, load, digests)

    def digest(self, loads: tuple[Load, ...], version: int) -> list[Packing]:
        """Starts to digest direct loads together; their packets have no payload. Raises as :meth:`pack`."""
        keys = tuple(map(_key, loads))
        if keys not in self._waves:
            for load in loads:
                self._check_types(load)
            self._waves[keys] = Batch(tuple(piece for key in keys for piece in self._batches[key].pieces))
        digests = Shared(self._port.digest(self._waves[keys]))
        found, begin = [], 0
        for load in loads:
            end = begin + len(load.items)
            found.append(Packing(self._packet(load, version, b""), load, digests.part(begin, end)))
            begin = end
        return found

    def places(self, load: Load) -> Sequence[Spot]:
        """Where the boxes of a load lie."""
        return self._port.places(self._batches[_key(load)])

    def close(self) -> None:
        """Waits until packing has ended, returns leased memory, and forgets the base."""
        self._port.close()
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def _packet(self, load: Load, version: int, payload: Payload) -> Packet:
        digest = self._plan.digests[self._rank, load.destination]
        return Packet(digest, version, load.number, self._rank, load.destination, (), payload)

    def _check_types(self, load: Load) -> None:
        for item in load.items:
            if item.source_dtype != item.dtype:
                raise TransferError(
                    f"{item.box} is {item.source_dtype} on source rank {self._rank} and {item.dtype} on "
                    f"destination rank {item.destination}; transports move bits and convert nothing"
                )


def _key(load: Load) -> _Key:
    return load.source, load.destination, load.number


_Key = tuple[int, int, int]


class Unpacker:
    """Receives one version at a time into memory that serves no requests meanwhile.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
        terms: the agreed terms, by link; None for one packet per link.
        pool: staging memory of the party, which a GPU needs.

    Attributes:
        verified: digests of the boxes of the manifest, of the last version that was verified.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        terms: Mapping[Link, Terms] | None = None,
        pool: StagingPool | None = None,
    ) -> None:
        self._plan, self._manifest, self._pool = plan, manifest, pool
        self.verified: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = (item for item in plan.transfers if item.destination == manifest.rank)
        self._expected = {_key(load): load for loads in cut_into_loads(mine, terms).values() for load in loads}
        self._batches = {key: load.batch(shapes, read=False) for key, load in self._expected.items()}
        self._wanted = Batch(
            tuple(
                Piece(item.view, manifest.storage[item.view.storage].dtype, item.box, shapes[item.box.tensor])
                for item in manifest.placements
            )
        )
        self._version = 0
        self._port: Port | None = None
        self._base: _BaseCopy | None = None
        self._arrived: dict[_Key, Sequence[int]] = {}  # digests as sent

    @property
    def expected(self) -> int:
        """Number of packets that the plan sends here."""
        return len(self._expected)

    def begin(self, version: int, memory: Memory, base: Base | None = None) -> None:
        """Prepares to receive ``version`` into ``memory``, and forgets what has arrived of another version.

        Args:
            version: number of the weights.
            memory: the storages of the manifest, by name; always of one kind.
            base: what packets may be relative to; its memory may be ``memory``. None if all must be whole.

        Raises:
            TransferError: if the kind of memory differs from that of an earlier version, or the base is on a device.
        """
        self._base = None if base is None else _BaseCopy(base, self._here, self._pool)
        self._version, self._arrived = version, {}
        if self._port is None:
            self._port = open_port(memory, f"destination rank {self._manifest.rank}", self._pool)
        else:
            self._port.renew(memory)

    def load_of(self, announced: Packet) -> Load:
        """The planned load of an announced packet.

        Args:
            announced: the packet; its boxes and payload are ignored.

        Raises:
            RefitError: as :meth:`accept`.
        """
        return self._planned(announced)

    def places(self, load: Load) -> Sequence[Spot]:
        """Where the boxes of a load belong."""
        return self._open.places(self._batches[_key(load)])

    def accept(self, packet: Packet) -> Pending[None]:
        """Starts to unpack a packet. Its payload may be overwritten once that has ended.

        The boxes of a direct load are already in place.

        Raises:
            PlanMismatchError: if the sender follows another plan.
            StaleVersionError: if it carries another version than the one begun.
            TransferError: if it differs from what the plan says that this source sends.
        """
        load = self._planned(packet)
        _check_parts(packet, load, f"source rank {packet.source}, to {self._here}")
        nbytes = 0 if load.direct else payload_bytes(load, packet.delta)
        if len(packet.payload) != nbytes:
            raise TransferError(
                f"packet {packet.number} from source rank {packet.source}, to {self._here}, has "
                f"{len(packet.payload)} bytes and not the {nbytes} planned"
            )
        payload = packet.payload if packet.delta is None else self._completed(packet, packet.delta, load)
        self._arrived[_key(load)] = packet.digests
        if load.direct:
            return Done(None)
        return self._open.unpack(self._batches[_key(load)], payload)

    def _completed(self, packet: Packet, delta: Delta, load: Load) -> Bytes:
        """All elements of a load of which the changed ones have arrived. Valid until the next call."""
        if self._base is None or self._base.version != delta.base:
            held = "none" if self._base is None else f"version {self._base.version}"
            raise TransferError(
                f"source rank {packet.source} sent {self._here}, which holds {held}, what changed since version "
                f"{delta.base}"
            )
        found = self._base.packed(self._batches[_key(load)], load.nbytes)
        try:
            decode(host_bytes(packet.payload), delta.changed, found, load.width)
        except TransferError as error:
            raise TransferError(
                f"packet {packet.number} from source rank {packet.source}, to {self._here}: {error}"
            ) from error
        return found

    @property
    def _here(self) -> str:
        return f"destination rank {self._manifest.rank}"

    @property
    def _open(self) -> Port:
        if self._port is None:
            raise TransferError(f"{self._here} has begun no version")
        return self._port

    def _planned(self, packet: Packet) -> Load:
        """The planned load of a packet, after checks of the packet's header."""
        here = self._here
        sender = f"source rank {packet.source}"
        agreed = self._plan.digests.get((packet.source, self._manifest.rank), "")
        if packet.plan_digest != agreed:
            raise PlanMismatchError(f"{sender} follows plan {packet.plan_digest[:12]}, {here} plan {agreed[:12]}")
        if packet.version != self._version:
            raise StaleVersionError(
                f"{sender} sent version {packet.version} to {here}, which receives version {self._version}"
            )
        key = packet.source, packet.destination, packet.number
        load = self._expected.get(key)
        if load is None:
            raise TransferError(
                f"{here} got packet {packet.number} for rank {packet.destination} from {sender}, which is not planned"
            )
        if key in self._arrived:
            raise TransferError(f"{here} got packet {packet.number} of {sender} twice")
        return load

    def verify(self) -> None:
        """Compares every wanted box with what was sent.

        Raises:
            TransferError: if a packet has not arrived; names a box in it.
            DigestError: if a box reads back differently from what was sent; names it and its sources.
        """
        missing = [key for key in sorted(self._expected) if key not in self._arrived]
        if missing:
            source, _, number = missing[0]
            raise TransferError(
                f"destination rank {self._manifest.rank} never got {self._expected[missing[0]].items[0].box}, which "
                f"source rank {source} sends in packet {number}, of version {self._version}"
            )
        found = np.array(self._open.digest(self._wanted).result(), dtype=np.uint64)
        sent = np.zeros_like(found)
        for key, digests in self._arrived.items():
            homes = self._homes[key]
            np.add.at(sent, homes.placements, np.array(digests, dtype=np.uint64)[homes.boxes])  # wraps
        for home in np.flatnonzero(found != sent):
            self._refuse(int(home), int(found[home]), int(sent[home]))
        self.verified = found

    def close(self) -> None:
        """Waits until unpacking has ended, returns leased memory, and forgets the base."""
        if self._port is not None:
            self._port.close()
        base, self._base = self._base, None
        if base is not None:
            base.close()

    @cached_property
    def _homes(self) -> Mapping[_Key, _Homes]:
        """For each load, the placements that contain its boxes."""
        known: dict[tuple[str, str], list[tuple[int, Placement]]] = defaultdict(list)
        for number, placement in enumerate(self._manifest.placements):
            known[placement.box.tensor, placement.view.storage].append((number, placement))

        def homes(load: Load) -> _Homes:
            pairs = [
                (index, number)
                for index, item in enumerate(load.items)
                for number, home in known[item.box.tensor, item.write.storage]
                if home.box.contains(item.box) and home.view.cut(home.box, item.box) == item.write
            ]
            columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            return _Homes(columns[:, 0], columns[:, 1])

        return {key: homes(load) for key, load in self._expected.items()}

    def _refuse(self, number: int, found: int, expected: int) -> None:
        """Raises an error for a placement that does not hold what was sent."""
        placement = self._manifest.placements[number]
        sources = sorted({key[0] for key, homes in self._homes.items() if number in homes.placements})
        raise DigestError(
            f"{placement.box} in {placement.view.storage} of destination rank {self._manifest.rank} has digest "
            f"{found:016x}, but source ranks {sources} sent {expected:016x}; version {self._version} is not taken"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Homes:
    """The placements that contain the boxes of a load. Several placements may contain one box.

    Attributes:
        boxes: their numbers in the load.
        placements: for each of ``boxes``, the number of a placement in the manifest.
    """

    boxes: NDArray[np.int64]
    placements: NDArray[np.int64]


def payload_bytes(load: Load, delta: Delta | None) -> int:
    """Size of the payload of a packet.

    Args:
        load: what the packet carries.
        delta: what it holds of a packed load, if not all elements.
    """
    return load.nbytes if delta is None else delta_bytes(delta.changed, load.nbytes // load.width, load.width)


def _check_parts(packet: Packet, load: Load, what: str) -> None:
    """Checks that the packet holds exactly the planned boxes, in order, with the planned dtypes."""
    if isinstance(packet.parts, PlannedParts) and packet.parts.load is load:
        return
    items = load.items
    sent = {part.box for part in packet.parts}
    missing = [item.box for item in items if item.box not in sent]
    if missing:
        raise TransferError(f"the packet from {what}, lacks {missing[0]}")
    if len(packet.parts) != len(items):
        raise TransferError(f"the packet from {what}, has {len(packet.parts)} boxes and not the {len(items)} planned")
    for part, item in zip(packet.parts, items, strict=True):
        if part.box != item.box:
            raise TransferError(f"the packet from {what}, has {part.box} in the place of {item.box}")
        if part.dtype != item.dtype:
            raise TransferError(f"the packet from {what}, has {part.box} as {part.dtype}; {item.dtype} is planned")
