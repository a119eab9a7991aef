"""Pairs what is held with what is wanted: which rank sends which part of which box to whom, and in which round.

Pure and deterministic: from the same manifests every party computes the same plan alone, and compares
:attr:`Plan.digest` with the others before the first byte moves.

1. The distinct boxes that sources hold of a tensor are intersected with each wanted box. Where sources cut the
   tensor differently the intersection is refined, so that every *cell* is held whole by each of its candidates.
2. A cell held by several ranks (TP-, ETP- or DP-peers with the same bytes) is cut among them when it is large
   enough, and each part goes to the least loaded candidate, those on the receiver's host first, largest parts first.
3. Parts that one rank sends to one destination and that form a larger box are joined, then cut to the staging
   budget and dealt into rounds in which no party stages more than its budget.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_patches.refit.boxes import Box, TensorSpec, View, coalesce, overlapping_pair, subtract
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import CoverageError
from megatron_patches.refit.manifest import Manifest, Placement


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan.

    Attributes:
        staging_bytes: bytes that one party may stage in one round, as source or as destination.
        split_bytes: cells of at least twice this size are cut among the ranks that hold them.
        conversions: pairs (source dtype, destination dtype) that may be converted on the way; all else must be equal.
        bound_destinations: whether destinations stage too. A file does not.
    """

    staging_bytes: int = 256 << 20
    split_bytes: int = 1 << 20
    conversions: frozenset[tuple[str, str]] = frozenset()
    bound_destinations: bool = True

    def __post_init__(self) -> None:
        if self.staging_bytes < 8 or self.split_bytes < 1:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes} and split_bytes is {self.split_bytes}; "
                "a round must hold one element of 8 bytes, and a part one byte"
            )


DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part of one box on its way.

    Attributes:
        round: number of the round in which it moves, from 0.
        source: rank that sends it.
        destination: rank, on the other side, that receives it.
        box: what it is.
        read: where it lies at the source.
        write: where it goes at the destination.
        source_dtype: element type at the source.
        dtype: element type at the destination.
    """

    round: int
    source: int
    destination: int
    box: Box
    read: View
    write: View
    source_dtype: str
    dtype: str

    @property
    def staged_bytes(self) -> int:
        """Bytes it takes where the two dtypes need the more."""
        return self.box.volume * max(itemsize(self.source_dtype), itemsize(self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.box.volume * itemsize(self.dtype)


@dataclass(frozen=True)
class Plan:
    """All transfers of one refit, in canonical order: by tensor, box, destination and place."""

    tensors: tuple[TensorSpec, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 over everything in the plan, as hexadecimal digits."""
        content = hashlib.sha256()
        for spec in self.tensors:
            content.update(f"T|{spec.name}|{spec.shape}|{spec.dtype}\n".encode())
        for item in self.transfers:
            content.update(
                f"X|{item.round}|{item.source}|{item.destination}|{item.box}|{_view_text(item.read)}|"
                f"{_view_text(item.write)}|{item.source_dtype}|{item.dtype}\n".encode()
            )
        return content.hexdigest()

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return max((item.round for item in self.transfers), default=-1) + 1

    @property
    def nbytes(self) -> int:
        """Bytes written by all transfers together."""
        return sum(item.nbytes for item in self.transfers)

    def sent_by(self, rank: int) -> list[list[Transfer]]:
        """What rank ``rank`` sends, by round."""
        rounds: list[list[Transfer]] = [[] for _ in range(self.rounds)]
        for item in self.transfers:
            if item.source == rank:
                rounds[item.round].append(item)
        return rounds

    def bytes_by_source(self) -> dict[int, int]:
        """Bytes that each source sends."""
        total: dict[int, int] = defaultdict(int)
        for item in self.transfers:
            total[item.source] += item.nbytes
        return dict(total)


def _view_text(view: View) -> str:
    return f"{view.storage}@{view.offset}{view.shape}{view.strides}"


@dataclass(frozen=True, slots=True)
class _Holder:
    """A rank that holds a box, where, and as what."""

    rank: int
    host: str
    placement: Placement
    dtype: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a wanted box that is not yet given to one of its holders."""

    box: Box
    wanted: _Holder
    holders: tuple[_Holder, ...]


def make_plan(
    tensors: Sequence[TensorSpec],
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Plans how every wanted box is put together from held ones.

    Args:
        tensors: all tensors of the model; dtypes are those of the destination where the two differ.
        sources: what each source rank holds, in any order.
        destinations: what each destination rank wants, in any order.
        options: budgets and allowed conversions.

    Returns:
        The plan; the same for every order of the manifests.

    Raises:
        CoverageError: if some wanted element is held by nobody; names tensor, box and destination rank.
    """
    held, wanted = _by_tensor(sources), _by_tensor(destinations)
    parts: list[_Part] = []
    for name in sorted(wanted):
        parts.extend(_parts_of_tensor(held.get(name, []), wanted[name], options))
    chosen = _choose(parts)
    return Plan(tuple(sorted(tensors)), tuple(_into_rounds(_join(chosen), options)))


def _by_tensor(manifests: Sequence[Manifest]) -> Mapping[str, list[_Holder]]:
    found: dict[str, list[_Holder]] = defaultdict(list)
    for manifest in sorted(manifests, key=lambda item: item.rank):
        for placement in manifest.placements:
            dtype = manifest.storage[placement.view.storage].dtype
            found[placement.box.tensor].append(_Holder(manifest.rank, manifest.host, placement, dtype))
    return found


