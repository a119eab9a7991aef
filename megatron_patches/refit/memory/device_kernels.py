"""The Triton kernel that copies many strided boxes between memory and a packet, and digests them in the same pass.

One launch serves all boxes of a packet, or of a model, that need the same variant, so the cost for the host does not
grow with their number. Imported only if Triton is installed. It runs on the current stream, and on a CPU under
``TRITON_INTERPRET=1``.

[Note: digits] A product of 64 bits takes a GPU so many instructions that digesting bytes would take longer than reading
them. So the hash of a row is cut into three digits, and a byte costs one multiply-add of 32 bits for each. The sums of
the lower two digits cannot overflow; of the third, only the bits below 2**64 count.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

from megatron_patches.refit.layout import digest as constants
from megatron_patches.refit.memory import device_tables as fields
from megatron_patches.refit.memory.device_tables import TileShape

_WARPS = 4
_WARP = 32
_UNROLLED = 4  # groups of rows that a digest reads before it needs the first: one of bytes is 16 of them per thread
_VECTOR_BYTES = 16
_TYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}

_GOLDEN = tl.constexpr(constants.GOLDEN)
_MIX1 = tl.constexpr(constants.MIX1)
_MIX2 = tl.constexpr(constants.MIX2)
_SALT = tl.constexpr(constants.COLUMN_SALT)
_FIELDS = tl.constexpr(fields.FIELDS)
_VALUES = tl.constexpr(fields.VALUES)
_PACKED = tl.constexpr(fields.PACKED)
_FIRST_TILE = tl.constexpr(fields.FIRST_TILE)
_ROWS = tl.constexpr(fields.ROWS)
_COLUMNS = tl.constexpr(fields.COLUMNS)
_EXTENT1 = tl.constexpr(fields.EXTENT1)
_EXTENT2 = tl.constexpr(fields.EXTENT2)
_STEP0 = tl.constexpr(fields.STEP0)
_STEP1 = tl.constexpr(fields.STEP1)
_STEP2 = tl.constexpr(fields.STEP2)
_COLUMN_STEP = tl.constexpr(fields.COLUMN_STEP)
_ROW = tl.constexpr(fields.ROW)
_INDEX0 = tl.constexpr(fields.INDEX0)
_INDEX1 = tl.constexpr(fields.INDEX1)
_INDEX2 = tl.constexpr(fields.INDEX2)
_COLUMN = tl.constexpr(fields.COLUMN)
_DIGEST = tl.constexpr(fields.DIGEST)


class Move(IntEnum):
    """What the kernel does to each box."""

    DIGEST = 0
    PACK = 1
    UNPACK = 2


_DO_PACK = tl.constexpr(int(Move.PACK))
_DO_UNPACK = tl.constexpr(int(Move.UNPACK))


@triton.jit
def _odd_hash(index):  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton compiles it for what it is given
    # splitmix64, forced odd. Unsigned, so that products wrap and shifts fill with zeros.
    x = (index.to(tl.uint64) + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return (x ^ (x >> 31)) | 1


@triton.jit
def _place(row, extent1, extent2, step0, step1, step2, nested: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN202 - as above
    # Where a row lies, given the steps of its levels.
    if nested:
        return row // extent2 // extent1 * step0 + row // extent2 % extent1 * step1 + row % extent2 * step2
    return row * step2  # 64-bit divisions would take longer than everything else


# No annotations: Triton would interpret them.
@triton.jit
def _move_boxes(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915 - one kernel; branches are compiled away
    values,
    packed,
    table,
    tiles,
    digests,
    vector: tl.constexpr,
    nested: tl.constexpr,
    move: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    loops: tl.constexpr,
    unrolled: tl.constexpr,
    digit: tl.constexpr,
    folded: tl.constexpr,
    hashed_rows: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    entry = table + tl.load(tiles + program).to(tl.int64) * _FIELDS
    values_at = tl.load(entry + _VALUES)
    packed_at = tl.load(entry + _PACKED)
    rows = tl.load(entry + _ROWS)
    columns = tl.load(entry + _COLUMNS)
    step0 = tl.load(entry + _STEP0)
    step1 = tl.load(entry + _STEP1)
    step2 = tl.load(entry + _STEP2)
    if vector > 1:  # the host has checked this, so the compiler can read 16 bytes at a time
        values_at = tl.multiple_of(values_at, vector)
        packed_at = tl.multiple_of(packed_at, vector)
        columns = tl.multiple_of(columns, vector)
        step0 = tl.multiple_of(step0, vector)
        step1 = tl.multiple_of(step1, vector)
        step2 = tl.multiple_of(step2, vector)
    extent1 = tl.load(entry + _EXTENT1)
    extent2 = tl.load(entry + _EXTENT2)
    tile = program - tl.load(entry + _FIRST_TILE).to(tl.int32)
    across = tl.cdiv(columns, tile_columns).to(tl.int32)
    column = (tile % across) * tile_columns + tl.arange(0, tile_columns)
    first = (tile // across).to(tl.int64) * loops * tile_rows
    if move != _DO_UNPACK:
        first_row = tl.load(entry + _ROW)
        index0 = tl.load(entry + _INDEX0)
        index1 = tl.load(entry + _INDEX1)
        index2 = tl.load(entry + _INDEX2)
        if digit:
            low = tl.zeros((tile_rows, tile_columns), dtype=tl.uint32)
            middle = tl.zeros((tile_rows, tile_columns), dtype=tl.uint32)
            high = tl.zeros((tile_rows, tile_columns), dtype=tl.uint32)
        else:
            total = tl.zeros((tile_rows, tile_columns), dtype=tl.uint64)
    left = tl.minimum(rows - first, loops * tile_rows).to(tl.int32)  # rows of this tile
    for group in range(tl.cdiv(left, unrolled * tile_rows)):
        for member in tl.static_range(unrolled):
            row = first + (group * unrolled + member) * tile_rows + tl.arange(0, tile_rows)
            begin = values_at + _place(row, extent1, extent2, step0, step1, step2, nested)
            mask = (row < rows)[:, None] & (column < columns)[None, :]
            if vector > 1:
                place = values + (begin[:, None] + column[None, :])
            else:
                place = values + (begin[:, None] + column[None, :] * tl.load(entry + _COLUMN_STEP))
            slot = packed + (packed_at + row[:, None] * columns + column[None, :])
            if move == _DO_UNPACK:
                tl.store(place, tl.load(slot, mask=mask), mask=mask)
            else:
                value = tl.load(place, mask=mask, other=0)  # 0 adds nothing, whatever its weight
                if move == _DO_PACK:
                    tl.store(slot, value, mask=mask)
                weight = _odd_hash(first_row + _place(row, extent1, extent2, index0, index1, index2, nested))
                if digit:  # see [Note: digits]
                    bits = value.to(tl.uint32)
                    low += bits * (weight & ((1 << digit) - 1)).to(tl.uint32)[:, None]
                    middle += bits * (weight >> digit & ((1 << digit) - 1)).to(tl.uint32)[:, None]
                    high += bits * (weight >> 2 * digit).to(tl.uint32)[:, None]
                else:
                    bits = value.to(tl.uint64)
                    if folded:  # or two flipped signs would cancel
                        bits ^= bits >> 32
                    total += bits * weight[:, None]
    if move != _DO_UNPACK:
        if digit:
            total = low.to(tl.uint64) + (middle.to(tl.uint64) << digit) + (high.to(tl.uint64) << 2 * digit)
        # What adding 1 to every element adds. Summing in the loop above would hash each row twice: there, all threads
        # of a row hold its weight, and a sum needs it in another one's registers.
        weights = tl.zeros((hashed_rows,), dtype=tl.uint64)
        for part in range(tl.cdiv(left, hashed_rows)):
            row = first + part * hashed_rows + tl.arange(0, hashed_rows)
            weight = _odd_hash(first_row + _place(row, extent1, extent2, index0, index1, index2, nested))
            weights += tl.where(row < rows, weight, 0)
        hashed = _odd_hash((tl.load(entry + _COLUMN) + column).to(tl.uint64) ^ _SALT)
        ones = tl.sum(weights, axis=0) * tl.sum(tl.where(column < columns, hashed, 0), axis=0)
        found = ones + tl.sum(tl.sum(total, axis=0) * hashed, axis=0)
        tl.atomic_add(digests + tl.load(entry + _DIGEST), found.to(tl.int64))


def _digit(loops: int) -> int:
    """Bits of a digit whose products with so many bytes can be added in 32 bits; see [Note: digits]."""
    return ((1 << 32) // (255 * loops)).bit_length() - 1


def move_boxes(
    move: Move,
    shape: TileShape,
    values: torch.Tensor,
    packed: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    digests: torch.Tensor,
) -> None:
    """Moves or digests boxes; see :mod:`megatron_patches.refit.memory.device_tables`.

    Args:
        move: what to do.
        shape: variant that the entries need.
        values: tensor whose start is the origin of places in memory, counted in elements; boxes may lie outside the
            tensor, before or after it.
        packed: the packet, a byte tensor; ignored for a digest.
        table: int64, the entries.
        tiles: int32, the tiles, with one program for each.
        digests: int64; sums wrap.
    """
    element = _TYPES[shape.width]
    _move_boxes[(tiles.numel(),)](
        triton.reinterpret(values, element),
        triton.reinterpret(packed, element),
        table,
        tiles,
        digests,
        vector=_VECTOR_BYTES // shape.width if shape.aligned else 1,
        nested=shape.nested,
        move=int(move),
        tile_rows=shape.rows,
        tile_columns=shape.columns,
        loops=shape.loops,
        unrolled=_UNROLLED if move is Move.DIGEST and shape.aligned and not shape.nested else 1,
        digit=_digit(shape.loops) if shape.width == 1 else 0,
        folded=shape.width == 8,
        hashed_rows=min(shape.rows * shape.loops, max(shape.rows, _WARP * _WARPS)),
        num_warps=_WARPS,
    )
