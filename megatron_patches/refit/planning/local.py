"""Plans which sources send a destination which boxes, and finds the layouts of sources that it needs for that.

A destination's plan does not depend on other destinations, yet destinations together load replicas evenly:

1. The wanted grids are cut into *blocks* in which the same source regions are present, and the wanted box into *cells*,
   each of which is held whole by all of its holders. Where sources cut a tensor differently, the intersection is
   refined. Cells are computed once for all tensors of a block.
2. If a block has fewer tensors than a cell has holders, the cell is cut so that all holders can take part.
3. What only one source holds comes from it. Everything else comes from the least loaded holder so far, preferring
   holders on the destination's host, largest parts first. Ties are broken by a hash of destination and source, so
   each destination begins with another source.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_patches.refit.errors import CoverageError
from megatron_patches.refit.layout.boxes import Box, coalesce, overlapping_pair, subtract
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.planning.grids import Axes, Axis, Numbers, fold, join_name, meet, progressions, values_of
from megatron_patches.refit.planning.layouts import Corners, Holder, Kind, Layout, Region, Template
from megatron_patches.refit.planning.transfers import Request

_Held = tuple[Holder, Template]


class SourceIndex:
    """The distinct regions of sources, with all holders of each. One index serves any number of destinations.

    Args:
        holders: sources, in any order.

    Attributes:
        layouts: what each source holds, by rank.
        holders: all holders of a region, by pattern, axes and corners.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self.layouts: Mapping[int, Layout] = {holder.rank: holder.layout for holder in holders}
        self.holders: dict[str, dict[Axes, dict[Corners, list[_Held]]]] = {}
        self._refined: dict[frozenset[Corners], bool] = {}
        for holder in sorted(holders, key=lambda item: item.rank):
            for template in holder.layout.templates:
                region = template.region
                grids = self.holders.setdefault(region.tensor, {})
                corners = grids.setdefault(region.axes, {})
                corners.setdefault((region.start, region.stop), []).append((holder, template))

    def must_refine(self, corners: frozenset[Corners]) -> bool:
        """Whether any of these boxes overlap."""
        if corners not in self._refined:
            boxes = [Box("", *ends) for ends in sorted(corners)]
            self._refined[corners] = overlapping_pair(boxes) is not None
        return self._refined[corners]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Boxes of one size with the same holders."""

    nbytes: int
    box: Box
    wanted: Template
    block: _Block
    holders: Mapping[int, _Held]


class _Block:
    """Tensors of a grid in which the same source regions are present: a product of numbers, rising on each axis."""

    def __init__(self, numbers: Sequence[Sequence[int]]) -> None:
        self._numbers = numbers
        self.size = math.prod(map(len, numbers))

    def __iter__(self) -> Iterator[Numbers]:
        return itertools.product(*self._numbers)

    def grids(self) -> Iterator[Axes]:
        """The tensors of the block as few grids."""
        return itertools.product(*(list(progressions(values)) for values in self._numbers))


def plan_destination(
    rank: int, host: str, wanted: Layout, sources: SourceIndex, split_bytes: int
) -> dict[int, list[Request]]:
    """Plans what a destination requests of each source.

    Args:
        rank: rank of the destination; with ``host``, it determines the choice of replicas.
        host: name of its machine.
        wanted: what it wants.
        sources: what sources hold; sources that do not overlap may be left out.
        split_bytes: no part is cut into parts of fewer bytes.

    Returns:
        The requests, by source rank. Together they cover what is wanted, each element once.

    Raises:
        CoverageError: if no source holds some wanted element; names tensor, box and destination rank.
    """
    parts = [part for template in wanted.templates for part in _parts_of(template, wanted, sources, rank, split_bytes)]
    chosen = _choose(parts, rank, host)
    found: dict[int, list[Request]] = defaultdict(list)
    for (source, _, _), given in chosen.items():
        template, asked = given[0][0].holders[source][1], given[0][0].wanted
        dtype = wanted.kind(asked).dtype
        for axes, box in _grids(given):
            region = Region(asked.region.tensor, axes, box.start, box.stop)
            write = asked.views.part(asked.region, region)
            found[source].append(Request(template.number, axes, box.start, box.stop, write, dtype))
    return dict(sorted(found.items()))


def _grids(given: Sequence[_Given]) -> Iterator[tuple[Axes, Box]]:
    """The boxes of one template that come from one source, as few grids."""
    if len(given) == 1:
        part, tensors = given[0]
        for axes in part.block.grids() if tensors is None else (axes for axes, _ in fold((one, ()) for one in tensors)):
            yield axes, part.box
        return
    by_tensor: dict[Numbers, list[Box]] = defaultdict(list)
    for part, tensors in given:
        for numbers in part.block if tensors is None else tensors:
            by_tensor[numbers].append(part.box)
    by_boxes: dict[tuple[Box, ...], list[tuple[Numbers, Numbers]]] = defaultdict(list)
    for numbers, boxes in by_tensor.items():
        by_boxes[tuple(boxes)].append((numbers, ()))
    for same, rows in by_boxes.items():
        whole: Sequence[Box] = coalesce(same) if len(same) > 1 else same
        for axes, _ in fold(rows):
            yield from ((axes, box) for box in whole)


def even_shares(host: str, wanted: Layout, sources: SourceIndex, split_bytes: int) -> dict[int, float]:
    """Bytes that each source would send a destination if all candidates for a part sent an equal share of it.

    Arguments and errors are those of :func:`plan_destination`.
    """
    shares: dict[int, float] = defaultdict(float)
    for template in wanted.templates:
        for part in _parts_of(template, wanted, sources, 0, split_bytes):
            candidates = _candidates(part, host)
            for source in candidates:
                shares[source] += part.nbytes * part.block.size / len(candidates)
    return shares


def _candidates(part: _Part, host: str) -> Sequence[int]:
    """Ranks of the sources that may send a part: its holders on the destination's host, or else all holders."""
    return [source for source, (holder, _) in part.holders.items() if holder.host == host] or list(part.holders)