def _parts_of_tensor(held: list[_Holder], wanted: list[_Holder], options: PlanOptions) -> list[_Part]:
    """Cells of every wanted box of one tensor, the large ones cut among their holders."""
    replicas: dict[Box, list[_Holder]] = defaultdict(list)
    for holder in held:
        replicas[holder.placement.box].append(holder)
    boxes = sorted(replicas)
    refine = overlapping_pair(boxes) is not None
    cells_of: dict[Box, list[tuple[Box, tuple[_Holder, ...]]]] = {}
    parts: list[_Part] = []
    for want in sorted(wanted, key=lambda item: (item.placement.box, item.rank, item.placement.view)):
        box = want.placement.box
        if box not in cells_of:
            cells_of[box] = _cells(box, boxes, replicas, refine)
            missing = subtract(box, (cell for cell, _ in cells_of[box]))
            if missing:
                raise CoverageError(
                    f"no source holds {missing[0]}, which destination rank {want.rank} wants in "
                    f"{want.placement.view.storage} as part of {box}"
                )
        for cell, holders in cells_of[box]:
            size = cell.volume * itemsize(want.dtype)
            dim = next((index for index, extent in enumerate(cell.shape) if extent > 1), 0)
            count = min(len({holder.rank for holder in holders}), size // options.split_bytes)
            pieces = cell.split(count, dim) if cell.shape else [cell]
            parts.extend(_Part(piece, want, holders) for piece in pieces)
    return parts


def _cells(
    wanted: Box, boxes: Sequence[Box], replicas: Mapping[Box, list[_Holder]], refine: bool
) -> list[tuple[Box, tuple[_Holder, ...]]]:
    """Disjoint pieces of ``wanted``, each with all holders that have it whole."""
    near = [(box, common) for box in boxes if (common := box.intersect(wanted)) is not None]
    if not refine:
        return [(common, tuple(replicas[box])) for box, common in near]
    pieces: list[Box] = []
    for _, common in near:
        fresh: list[Box] = subtract(common, pieces)
        old = [part for piece in pieces for part in _cut_by(piece, common)]
        pieces = old + fresh
    by_holders: dict[tuple[Box, ...], list[Box]] = defaultdict(list)
    for piece in pieces:
        by_holders[tuple(box for box, _ in near if box.contains(piece))].append(piece)
    return [
        (piece, tuple(holder for box in owners for holder in replicas[box]))
        for owners, same in sorted(by_holders.items())
        for piece in coalesce(same)
    ]


def _cut_by(piece: Box, knife: Box) -> list[Box]:
    """``piece`` cut into its part inside ``knife`` and the rest."""
    common = piece.intersect(knife)
    return [piece] if common is None else [common, *subtract(piece, [common])]


def _choose(parts: Sequence[_Part]) -> Mapping[tuple[_Holder, _Holder], list[Box]]:
    """Gives each part to its least loaded holder, the largest first, those on the receiver's host preferred.

    Returns:
        What each held placement (first of the key) gives to each wanted one (second).
    """
    load: dict[int, int] = defaultdict(int)
    chosen: dict[tuple[_Holder, _Holder], list[Box]] = defaultdict(list)
    for part in sorted(parts, key=lambda p: (-p.box.volume, p.box, p.wanted.rank, p.wanted.placement.view)):
        best = min(
            part.holders,
            key=lambda h: (h.host != part.wanted.host, load[h.rank], h.rank, h.placement.view),
        )
        load[best.rank] += part.box.volume * itemsize(part.wanted.dtype)
        chosen[best, part.wanted].append(part.box)
    return chosen


def _join(chosen: Mapping[tuple[_Holder, _Holder], list[Box]]) -> list[Transfer]:
    """Joins what one placement gives to another into the largest boxes, and sorts all canonically."""
    joined = [
        Transfer(
            round=0,
            source=holder.rank,
            destination=wanted.rank,
            box=box,
            read=holder.placement.view.cut(holder.placement.box, box),
            write=wanted.placement.view.cut(wanted.placement.box, box),
            source_dtype=holder.dtype,
            dtype=wanted.dtype,
        )
        for (holder, wanted), boxes in chosen.items()
        for box in coalesce(boxes)
    ]
    return sorted(joined, key=lambda item: (item.box, item.destination, item.write, item.source, item.read))


def _into_rounds(transfers: Sequence[Transfer], options: PlanOptions) -> list[Transfer]:
    """Cuts transfers to the staging budget and deals them, in order, into rounds."""
    filled: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))  # side and rank -> round, bytes in it
    result = []
    for whole in transfers:
        width = max(itemsize(whole.source_dtype), itemsize(whole.dtype))
        sides = [("source", whole.source)]
        if options.bound_destinations:
            sides.append(("destination", whole.destination))
        for box in whole.box.chunks(options.staging_bytes // width):
            size = box.volume * width
            at = max(filled[side][0] for side in sides)
            if any(filled[side][0] == at and filled[side][1] + size > options.staging_bytes for side in sides):
                at += 1
            for side in sides:
                before = filled[side][1] if filled[side][0] == at else 0
                filled[side] = (at, before + size)
            read, write = whole.read.cut(whole.box, box), whole.write.cut(whole.box, box)
            result.append(replace(whole, round=at, box=box, read=read, write=write))
    return result
