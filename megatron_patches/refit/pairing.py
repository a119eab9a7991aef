"""Pairs what is held with what is wanted, and assigns the pairs to rounds; integers only, for all ranks at once.

Kept apart from the transfers that come of it: pairs are small, so a rank can compute those of a whole cluster and make
transfers of its own alone. All orders are canonical, so every rank gets the same pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_patches.refit.boxes import Box, coalesce, overlapping_pair, subtract
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import CoverageError
from megatron_patches.refit.manifest import Manifest, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Party:
    """A rank that holds or wants a box, where, and as what.

    Attributes:
        rank: the rank, on its side.
        host: name of its machine.
        placement: the box, and where it lies.
        dtype: its element type there.
        index: position among the parties of its side and tensor, in order of rank and placement.
    """

    rank: int
    host: str
    placement: Placement
    dtype: str
    index: int


class Pair(NamedTuple):
    """A box, the party that gives it and the one that gets it."""

    box: Box
    source: Party
    destination: Party

    @property
    def width(self) -> int:
        """Bytes of an element where the two dtypes need the more."""
        return max(itemsize(self.source.dtype), itemsize(self.destination.dtype))


class _Part(NamedTuple):
    """A piece of a wanted box that is not yet given to one of its holders."""

    nbytes: int
    box: Box
    wanted: Party
    holders: _Holders


class _Holders:
    """The ranks that have one cell whole: the place of it on each, and which of them are on a given host."""

    def __init__(self, parties: Iterable[Party]) -> None:
        self.by_rank: dict[int, Party] = {}
        for party in sorted(parties, key=lambda item: (item.rank, item.placement.view)):
            self.by_rank.setdefault(party.rank, party)
        self._ranks = list(self.by_rank)
        self._near: dict[str, list[int]] = defaultdict(list)
        for rank, party in self.by_rank.items():
            self._near[party.host].append(rank)

    def candidates(self, host: str) -> Sequence[int]:
        """Ranks on ``host`` if there are any, else all; ascending."""
        return self._near.get(host, self._ranks)


def pair_up(sources: Sequence[Manifest], destinations: Sequence[Manifest], split_bytes: int) -> list[list[Pair]]:
    """Decides which rank sends which box to which rank.

    Args:
        sources: what each source rank holds, in any order.
        destinations: what each destination rank wants, in any order.
        split_bytes: cells of at least twice this size may be cut among the ranks that hold them.

    Returns:
        For each wanted tensor, by name, its pairs in canonical order: by box, destination and place.

    Raises:
        CoverageError: if some wanted element is held by nobody; names tensor, box and destination rank.
    """
    held, wanted = _by_tensor(sources), _by_tensor(destinations)
    names = sorted(wanted)
    chosen = _choose(part for name in names for part in _parts_of_tensor(held.get(name, []), wanted[name], split_bytes))
    return [sorted(_join(chosen[name]), key=_canonical) for name in names]


def deal_rounds(
    tensors: Sequence[Sequence[Pair]], staging_bytes: int, bound_destinations: bool
) -> list[list[tuple[int, Pair]]]:
    """Cuts pairs to the staging budget and deals them into rounds in which no party stages more than its budget.

    Tensors take turns by where they are held, so that sources with different tensors, such as the stages of a
    pipeline or the ranks of an expert-parallel group, have something to send in every round.

    Args:
        tensors: pairs by tensor, as :func:`pair_up` returns them.
        staging_bytes: the budget of one party in one round.
        bound_destinations: whether it binds destinations too.

    Returns:
        The same, cut where they had to be, each with its round.
    """
    sources: dict[int, _Filled] = defaultdict(lambda: _Filled(staging_bytes))
    destinations: dict[int, _Filled] = defaultdict(lambda: _Filled(staging_bytes if bound_destinations else None))
    dealt: list[list[tuple[int, Pair]]] = [[] for _ in tensors]
    for index in _turns(tensors):
        for pair in tensors[index]:
            giver, taker = sources[pair.source.rank], destinations[pair.destination.rank]
            width = pair.width
            whole = pair.box.volume * width <= staging_bytes
            for box in (pair.box,) if whole else pair.box.chunks(staging_bytes // width):
                size = box.volume * width
                at = max(giver.first, taker.first)
                while not (giver.fits(at, size) and taker.fits(at, size)):
                    at += 1
                giver.add(at, size)
                taker.add(at, size)
                dealt[index].append((at, pair if whole else Pair(box, pair.source, pair.destination)))
    return dealt


class _Filled:
    """How much of its budget one party has used in each round."""

    def __init__(self, budget: int | None) -> None:
        self.first = 0  # rounds before this one are full
        self._budget = budget
        self._bytes: list[int] = []

    def fits(self, number: int, size: int) -> bool:
        if self._budget is None or number >= len(self._bytes):
            return True
        return self._bytes[number] + size <= self._budget

    def add(self, number: int, size: int) -> None:
        if self._budget is None:
            return
        if number >= len(self._bytes):
            self._bytes.extend([0] * (number + 1 - len(self._bytes)))
        self._bytes[number] += size
        # A round with little room left counts as full, so that it is not probed again and again.
        while self.first < len(self._bytes) and self._bytes[self.first] + self._budget // 32 > self._budget:
            self.first += 1


def _turns(tensors: Sequence[Sequence[Pair]]) -> list[int]:
    """Indices of tensors: the first of each rank's, then the second of each, by the lowest rank that gives of it."""
    seen: dict[int, int] = defaultdict(int)
    keys = []
    for index, pairs in enumerate(tensors):
        first = min((pair.source.rank for pair in pairs), default=0)
        keys.append((seen[first], index))
        seen[first] += 1
    return [index for _, index in sorted(keys)]


