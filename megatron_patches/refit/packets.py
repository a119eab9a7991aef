"""Boxes packed for the way: what every transport carries, and the steps on both sides that all transports share.

What one source sends to one destination in one round is cut into :class:`Load` after load, each small enough for a
slot of their link, so a box of any size passes through bounded memory. A :class:`Sender` packs a load straight into
the memory from which it leaves and digests each box while packing. An :class:`Unpacker` puts the boxes of arriving
packets into memory of the destination that does not serve yet, and :meth:`Unpacker.verify` reads every wanted box
back, at the place that the destination's *manifest* says and not the plan, and compares digests. How a packet travels
is a transport's business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.digest import combine
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import DigestError, PlanMismatchError, StaleVersionError, TransferError
from megatron_patches.refit.manifest import Manifest, Placement
from megatron_patches.refit.plan import Plan, Transfer
from megatron_patches.refit.port_choice import open_port
from megatron_patches.refit.ports import Done, Memory, Payload, Pending, Piece
from megatron_patches.refit.staging import StagingPool


@dataclass(frozen=True, slots=True)
class Load:
    """What one packet is to carry.

    Attributes:
        round: number of the round.
        number: number of the packet among those of its link in this round.
        source: rank that sends.
        destination: rank that receives.
        items: the transfers, cut to size; wider elements first, so that all lie aligned one after the other.
    """

    round: int
    number: int
    source: int
    destination: int
    items: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(item.nbytes for item in self.items)

    @property
    def direct(self) -> bool:
        """Whether it is one box that is contiguous on both sides, so that it may travel without being packed."""
        return len(self.items) == 1 and _contiguous(self.items[0])

    def pieces(self, shapes: Mapping[str, tuple[int, ...]], *, read: bool) -> list[Piece]:
        """The boxes where they lie at the source (``read``) or at the destination, and in the payload."""
        found, offset = [], 0
        for item in self.items:
            view = item.read if read else item.write
            found.append(Piece(view, item.dtype, item.box, shapes[item.box.tensor], offset))
            offset += item.nbytes
        return found


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


@dataclass(frozen=True, slots=True)
class Packet:
    """A load on its way.

    Attributes:
        plan_digest: digest of the plan that the sender follows.
        version: version of the weights.
        round: number of the round.
        number: number of the packet among those of its link in this round.
        source: rank that sends.
        destination: rank that receives.
        parts: the boxes, in the load's order.
        payload: their elements, one box after another, each in row-major order.
    """

    plan_digest: str
    version: int
    round: int
    number: int
    source: int
    destination: int
    parts: tuple[Part, ...]
    payload: Payload


_ALONE = 4  # a contiguous box of this part of a packet has one for itself, so that it need not be packed

Link = tuple[int, int]
"""A source and a destination that the plan connects."""


def links_of(plan: Plan) -> list[Link]:
    """Every link that the plan uses, in order."""
    return sorted({(item.source, item.destination) for item in plan.transfers})


def cut_into_loads(transfers: Iterable[Transfer], limits: Mapping[Link, int] | None = None) -> dict[Link, list[Load]]:
    """Cuts what moves into packets.

    Args:
        transfers: what moves.
        limits: the most bytes of a packet, by link; None for one packet a round, however large.

    Returns:
        The packets of each link, in the order in which they are sent.

    Raises:
        TransferError: if one element is larger than the limit.
    """
    rounds: dict[Link, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    for item in transfers:
        rounds[item.source, item.destination][item.round].append(item)
    found: dict[Link, list[Load]] = {}
    for link, by_round in sorted(rounds.items()):
        limit = None if limits is None else limits[link]
        found[link] = [
            Load(number, index, *link, tuple(sorted(items, key=lambda item: -itemsize(item.dtype))))
            for number in sorted(by_round)
            for index, items in enumerate(_fill(by_round[number], limit))
        ]
    return found


def _fill(items: Sequence[Transfer], limit: int | None) -> Iterator[list[Transfer]]:
    """Deals transfers, in order, into groups of at most ``limit`` bytes; cuts those that are larger."""
    if limit is None:
        yield list(items)
        return
    group: list[Transfer] = []
    room = limit
    for item in items:
        for piece in _cut(item, limit):
            if piece.nbytes * _ALONE >= limit and _contiguous(piece):
                yield [piece]
                continue
            if piece.nbytes > room:
                yield group
                group, room = [], limit
            group.append(piece)
            room -= piece.nbytes
    if group:
        yield group


def _contiguous(item: Transfer) -> bool:
    return item.read.contiguous and item.write.contiguous


def _cut(item: Transfer, limit: int) -> Iterator[Transfer]:
    if item.nbytes <= limit:
        yield item
        return
    width = itemsize(item.dtype)
    if width > limit:
        raise TransferError(f"an element of {item.box} has {width} bytes and a packet at most {limit}")
    for box in item.box.chunks(limit // width):
        yield replace(item, box=box, read=item.read.cut(item.box, box), write=item.write.cut(item.box, box))


class Packing:
    """A packet that is being packed."""

    def __init__(self, packet: Packet, load: Load, digests: Pending[list[int]]) -> None:
        self._packet, self._load, self._digests = packet, load, digests

    @property
    def destination(self) -> int:
        """Rank that it is for."""
        return self._load.destination

    def done(self) -> bool:
        """Whether it is ready to leave."""
        return self._digests.done()

    def result(self) -> Packet:
        """The packet; waits until it is ready."""
        pairs = zip(self._load.items, self._digests.result(), strict=True)
        return replace(self._packet, parts=tuple(Part(item.box, item.dtype, digest) for item, digest in pairs))


class Sender:
    """The side of one source rank.

    Args:
        plan: the plan.
        rank: this rank, as a source.
        memory: its storages, by the names of its manifest.
        limits: the most bytes of a packet, by link; None for one packet a round.
        pool: staging memory of the party, of which a GPU needs some.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        memory: Memory,
        limits: Mapping[Link, int] | None = None,
        pool: StagingPool | None = None,
    ) -> None:
        self._plan, self._rank = plan, rank
        self._port = open_port(memory, f"source rank {rank}", pool)
        self._shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = cut_into_loads((item for item in plan.transfers if item.source == rank), limits)
        self.loads = {destination: loads for (_, destination), loads in mine.items()}

    def pack(self, number: int, version: int) -> Iterator[Packet]:
        """The packets of round ``number``, in the order of destinations, each in memory of its own.

        Raises:
            TransferError: if a box would have to be converted, or a storage has elements of another width.
        """
        for loads in self.loads.values():
            for load in loads:
                if load.round == number:
                    yield self.pack_into(load, version, np.empty(load.nbytes, dtype=np.uint8)).result()

    def pack_into(self, load: Load, version: int, payload: Payload, *, direct: bool = False) -> Packing:
        """Begins to pack a load into ``payload``, which has at least its size; raises as :meth:`pack` does.

        Args:
            load: what to pack.
            version: number of the weights.
            payload: memory for it.
            direct: whether a load that need not be packed may stay where it is instead.
        """
        for item in load.items:
            if item.source_dtype != item.dtype:
                raise TransferError(
                    f"{item.box} is {item.source_dtype} on source rank {self._rank} and {item.dtype} on "
                    f"destination rank {item.destination}; transports move bits and convert nothing"
                )
        pieces = load.pieces(self._shapes, read=True)
        if direct and load.direct:
            payload, digests = self._port.in_place(pieces[0]), self._port.digest(pieces)
        else:
            payload = payload[: load.nbytes]
            digests = self._port.pack(pieces, payload)
        empty = Packet(self._plan.digest, version, load.round, load.number, self._rank, load.destination, (), payload)
        return Packing(empty, load, digests)

    def close(self) -> None:
        """Waits for what is still being packed, and gives back what was leased for it."""
        self._port.close()