def _parts_of(asked: Template, wanted: Layout, held: SourceIndex, rank: int, split_bytes: int) -> Iterator[_Part]:
    """The parts of one wanted template."""
    region, width = asked.region, itemsize(wanted.kind(asked).dtype)
    known: dict[frozenset[Corners], list[tuple[Box, tuple[Box, ...]]]] = {}
    for block, replicas in _blocks(region, held):
        corners = frozenset(replicas)
        if corners not in known:
            known[corners] = _cells(region.box, [Box(region.tensor, *ends) for ends in sorted(corners)], held, corners)
        cells = known[corners]
        if sum(cell.volume for cell, _ in cells) != region.box.volume:
            missing = subtract(region.box, (cell for cell, _ in cells))[0]
            named = Box(join_name(region.tensor, next(iter(block))), missing.start, missing.stop)
            raise CoverageError(
                f"no source holds {named}, which destination rank {rank} wants in {asked.views.storage}"
            )
        for cell, owners in cells:
            holders: dict[int, _Held] = {}
            for owner in owners:
                for holder, template in replicas[owner.start, owner.stop]:
                    holders.setdefault(holder.rank, (holder, template))
            for box in _cut(cell, len(holders), block.size, width, split_bytes):
                yield _Part(box.volume * width, box, asked, block, holders)


