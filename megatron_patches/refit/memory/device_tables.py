"""Encodes boxes as tables for the kernel that moves and digests many of them at once.

A box becomes one or more *entries*: rows of equal length whose starts form up to three nested loops of steps through
memory. An entry is covered by *tiles*, one per program of the kernel. Numbers only; nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.layout.boxes import row_major_strides
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.ports import Piece

VALUES, PACKED, FIRST_TILE, ROWS, COLUMNS, EXTENT1, EXTENT2 = range(7)
STEP0, STEP1, STEP2, COLUMN_STEP, ROW, INDEX0, INDEX1, INDEX2, COLUMN, DIGEST = range(7, 17)
FIELDS = 17
"""Columns of the table: first element in memory and in the packet; first tile; numbers of rows and columns; extents of
the two inner levels of rows; steps in memory of the three levels and of a column; the first row's index in the whole
tensor and the levels' steps of that index; the first column's index; where to add the digest."""

LOOPS, BYTE_LOOPS = 16, 64
"""Groups of rows that a tile processes one after the other; of single bytes more, because to hash columns takes
longer than to read so few bytes."""

_ELEMENTS = 2048  # of one group of rows
_MOST_COLUMNS = 1024  # of a tile: enough for full memory transactions; the rest are rows, which share column hashes
_LEVELS = 3
_VECTOR_BYTES = 16  # the most that one GPU thread reads at a time


@dataclass(frozen=True)
class TileShape:
    """The variant of the kernel that entries need.

    Attributes:
        width: bytes per element.
        aligned: whether rows start at multiples of 16 bytes, in memory and in the packet, with adjacent elements.
        nested: whether rows have more than one level of steps.
        columns: columns of a tile; a power of two.
    """

    width: int
    aligned: bool
    nested: bool
    columns: int

    @property
    def rows(self) -> int:
        """Rows of a tile that are processed at once."""
        return _ELEMENTS // self.columns

    @property
    def loops(self) -> int:
        """How many groups of :attr:`rows` rows a tile processes, one after the other."""
        return BYTE_LOOPS if self.width == 1 else LOOPS


@dataclass(frozen=True)
class ShapeTable:
    """Entries of one shape.

    Attributes:
        shape: their shape.
        table: int64, one entry per row; places in memory are relative to the start of the entry's storage.
        storages: number of each entry's storage.
        tiles: int32, the entry number of each tile.
    """

    shape: TileShape
    table: NDArray[np.int64]
    storages: NDArray[np.int64]
    tiles: NDArray[np.int32]


def describe(
    pieces: Sequence[Piece], storages: Sequence[str], offsets: Sequence[int], packed_offset: int = 0
) -> list[ShapeTable]:
    """Entries for some boxes. The digest of each box is added at its index.

    Args:
        pieces: the boxes.
        storages: names of their storages.
        offsets: for each storage, bytes of its start past a multiple of 16 bytes.
        packed_offset: the same for the packet.
    """
    number = {name: index for index, name in enumerate(storages)}
    found: dict[TileShape, list[tuple[list[int], int]]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        storage = number[piece.view.storage]
        for entry in _entries(piece, index):
            shape = _shape(entry, itemsize(piece.dtype), offsets[storage] or packed_offset)
            found[shape].append((entry, storage))
    return [_part(shape, entries) for shape, entries in found.items()]


def _part(shape: TileShape, entries: Sequence[tuple[list[int], int]]) -> ShapeTable:
    table = np.array([entry for entry, _ in entries], dtype=np.int64)
    down = -(-table[:, ROWS] // (shape.rows * shape.loops))
    counts = down * -(-table[:, COLUMNS] // shape.columns)
    table[:, FIRST_TILE] = np.cumsum(counts) - counts
    tiles = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
    return ShapeTable(shape, table, np.array([storage for _, storage in entries], dtype=np.int64), tiles)


def _entries(piece: Piece, digest: int) -> Iterator[list[int]]:
    """The entries of one box."""
    steps = piece.view.strides
    extents, start = piece.box.shape, piece.box.start
    row_steps = row_major_strides(piece.shape[:-1]) if piece.shape else ()
    first_row = sum(low * step for low, step in zip(start[:-1], row_steps, strict=True))
    columns, step, first_column = (extents[-1], steps[-1], start[-1]) if piece.shape else (1, 1, 0)
    levels = _merged(extents[:-1], steps[:-1], row_steps)
    outer, inner = levels[:-_LEVELS], levels[-_LEVELS:]
    (n0, s0, g0), (n1, s1, g1), (n2, s2, g2) = [(1, 0, 0)] * (_LEVELS - len(inner)) + inner
    rows = n0 * n1 * n2
    packed = piece.offset // itemsize(piece.dtype)
    for count, place in enumerate(np.ndindex(*[extent for extent, _, _ in outer])):
        moved = sum(at * step for at, (_, step, _) in zip(place, outer, strict=True))
        index = sum(at * step for at, (_, _, step) in zip(place, outer, strict=True))
        yield [
            piece.view.offset + moved,
            packed + count * rows * columns,
            0,
            rows,
            columns,
            n1,
            n2,
            s0,
            s1,
            s2,
            step,
            first_row + index,
            g0,
            g1,
            g2,
            first_column,
            digest,
        ]


def _merged(extents: Sequence[int], steps: Sequence[int], indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(extent, step in memory, step of the index) by dimension; neighbours are merged where both steps allow it."""
    merged: list[tuple[int, int, int]] = []
    for extent, step, index in zip(extents, steps, indices, strict=True):
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * step and merged[-1][2] == extent * index:
            merged[-1] = merged[-1][0] * extent, step, index
        else:
            merged.append((extent, step, index))
    return merged


def _shape(entry: Sequence[int], width: int, offset: int) -> TileShape:
    vector = _VECTOR_BYTES // width
    places = [entry[field] for field in (VALUES, PACKED, COLUMNS, STEP0, STEP1, STEP2)]
    aligned = entry[COLUMN_STEP] == 1 and offset == 0 and all(place % vector == 0 for place in places)
    nested = entry[ROWS] != entry[EXTENT2]
    return TileShape(width, aligned, nested, min(_MOST_COLUMNS, 1 << math.ceil(math.log2(entry[COLUMNS]))))
