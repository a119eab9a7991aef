"""Computes where the rows of a shard lie in the tensors of a checkpoint, with integers only.

A checkpoint holds whole weights: neither the sharding nor its padding is visible in it. Up to four steps lie between a
shard and the checkpoint's tensor, which :class:`WeightPlacement` undoes at once:

1. padding at the end of the shards (``ShardLayout``): never part of a piece;
2. the weight-shard split, along dim 0 of the tensor-parallel part;
3. the tensor-parallel split, along dim 0 or another one. Tensor parallelism splits a weight of several
   stacked matrices (gate and up of a gated MLP) part by part, so one rank's rows are not contiguous in the whole
   weight; a shard's rows then form up to one piece per part;
4. leading axes: Megatron stores the layers of one model, and the experts of one layer, stacked in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etp.layout import ShardLayout


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a tensor-parallel rank's weight that tensor parallelism splits separately.

    Attributes:
        rows: rows of the part on one tensor-parallel rank.
        suffix: added to the checkpoint's key. Parts with the same suffix are stacked in one tensor.
    """

    rows: int
    suffix: str = ""


@dataclass(frozen=True)
class StackAxis:
    """A leading axis before the weight's own axes: the weight is number ``index`` of ``count``.

    Raises:
        ValueError: if ``index`` is not in ``[0, count)``.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"weight {self.index} of {self.count} stacked weights does not exist")


@dataclass(frozen=True)
class ShardPiece:
    """Consecutive rows of one shard, and the region of a checkpoint's tensor that they occupy.

    Attributes:
        suffix: added to the checkpoint's key.
        start: first row in the shard.
        rows: number of rows; 0 only in :meth:`WeightPlacement.no_piece`.
        shape: shape of the region, including the leading axes (of size 1).
        offset: first element of the region in the checkpoint's tensor, per axis.
        global_shape: shape of the checkpoint's tensor.
    """

    suffix: str
    start: int
    rows: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WeightPlacement:
    """Where one shard of one weight lies in a checkpoint.

    Attributes:
        layout: the weight-shard split of the tensor-parallel part.
        shard: this rank's shard, ``0 <= shard < layout.num_shards``.
        tp_axis: the axis of the weight that tensor parallelism splits.
        tp_rank: this rank's tensor-parallel part.
        tp_size: number of tensor-parallel parts; 1 for a weight that every tensor-parallel rank holds whole.
        stack: the leading axes, outermost first.
        parts: the parts that tensor parallelism splits separately, top to bottom; empty if the weight is one part.

    Raises:
        ValueError: if ranks or axes are out of range, or the parts do not add up to the weight's rows.
    """

    layout: ShardLayout
    shard: int
    tp_axis: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    stack: tuple[StackAxis, ...] = ()
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.layout.num_shards:
            raise ValueError(f"shard {self.shard} of a weight with {self.layout.num_shards} shards does not exist")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tensor-parallel rank {self.tp_rank} of {self.tp_size} does not exist")
        if not 0 <= self.tp_axis < len(self.layout.shape):
            raise ValueError(f"a weight of shape {self.layout.shape} has no axis {self.tp_axis} to cut")
        if not self.parts:
            object.__setattr__(self, "parts", (Part(self.layout.rows),))
        if any(part.rows <= 0 for part in self.parts) or sum(p.rows for p in self.parts) != self.layout.rows:
            raise ValueError(
                f"parts of {[part.rows for part in self.parts]} rows do not make up a weight of {self.layout.rows}"
            )

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds, including padding."""
        return self.layout.shard_shape

    def pieces(self) -> tuple[ShardPiece, ...]:
        """The shard's rows, split at the borders of the parts, in the shard's order; none for a shard of padding."""
        first, stop = self.layout.logical_range(self.shard)
        shard_start, _ = self.layout.padded_range(self.shard)
        found: list[ShardPiece] = []
        above: dict[str, int] = {}  # per suffix: rows on one rank of the parts before this one
        part_start = 0
        for part in self.parts:
            low, high = max(first, part_start), min(stop, part_start + part.rows)
            if low < high:
                row = above.get(part.suffix, 0) * self._row_ranks + self._row_rank * part.rows + low - part_start
                found.append(self._piece(part.suffix, start=low - shard_start, rows=high - low, global_row=row))
            above[part.suffix] = above.get(part.suffix, 0) + part.rows
            part_start += part.rows
        return tuple(found)

    def no_piece(self) -> ShardPiece:
        """An empty region after the last row of the first part's tensor; it overlaps nothing."""
        suffix = self.parts[0].suffix
        return self._piece(suffix, start=0, rows=0, global_row=self.global_rows[suffix])

    @property
    def global_rows(self) -> Mapping[str, int]:
        """Rows of each of the checkpoint's tensors that this weight is part of, by suffix."""
        rows: dict[str, int] = {}
        for part in self.parts:
            rows[part.suffix] = rows.get(part.suffix, 0) + part.rows * self._row_ranks
        return MappingProxyType(rows)

    @property
    def _row_ranks(self) -> int:
        return self.tp_size if self.tp_axis == 0 else 1

    @property
    def _row_rank(self) -> int:
        return self.tp_rank if self.tp_axis == 0 else 0

    def _piece(self, suffix: str, *, start: int, rows: int, global_row: int) -> ShardPiece:
        columns = self.layout.shape[1:]
        ranks = [self.tp_size if axis == self.tp_axis else 1 for axis in range(1, len(self.layout.shape))]
        ours = [self.tp_rank if axis == self.tp_axis else 0 for axis in range(1, len(self.layout.shape))]
        return ShardPiece(
            suffix=suffix,
            start=start,
            rows=rows,
            shape=(*(1 for _ in self.stack), rows, *columns),
            offset=(
                *(axis.index for axis in self.stack),
                global_row,
                *(rank * size for rank, size in zip(ours, columns, strict=True)),
            ),
            global_shape=(
                *(axis.count for axis in self.stack),
                self.global_rows[suffix],
                *(count * size for count, size in zip(ranks, columns, strict=True)),
            ),
        )


def halves(layout: ShardLayout, suffixes: tuple[str, str] = ("", "")) -> tuple[Part, Part]:
    """The parts of a gated MLP's first weight: gate on top, up below.

    Raises:
        ValueError: if the rows are odd.
    """
    half, odd = divmod(layout.rows, 2)
    if odd:
        raise ValueError(f"a gated weight of {layout.rows} rows has no two halves")
    return Part(half, suffixes[0]), Part(half, suffixes[1])
