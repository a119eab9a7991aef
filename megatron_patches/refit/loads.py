"""Splits what a source sends to a destination into loads, the contents of packets.

What one source sends to one destination is cut into :class:`Load` after load, each small enough for a slot of their
link, so a box of any size passes through bounded memory. Boxes that both ends can reach where they lie
travel without a slot, in *direct* loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from megatron_patches.refit.boxes import pitch_of
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.plan import Link, Plan
from megatron_patches.refit.planning.transfers import Transfer
from megatron_patches.refit.ports import Batch, Piece

_ROW_BYTES = 512  # of a row: shorter ones are packed faster than they are copied one by one


class Reach(IntEnum):
    """Which boxes a link can move without packing them, from where they lie to where they are to lie."""

    NONE = 0
    CONTIGUOUS = 1
    ROWS = 2
    """Contiguous ones, and rows of equal length at equal distances on each side."""


@dataclass(frozen=True)
class Terms:
    """What both ends of a link have agreed on.

    Attributes:
        packet_bytes: the most bytes of a packed load; None for one packet, however large.
        reach: what may travel directly.
        hidden: the source's storages that the destination cannot reach where they lie.
        direct_bytes: the least that travels directly; smaller boxes are faster in the company of others, packed.
        load_bytes: the most of a direct load: few enough for the first to leave soon, many enough to cost little each.
    """

    packet_bytes: int | None = None
    reach: Reach = Reach.NONE
    hidden: frozenset[str] = frozenset()
    direct_bytes: int = 64 << 10
    load_bytes: int = 128 << 20


DEFAULT_TERMS = Terms()


@dataclass(frozen=True)
class Load:
    """What one packet is to carry.

    Attributes:
        number: number of the load among those of its link.
        source: rank that sends.
        destination: rank that receives.
        items: the transfers, cut to size; if packed, wider elements first, so that all lie aligned one after the other.
        direct: whether its boxes travel from where they lie to where they are to lie, and are not packed.
    """

    number: int
    source: int
    destination: int
    items: tuple[Transfer, ...]
    direct: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(item.nbytes for item in self.items)

    def batch(self, shapes: Mapping[str, tuple[int, ...]], *, read: bool) -> Batch:
        """The boxes where they lie at the source (``read``) or at the destination, and in the payload."""
        found, offset = [], 0
        for item in self.items:
            view = item.read if read else item.write
            found.append(Piece(view, item.dtype, item.box, shapes[item.box.tensor], offset))
            offset += item.nbytes
        return Batch(tuple(found))


def links_of(plan: Plan) -> list[Link]:
    """Every link that the plan uses, in order."""
    return list(plan.by_link)


def cut_into_loads(transfers: Iterable[Transfer], terms: Mapping[Link, Terms] | None = None) -> dict[Link, list[Load]]:
    """Cuts what moves into packets.

    Args:
        transfers: what moves.
        terms: what was agreed on, by link; None for one packet a link.

    Returns:
        The loads of each link; both ends get the same.

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
    """Wider elements first."""
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
    """Deals transfers, in order, into groups of at most ``limit`` bytes; cuts those that are larger.

    Returns:
        The groups, each with the index of the transfer that it begins with, or with a part of.
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
