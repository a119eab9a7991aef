"""Splits what a source sends to a destination into loads, the contents of packets.

A link's transfers are cut into loads, each small enough for a slot of the link, so a box of any size passes through
bounded memory. Boxes that both ends can access in place travel without a slot, in *direct* loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.layout.boxes import pitch_of
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.ports import Batch, Piece
from megatron_patches.refit.planning.plan import Link
from megatron_patches.refit.planning.transfers import Transfer

_ROW_BYTES = 512  # least size of a row: shorter rows are faster to pack than to copy one by one


class Reach(IntEnum):
    """Which boxes a link can move without packing, from their place at the source to their place at the destination."""

    NONE = 0
    CONTIGUOUS = 1
    ROWS = 2
    """Contiguous boxes, and rows of equal length at equal distances on each side."""


@dataclass(frozen=True)
class Terms:
    """What both ends of a link have agreed on.

    Attributes:
        packet_bytes: limit of a packed load; None for one packet of any size.
        reach: what may travel directly.
        hidden: the source's storages that the destination cannot access in place.
        direct_bytes: least size of a box that travels directly; smaller boxes are faster packed together.
        load_bytes: limit of a direct load: small enough for the first to leave soon, large enough to keep loads few.
    """

    packet_bytes: int | None = None
    reach: Reach = Reach.NONE
    hidden: frozenset[str] = frozenset()
    direct_bytes: int = 64 << 10
    load_bytes: int = 128 << 20


DEFAULT_TERMS = Terms()


type LoadKey = tuple[int, int, int]  # source, destination, number


@dataclass(frozen=True)
class Load:
    """The content of one packet.

    Attributes:
        number: number of the load within its link.
        source: rank that sends.
        destination: rank that receives.
        items: the transfers, cut to size. If packed, wider elements come first, so that all are aligned.
        direct: whether the boxes travel in place and are not packed.
    """

    number: int
    source: int
    destination: int
    items: tuple[Transfer, ...]
    direct: bool = False

    def __str__(self) -> str:
        return f"packet {self.number} from source rank {self.source} to destination rank {self.destination}"

    @property
    def key(self) -> LoadKey:
        """Source, destination and number, which identify the load."""
        return self.source, self.destination, self.number

    @cached_property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(item.nbytes for item in self.items)

    @cached_property
    def width(self) -> int:
        """Bytes of its narrowest element. If packed, it is an array of units of that size."""
        return min(itemsize(item.dtype) for item in self.items)

    def batch(self, shapes: Mapping[str, tuple[int, ...]], *, read: bool) -> Batch:
        """The boxes, with their places at the source (``read``) or at the destination, and in the payload."""
        found, offset = [], 0
        for item in self.items:
            view = item.read if read else item.write
            found.append(Piece(view, item.dtype, item.box, shapes[item.box.tensor], offset))
            offset += item.nbytes
        return Batch(tuple(found))


def cut_into_loads(transfers: Iterable[Transfer], terms: Mapping[Link, Terms] | None = None) -> dict[Link, list[Load]]:
    """Cuts transfers into packets.

    Args:
        transfers: what moves.
        terms: the agreed terms, by link; None for one packet per link.

    Returns:
        The loads of each link. Both ends compute the same.

    Raises:
        TransferError: if one element is larger than a packet.
    """
    links: dict[Link, list[Transfer]] = defaultdict(list)
    for item in transfers:
        links[item.source, item.destination].append(item)
    found: dict[Link, list[Load]] = {}
    for link, items in sorted(links.items()):
        agreed = DEFAULT_TERMS if terms is None else terms[link]
        groups: list[tuple[int, tuple[Transfer, ...], bool]] = []
        for straight, limit in ((True, agreed.load_bytes), (False, agreed.packet_bytes)):
            places = [at for at, item in enumerate(items) if goes_directly(item, agreed) is straight]
            for first, group in fill([items[at] for at in places], limit):
                groups.append((places[first], tuple(group) if straight else _aligned(group), straight))
        groups.sort(key=lambda group: group[0])
        found[link] = [Load(index, *link, group, straight) for index, (_, group, straight) in enumerate(groups)]
    return found


def _aligned(items: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """The transfers, those with wider elements first."""
    return tuple(sorted(items, key=lambda item: -itemsize(item.dtype)))


def goes_directly(item: Transfer, terms: Terms) -> bool:
    """Whether a transfer travels without being packed."""
    if terms.reach is Reach.NONE or item.read.storage in terms.hidden or item.nbytes < terms.direct_bytes:
        return False
    pitch = pitch_of(item.read, item.write)
    if pitch is None or item.source_dtype != item.dtype:
        return False
    if pitch.rows == 1:
        return True
    return terms.reach is Reach.ROWS and pitch.length * itemsize(item.dtype) >= min(_ROW_BYTES, terms.direct_bytes)


def fill(items: Sequence[Transfer], limit: int | None) -> Iterator[tuple[int, list[Transfer]]]:
    """Distributes transfers, in order, into groups of at most ``limit`` bytes. Larger transfers are cut.

    Returns:
        The groups, each with the index of its first transfer, of which it may hold only a part.
    """
    if limit is None:
        limit = max(1, sum(item.nbytes for item in items))
    group: list[Transfer] = []
    first, room = 0, limit
    for index, item in enumerate(items):
        for piece in _cut(item, limit):
            if group and piece.nbytes > room:
                yield first, group
                group, room = [], limit
            if not group:
                first = index
            group.append(piece)
            room -= piece.nbytes
    if group:
        yield first, group


def _cut(item: Transfer, limit: int) -> Iterator[Transfer]:
    if item.nbytes <= limit:
        yield item
        return
    width = itemsize(item.dtype)
    if width > limit:
        raise TransferError(f"an element of {item.box} has {width} bytes and a packet at most {limit}")
    for box in item.box.chunks(limit // width):
        yield replace(item, box=box, read=item.read.cut(item.box, box), write=item.write.cut(item.box, box))