def _by_tensor(manifests: Sequence[Manifest]) -> Mapping[str, list[Party]]:
    found: dict[str, list[Party]] = defaultdict(list)
    for manifest in sorted(manifests, key=lambda item: item.rank):
        for placement in sorted(manifest.placements, key=_placement_order):
            parties = found[placement.box.tensor]
            dtype = manifest.storage[placement.view.storage].dtype
            parties.append(Party(manifest.rank, manifest.host, placement, dtype, len(parties)))
    return found


def _placement_order(placement: Placement) -> tuple[object, ...]:
    box, view = placement.box, placement.view
    return box.tensor, box.start, box.stop, view.storage, view.offset, view.strides


def _parts_of_tensor(held: list[Party], wanted: list[Party], split_bytes: int) -> Iterator[_Part]:
    """Cells of every wanted box of one tensor, cut where that lets more of their holders share in the work."""
    replicas: dict[Box, list[Party]] = defaultdict(list)
    for party in held:
        replicas[party.placement.box].append(party)
    boxes = sorted(replicas)
    refine = overlapping_pair(boxes) is not None
    wanters: dict[Box, list[Party]] = defaultdict(list)
    for party in wanted:
        wanters[party.placement.box].append(party)
    sharing: dict[tuple[Box, ...], _Holders] = {}
    for box in sorted(wanters):
        cells = _cells(box, boxes, refine)
        if sum(cell.volume for cell, _ in cells) != box.volume:
            missing, first = subtract(box, (cell for cell, _ in cells))[0], wanters[box][0]
            raise CoverageError(
                f"no source holds {missing}, which destination rank {first.rank} wants in "
                f"{first.placement.view.storage} as part of {box}"
            )
        for cell, owners in cells:
            if owners not in sharing:
                sharing[owners] = _Holders(party for owner in owners for party in replicas[owner])
            yield from _parts_of_cell(cell, wanters[box], sharing[owners], split_bytes)


def _parts_of_cell(cell: Box, wanters: Sequence[Party], holders: _Holders, split_bytes: int) -> Iterator[_Part]:
    """Where fewer want a cell than hold it, each wanted copy is cut so that all holders can take part."""
    shares = -(-len(holders.by_rank) // len(wanters))
    dim = next((index for index, extent in enumerate(cell.shape) if extent > 1), 0)
    for wanted in wanters:
        width = itemsize(wanted.dtype)
        count = min(shares, cell.volume * width // split_bytes)
        for piece in cell.split(count, dim) if count > 1 and cell.shape else (cell,):
            yield _Part(piece.volume * width, piece, wanted, holders)


def _cells(wanted: Box, boxes: Sequence[Box], refine: bool) -> list[tuple[Box, tuple[Box, ...]]]:
    """Disjoint pieces of ``wanted``, each with all held boxes that contain it."""
    near = [(box, common) for box in boxes if (common := box.intersect(wanted)) is not None]
    if not refine:
        return [(common, (box,)) for box, common in near]
    pieces: list[Box] = []
    for _, common in near:
        fresh: list[Box] = subtract(common, pieces)
        old = [part for piece in pieces for part in _cut_by(piece, common)]
        pieces = old + fresh
    by_owners: dict[tuple[Box, ...], list[Box]] = defaultdict(list)
    for piece in pieces:
        by_owners[tuple(box for box, _ in near if box.contains(piece))].append(piece)
    return [(piece, owners) for owners, same in sorted(by_owners.items()) for piece in coalesce(same)]


def _cut_by(piece: Box, knife: Box) -> list[Box]:
    """``piece`` cut into its part inside ``knife`` and the rest."""
    common = piece.intersect(knife)
    return [piece] if common is None else [common, *subtract(piece, [common])]


def _choose(parts: Iterable[_Part]) -> Mapping[str, Mapping[tuple[Party, Party], list[Box]]]:
    """Gives each part to its least loaded holder, the largest first, those on the receiver's host preferred.

    Parts without a choice come before all, so that what can be chosen evens them out.

    Returns:
        By tensor, what each held placement (first of the key) gives to each wanted one (second).
    """
    load: dict[int, int] = defaultdict(int)
    chosen: dict[str, dict[tuple[Party, Party], list[Box]]] = defaultdict(lambda: defaultdict(list))
    # The sort is stable: equal parts stay in canonical order.
    for part in sorted(parts, key=lambda item: (len(item.holders.by_rank) > 1, -item.nbytes)):
        rank = min(part.holders.candidates(part.wanted.host), key=load.__getitem__)
        load[rank] += part.nbytes
        chosen[part.box.tensor][part.holders.by_rank[rank], part.wanted].append(part.box)
    return chosen


def _join(chosen: Mapping[tuple[Party, Party], list[Box]]) -> Iterator[Pair]:
    """Joins what one placement gives to another into the largest boxes."""
    for (source, destination), boxes in chosen.items():
        for box in coalesce(boxes) if len(boxes) > 1 else boxes:
            yield Pair(box, source, destination)


def _canonical(pair: Pair) -> tuple[object, ...]:
    return pair.box.start, pair.box.stop, pair.destination.index, pair.source.index
