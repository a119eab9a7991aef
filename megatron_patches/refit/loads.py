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
from itertools import groupby

from megatron_patches.refit.boxes import pitch_of
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.plan import Plan, Transfer
from megatron_patches.refit.ports import Batch, Piece

_ROW_BYTES = 512  # of a row: shorter ones are packed faster than they are copied one by one

Link = tuple[int, int]
"""A source and a destination that the plan connects."""


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
        packet_bytes: the most bytes of a packed load; None for one packet a round, however large.
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
        round: number of the round, or the first of several.
        number: number of the load among those of its link.
        source: rank that sends.
        destination: rank that receives.
        items: the transfers, cut to size; if packed, wider elements first, so that all lie aligned one after the other.
        direct: whether its boxes travel from where they lie to where they are to lie, and are not packed.
    """

    round: int
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
    return sorted({(item.source, item.destination) for item in plan.transfers})


def cut_into_loads(transfers: Iterable[Transfer], terms: Mapping[Link, Terms] | None = None) -> dict[Link, list[Load]]:
    """Cuts what moves into packets.

    Args:
        transfers: what moves.
        terms: what was agreed on, by link; None for one packet a round.

    Returns:
        The loads of each link in the order of their rounds; both ends get the same.

    Raises:
        TransferError: if one element is larger than a packet.
    """
    links: dict[Link, list[Transfer]] = defaultdict(list)
    for item in transfers:
        links[item.source, item.destination].append(item)
    found: dict[Link, list[Load]] = {}
    for link, items in sorted(links.items()):
        agreed = DEFAULT_TERMS if terms is None else terms[link]
        in_order = sorted(items, key=lambda item: item.round)
        direct = [item for item in in_order if goes_directly(item, agreed)]
        packed = [item for item in in_order if not goes_directly(item, agreed)]
        groups = [(group, True) for group in _fill(direct, agreed.load_bytes)]
        groups += [(group, False) for group in _fill_packets(packed, agreed.packet_bytes)]
        groups.sort(key=lambda group: group[0][0].round)
        found[link] = [
            Load(group[0].round, index, *link, tuple(group), straight) for index, (group, straight) in enumerate(groups)
        ]
    return found


def _fill_packets(items: Sequence[Transfer], limit: int | None) -> Iterator[list[Transfer]]:
    """Deals transfers into packets: of at most ``limit`` bytes, whatever their rounds, or one a round."""
    if limit is None:
        groups: Iterable[list[Transfer]] = (list(group) for _, group in groupby(items, key=lambda item: item.round))
    else:
        groups = _fill(items, limit)
    for group in groups:
        yield sorted(group, key=lambda item: -itemsize(item.dtype))


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


def _fill(items: Sequence[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """Deals transfers, in order, into groups of at most ``limit`` bytes; cuts those that are larger."""
    group: list[Transfer] = []
    room = limit
    for item in items:
        for piece in _cut(item, limit):
            if piece.nbytes > room:
                yield group
                group, room = [], limit
            group.append(piece)
            room -= piece.nbytes
    if group:
        yield group


def _cut(item: Transfer, limit: int) -> Iterator[Transfer]:
    if item.nbytes <= limit:
        yield item
        return
    width = itemsize(item.dtype)
    if width > limit:
        raise TransferError(f"an element of {item.box} has {width} bytes and a packet at most {limit}")
    for box in item.box.chunks(limit // width):
        yield replace(item, box=box, read=item.read.cut(item.box, box), write=item.write.cut(item.box, box))
