"""Packs boxes into packets, and implements the sender's and receiver's steps that all transports share.

A :class:`Sender` packs a load straight into the memory from which it leaves and digests each box while packing; of a
direct load it only digests the boxes. An :class:`Unpacker` puts the boxes of arriving packets into memory that no
request is answered from meanwhile, and :meth:`Unpacker.verify` reads every wanted box back, at the place that the
destination's *manifest* says and not the plan, and compares digests. How a packet travels is a transport's business.
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
from megatron_patches.refit.errors import DigestError, PlanMismatchError, StaleVersionError, TransferError
from megatron_patches.refit.loads import Load, Terms, cut_into_loads
from megatron_patches.refit.manifest import Manifest, Placement
from megatron_patches.refit.plan import Link, Plan
from megatron_patches.refit.port_choice import open_port
from megatron_patches.refit.ports import Batch, Done, Memory, Payload, Pending, Piece, Port, Shared, Spot
from megatron_patches.refit.staging import StagingPool

_GROWTH = 3  # of groups of loads that are digested at once


@dataclass(frozen=True, slots=True)
class Part:
    """One box in a packet.

    Attributes:
        box: what it is.
        dtype: its element type.
        digest: its digest, computed from what the sender read.
    """

    box: Box
    dtype: str
    digest: int


class PlannedParts(Sequence[Part]):
    """The boxes that the plan has in a load, with the digests that their sender has computed.

    Thousands of boxes come with each version, of which nobody looks at one where nothing is wrong.

    Args:
        load: the load.
        digests: of its boxes, in order.

    Raises:
        TransferError: if there are more or fewer of them.
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
        """One of them, or several."""
        if isinstance(at, slice):
            pairs = zip(self.load.items[at], self.digests[at], strict=True)
            return tuple(Part(item.box, item.dtype, digest) for item, digest in pairs)
        item = self.load.items[at]
        return Part(item.box, item.dtype, self.digests[at])