def _cut(cell: Box, holders: int, tensors: int, width: int, split_bytes: int) -> Sequence[Box]:
    """Cuts a cell so that all holders can take part, if the block has fewer tensors than holders."""
    count = min(-(-holders // tensors), cell.volume * width // split_bytes)
    if count < 2 or not cell.shape:
        return (cell,)
    return cell.split(count, next((dim for dim, extent in enumerate(cell.shape) if extent > 1), 0))


def _blocks(region: Region, held: SourceIndex) -> Iterator[tuple[_Block, dict[Corners, list[_Held]]]]:
    """Cuts a grid wherever the set of sources changes. Yields each block with the boxes held of all of its tensors."""
    grids = {axes: corners for axes, corners in held.holders.get(region.tensor, {}).items() if meet(region.axes, axes)}
    by_axis: list[dict[frozenset[Axis], list[int]]] = []
    for dim, axis in enumerate(region.axes):
        present = {axes[dim] for axes in grids}
        alike: dict[frozenset[Axis], list[int]] = defaultdict(list)
        for value in values_of(axis):
            alike[frozenset(other for other in present if value in values_of(other))].append(value)
        by_axis.append(alike)
    for choice in itertools.product(*(alike.items() for alike in by_axis)):
        replicas: dict[Corners, list[_Held]] = defaultdict(list)
        for axes in itertools.product(*(sorted(allowed) for allowed, _ in choice)):
            for corners, holders in grids.get(axes, {}).items():
                replicas[corners].extend(holders)
        yield _Block([values for _, values in choice]), replicas


def _cells(
    wanted: Box, boxes: Sequence[Box], held: SourceIndex, corners: frozenset[Corners]
) -> list[tuple[Box, tuple[Box, ...]]]:
    """Disjoint pieces of ``wanted``, each with all held boxes that contain it."""
    near = [(box, common) for box in boxes if (common := box.intersect(wanted)) is not None]
    if not held.must_refine(corners):
        return [(common, (box,)) for box, common in near]
    pieces: list[Box] = []
    for _, common in near:
        fresh = subtract(common, pieces)
        old = [part for piece in pieces for part in _cut_by(piece, common)]
        pieces = old + fresh
    by_owners: dict[tuple[Box, ...], list[Box]] = defaultdict(list)
    for piece in pieces:
        by_owners[tuple(box for box, _ in near if box.contains(piece))].append(piece)
    return [(piece, owners) for owners, same in sorted(by_owners.items()) for piece in coalesce(same)]


def _cut_by(piece: Box, knife: Box) -> list[Box]:
    """``piece`` cut into the part inside ``knife`` and the rest."""
    common = piece.intersect(knife)
    return [piece] if common is None else [common, *subtract(piece, [common])]


_Given = tuple[_Part, Sequence[Numbers] | None]
"""A part, and those of its tensors that come from one source; None for all."""


def _choose(parts: Sequence[_Part], rank: int, host: str) -> Mapping[tuple[int, int, int], Sequence[_Given]]:
    """Assigns each tensor of each part to one of its holders.

    Returns:
        What each source sends, by its rank, the number of the held and of the wanted template.
    """
    load: dict[int, int] = defaultdict(int)
    order: dict[int, bytes] = {}
    chosen: dict[tuple[int, int, int], list[_Given]] = defaultdict(list)

    def give(part: _Part, source: int, tensors: Sequence[Numbers] | None) -> None:
        load[source] += part.nbytes * (part.block.size if tensors is None else len(tensors))
        chosen[source, part.holders[source][1].number, part.wanted.number].append((part, tensors))

    for part in sorted(parts, key=lambda item: (len(item.holders) > 1, -item.nbytes)):
        candidates = _candidates(part, host)
        if len(candidates) == 1:
            give(part, candidates[0], None)
            continue
        for source in candidates:
            if source not in order:
                order[source] = hashlib.sha256(f"{host}|{rank}|{source}".encode()).digest()
        heap = [(load[source], order[source], source) for source in candidates]
        heapq.heapify(heap)
        shares: dict[int, list[Numbers]] = defaultdict(list)
        for numbers in part.block:
            least, place, source = heap[0]
            shares[source].append(numbers)
            heapq.heapreplace(heap, (least + part.nbytes, place, source))
        for source, tensors in shares.items():
            give(part, source, tensors)
    return chosen


class OverlapIndex:
    """What each destination needs to know of the sources: the parts of their layouts that overlap what it wants.

    Each distinct region of the sources is compared once, however many sources hold it, and only with wanted regions of
    the same pattern. Sources that hold the same part of what is wanted share one layout, even if they differ elsewhere.

    Args:
        holders: sources, in the order in which destinations receive them.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._regions: dict[str, dict[Axes, dict[Corners, int]]] = {}
        self._met: dict[Region, frozenset[int]] = {}
        # For each holder: the number of its kinds, and the numbers of each template's region and of the template.
        self._held: list[tuple[int, list[tuple[int, int]]]] = []
        regions: dict[Region, int] = {}
        templates: dict[Template, int] = {}
        kinds: dict[tuple[Kind, ...], int] = {}
        for holder in holders:
            mine = []
            for template in holder.layout.templates:
                number = regions.setdefault(template.region, len(regions))
                mine.append((number, templates.setdefault(template, len(templates))))
            self._held.append((kinds.setdefault(holder.layout.kinds, len(kinds)), mine))
        self._templates, self._kinds = list(templates), list(kinds)
        for region, number in regions.items():
            corners = self._regions.setdefault(region.tensor, {}).setdefault(region.axes, {})
            corners[region.start, region.stop] = number

    def overlapping(self, wanted: Iterable[Region]) -> tuple[list[Layout], list[tuple[int, str, int]]]:
        """The sources that overlap what a destination wants.

        Args:
            wanted: regions that it wants.

        Returns:
            Distinct layouts, without templates that do not overlap; rank and host of each overlapping source, and the
            index of its layout.
        """
        met = frozenset[int]().union(*map(self._meeting, wanted))
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        layouts: list[Layout] = []
        holders: list[tuple[int, str, int]] = []
        for holder, (kinds, held) in zip(self._holders, self._held, strict=True):
            part = tuple([template for region, template in held if region in met])
            if not part:
                continue
            if (kinds, part) not in numbers:
                numbers[kinds, part] = len(layouts)
                layouts.append(Layout(tuple(self._templates[number] for number in part), self._kinds[kinds]))
            holders.append((holder.rank, holder.host, numbers[kinds, part]))
        return layouts, holders

    def _meeting(self, wanted: Region) -> frozenset[int]:
        """Numbers of the held regions that overlap a wanted one. Cached, as many destinations want the same."""
        if wanted not in self._met:
            self._met[wanted] = frozenset(
                number
                for axes, corners in self._regions.get(wanted.tensor, {}).items()
                if meet(wanted.axes, axes)
                for (start, stop), number in corners.items()
                if all(map(_overlap, wanted.start, wanted.stop, start, stop))
            )
        return self._met[wanted]


def _overlap(start: int, stop: int, other: int, end: int) -> bool:
    return max(start, other) < min(stop, end)