class Unpacker:
    """Receives one version at a time into memory that does not serve.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
        limits: the most bytes of a packet, by link, as the senders have it; None for one packet a round.
        pool: staging memory of the party, of which a GPU needs some.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        limits: Mapping[Link, int] | None = None,
        pool: StagingPool | None = None,
    ) -> None:
        self._plan, self._manifest, self._pool = plan, manifest, pool
        self._shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = (item for item in plan.transfers if item.destination == manifest.rank)
        self._expected = {
            (load.source, load.round, load.number): load
            for loads in cut_into_loads(mine, limits).values()
            for load in loads
        }
        self._version = 0
        self._port = open_port({}, "")
        self._arrived: dict[tuple[int, int, int], tuple[Part, ...]] = {}
        self._rooms: dict[tuple[int, int, int], Payload] = {}

    @property
    def expected(self) -> int:
        """Number of packets that the plan sends here."""
        return len(self._expected)

    def begin(self, version: int, memory: Memory) -> None:
        """Makes ready to receive ``version`` into ``memory``; forgets what has arrived of another.

        Args:
            version: number of the weights.
            memory: the storages of the manifest, by name.
        """
        self._version, self._arrived, self._rooms = version, {}, {}
        self._port = open_port(memory, f"destination rank {self._manifest.rank}", self._pool)

    def room(self, announced: Packet) -> Payload | None:
        """Where the payload of a packet may be received so that it need not be unpacked, if it may.

        Args:
            announced: the packet, without its payload.

        Raises:
            RefitError: as :meth:`accept`.
        """
        load = self._planned(announced)
        if not load.direct:
            return None
        room = self._port.in_place(load.pieces(self._shapes, read=False)[0])
        self._rooms[load.source, load.round, load.number] = room
        return room

    def accept(self, packet: Packet) -> Pending[None]:
        """Begins to unpack a packet; its payload may be overwritten when that has ended.

        Raises:
            PlanMismatchError: if the sender follows another plan.
            StaleVersionError: if it carries another version than the one begun.
            TransferError: if it is not what the plan says that this source sends in this round.
        """
        load = self._planned(packet)
        if len(packet.payload) != load.nbytes:
            raise TransferError(
                f"the packet from source rank {packet.source}, to destination rank {packet.destination}, in round "
                f"{packet.round}, has {len(packet.payload)} bytes and not the {load.nbytes} planned"
            )
        key = packet.source, packet.round, packet.number
        self._arrived[key] = packet.parts
        if packet.payload is self._rooms.pop(key, None):
            return Done(None)
        return self._port.unpack(load.pieces(self._shapes, read=False), packet.payload)

    def _planned(self, packet: Packet) -> Load:
        """What the plan says of a packet; the packet is as it says, but for the payload."""
        here = f"destination rank {self._manifest.rank}"
        sender = f"source rank {packet.source}"
        if packet.plan_digest != self._plan.digest:
            raise PlanMismatchError(
                f"{sender} follows plan {packet.plan_digest[:12]}, {here} plan {self._plan.digest[:12]}"
            )
        if packet.version != self._version:
            raise StaleVersionError(
                f"{sender} sent version {packet.version} to {here}, which receives version {self._version}"
            )
        key = packet.source, packet.round, packet.number
        load = self._expected.get(key)
        if packet.destination != self._manifest.rank or load is None:
            raise TransferError(
                f"{here} got a packet for rank {packet.destination} from {sender} in round {packet.round}, in which "
                "the plan sends it none"
            )
        if key in self._arrived:
            raise TransferError(f"{here} got the packet of {sender} in round {packet.round} twice")
        _check_parts(packet, load, f"{sender}, to {here}, in round {packet.round}")
        return load

    def verify(self) -> None:
        """Compares every wanted box with what was sent.

        Raises:
            TransferError: if a packet has not arrived; names a box in it.
            DigestError: if a box reads back otherwise than it was sent; names it and its sources.
        """
        missing = [key for key in sorted(self._expected) if key not in self._arrived]
        if missing:
            source, number, _ = missing[0]
            raise TransferError(
                f"destination rank {self._manifest.rank} never got {self._expected[missing[0]].items[0].box}, which "
                f"source rank {source} sends in round {number}, of version {self._version}"
            )
        sent = self._sent_digests()
        wanted = self._manifest.placements
        pieces = [
            Piece(item.view, self._manifest.storage[item.view.storage].dtype, item.box, self._shapes[item.box.tensor])
            for item in wanted
        ]
        for placement, found in zip(wanted, self._port.digest(pieces).result(), strict=True):
            self._compare(placement, found, sent[placement.box, placement.view])

    def close(self) -> None:
        """Waits for what is still being unpacked, and gives back what was leased for it."""
        self._port.close()

    def _sent_digests(self) -> Mapping[tuple[Box, View], list[tuple[int, int]]]:
        """(source, digest) of every part of each wanted box, by box and place."""
        homes: dict[tuple[str, str], list[Placement]] = defaultdict(list)
        for placement in self._manifest.placements:
            homes[placement.box.tensor, placement.view.storage].append(placement)
        sent: dict[tuple[Box, View], list[tuple[int, int]]] = defaultdict(list)
        for key, parts in self._arrived.items():
            for item, part in zip(self._expected[key].items, parts, strict=True):
                for home in homes[part.box.tensor, item.write.storage]:
                    if home.box.contains(part.box) and home.view.cut(home.box, part.box) == item.write:
                        sent[home.box, home.view].append((item.source, part.digest))
        return sent

    def _compare(self, placement: Placement, found: int, sent: Sequence[tuple[int, int]]) -> None:
        expected = combine(digest for _, digest in sent)
        if found != expected:
            raise DigestError(
                f"{placement.box} in {placement.view.storage} of destination rank {self._manifest.rank} has digest "
                f"{found:016x}, but source ranks {sorted({source for source, _ in sent})} sent {expected:016x}; "
                f"version {self._version} is not taken"
            )


def _check_parts(packet: Packet, load: Load, what: str) -> None:
    """The packet must hold exactly the planned boxes, in order, with the planned dtypes."""
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