@dataclass(frozen=True, slots=True)
class Packet:
    """A load on its way.

    Attributes:
        plan_digest: digest of what the sender's plan moves over this link.
        version: version of the weights.
        number: number of the packet among those of its link.
        source: rank that sends.
        destination: rank that receives.
        parts: the boxes, in the load's order.
        payload: their elements, one box after another, each in row-major order; none of a direct load.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    parts: Sequence[Part]
    payload: Payload

    @property
    def digests(self) -> Sequence[int]:
        """The digests of its boxes."""
        if isinstance(self.parts, PlannedParts):
            return self.parts.digests
        return [part.digest for part in self.parts]


class Packing:
    """A packet whose boxes are being packed, or only digested."""

    def __init__(self, packet: Packet, load: Load, digests: Pending[list[int]]) -> None:
        self._packet, self.load, self._digests = packet, load, digests

    def done(self) -> bool:
        """Whether it is ready to leave."""
        return self._digests.done()

    def result(self) -> Packet:
        """The packet; waits until it is ready."""
        return replace(self._packet, parts=PlannedParts(self.load, self._digests.result()))


class Sender:
    """The side of one source rank.

    Args:
        plan: the plan.
        rank: this rank, as a source.
        memory: its storages, by the names of its manifest.
        terms: what was agreed on, by link; None for one packet a link.
        pool: staging memory of the party, of which a GPU needs some.

    Attributes:
        loads: what goes to each destination. Sources begin with different ones, lest one is everybody's first.

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
        self._plan, self._rank = plan, rank
        self._port = open_port(memory, f"source rank {rank}", pool)
        shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = cut_into_loads((item for item in plan.transfers if item.source == rank), terms)
        links = list(mine.items())
        first = rank % max(1, len(links))
        self.loads = {destination: loads for (_, destination), loads in links[first:] + links[:first]}
        self._waves: dict[tuple[_Key, ...], Batch] = {}
        self._batches = {_key(load): load.batch(shapes, read=True) for loads in self.loads.values() for load in loads}

    def renew(self, memory: Memory) -> None:
        """Turns to the storages as they are now, for the next version.

        Raises:
            TransferError: if they are of another kind of memory than before.
        """
        self._port.renew(memory)

    def waves(self) -> Iterator[tuple[Load, ...]]:
        """The direct loads of all destinations in turn, in groups to be digested at once.

        On a GPU groups grow, so that the first loads leave soon and few launches serve all.
        """
        turns = zip_longest(*([load for load in loads if load.direct] for loads in self.loads.values()))
        loads = [load for turn in turns for load in turn if load is not None]
        begin, count = 0, 1
        while begin < len(loads):
            yield tuple(loads[begin : begin + count])
            begin += count
            count *= _GROWTH if self._port.asynchronous else 1

    def pack(self, version: int) -> Iterator[Packet]:
        """All packets, in the order of :attr:`loads`, each in memory of its own.

        Raises:
            TransferError: if a box would have to be converted, or a storage has elements of another width.
        """
        for loads in self.loads.values():
            for load in loads:
                yield self.pack_into(load, version, np.empty(load.nbytes, dtype=np.uint8)).result()

    def pack_into(self, load: Load, version: int, payload: Payload) -> Packing:
        """Begins to pack a load into ``payload``, which has at least its size; raises as :meth:`pack` does."""
        self._check_types(load)
        payload = payload[: load.nbytes]
        return Packing(self._packet(load, version, payload), load, self._port.pack(self._batches[_key(load)], payload))

    def digest(self, loads: tuple[Load, ...], version: int) -> list[Packing]:
        """Begins to digest direct loads, whose packets have no payload, at once; raises as :meth:`pack` does."""
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
        """Waits for what is still being packed, and gives back what was leased for it."""
        self._port.close()

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
    """Receives one version at a time into memory that no request is answered from meanwhile.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
        terms: what was agreed on, by link; None for one packet a link.
        pool: staging memory of the party, of which a GPU needs some.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        terms: Mapping[Link, Terms] | None = None,
        pool: StagingPool | None = None,
    ) -> None:
        self._plan, self._manifest, self._pool = plan, manifest, pool
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
        self._arrived: dict[_Key, Sequence[int]] = {}  # digests, as they were sent

    @property
    def expected(self) -> int:
        """Number of packets that the plan sends here."""
        return len(self._expected)

    def begin(self, version: int, memory: Memory) -> None:
        """Makes ready to receive ``version`` into ``memory``; forgets what has arrived of another.

        Args:
            version: number of the weights.
            memory: the storages of the manifest, by name; always of one kind.

        Raises:
            TransferError: if they are of another kind of memory than those of an earlier version.
        """
        self._version, self._arrived = version, {}
        if self._port is None:
            self._port = open_port(memory, f"destination rank {self._manifest.rank}", self._pool)
        else:
            self._port.renew(memory)

    def load_of(self, announced: Packet) -> Load:
        """What the plan says of a packet that is to come.

        Args:
            announced: the packet, of which boxes and payload are not looked at.

        Raises:
            RefitError: as :meth:`accept`.
        """
        return self._planned(announced)

    def places(self, load: Load) -> Sequence[Spot]:
        """Where the boxes of a load are to lie."""
        return self._open.places(self._batches[_key(load)])

    def accept(self, packet: Packet) -> Pending[None]:
        """Begins to unpack a packet; its payload may be overwritten when that has ended.

        The boxes of a direct load are in their places already.

        Raises:
            PlanMismatchError: if the sender follows another plan.
            StaleVersionError: if it carries another version than the one begun.
            TransferError: if it is not what the plan says that this source sends.
        """
        load = self._planned(packet)
        _check_parts(packet, load, f"source rank {packet.source}, to {self._here}")
        nbytes = 0 if load.direct else load.nbytes
        if len(packet.payload) != nbytes:
            raise TransferError(
                f"packet {packet.number} from source rank {packet.source}, to {self._here}, has "
                f"{len(packet.payload)} bytes and not the {nbytes} planned"
            )
        self._arrived[_key(load)] = packet.digests
        if load.direct:
            return Done(None)
        return self._open.unpack(self._batches[_key(load)], packet.payload)

    @property
    def _here(self) -> str:
        return f"destination rank {self._manifest.rank}"

    @property
    def _open(self) -> Port:
        if self._port is None:
            raise TransferError(f"{self._here} has begun no version")
        return self._port

    def _planned(self, packet: Packet) -> Load:
        """What the plan says of a packet; its head is as it says."""
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
            DigestError: if a box reads back otherwise than it was sent; names it and its sources.
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

    def close(self) -> None:
        """Waits for what is still being unpacked, and gives back what was leased for it."""
        if self._port is not None:
            self._port.close()

    @cached_property
    def _homes(self) -> Mapping[_Key, _Homes]:
        """Of each load, which placements its boxes are parts of."""
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
        """Raises because of a placement that does not hold what was sent."""
        placement = self._manifest.placements[number]
        sources = sorted({key[0] for key, homes in self._homes.items() if number in homes.placements})
        raise DigestError(
            f"{placement.box} in {placement.view.storage} of destination rank {self._manifest.rank} has digest "
            f"{found:016x}, but source ranks {sources} sent {expected:016x}; version {self._version} is not taken"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Homes:
    """Which placements the boxes of a load are parts of; one box may be part of several.

    Attributes:
        boxes: their numbers in the load.
        placements: for each of ``boxes``, the number of a placement in the manifest.
    """

    boxes: NDArray[np.int64]
    placements: NDArray[np.int64]


def _check_parts(packet: Packet, load: Load, what: str) -> None:
    """The packet must hold exactly the planned boxes, in order, with the planned dtypes."""
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
