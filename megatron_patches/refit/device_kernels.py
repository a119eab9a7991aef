"""The Triton kernel that copies many strided boxes between memory and a packet, and digests them in the same pass.

One launch serves all boxes of a packet, or of a model, that need the same variant, so the cost for the host does not
grow with their number. Imported only if Triton is installed. It runs on the current stream, and on a CPU under
``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

from megatron_patches.refit import device_tables as fields
from megatron_patches.refit import digest as constants
from megatron_patches.refit.device_tables import Shape

_WARPS = 4
_VECTOR_BYTES = 16
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

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


_DO_DIGEST = tl.constexpr(int(Move.DIGEST))
_DO_PACK = tl.constexpr(int(Move.PACK))
_DO_UNPACK = tl.constexpr(int(Move.UNPACK))


@triton.jit
def _odd_hash(index):  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton compiles it for what it is given
    # splitmix64, forced odd. Unsigned, so that products wrap and shifts fill with zeros.
    x = (index + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return ((x ^ (x >> 31)) | 1).to(tl.int64)


# No annotations: Triton would interpret them.
@triton.jit
def _move_boxes(  # type: ignore[no-untyped-def]  # noqa: PLR0915 - one kernel; branches are compiled away
    values,
    packed,
    table,
    tiles,
    digests,
    width: tl.constexpr,
    vector: tl.constexpr,
    nested: tl.constexpr,
    move: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    loops: tl.constexpr,
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
    if move != _DO_UNPACK:
        first_row = tl.load(entry + _ROW)
        index0 = tl.load(entry + _INDEX0)
        index1 = tl.load(entry + _INDEX1)
        index2 = tl.load(entry + _INDEX2)
        total = tl.zeros((tile_rows, tile_columns), dtype=tl.int64)
    for loop in range(loops):
        row = ((tile // across).to(tl.int64) * loops + loop) * tile_rows + tl.arange(0, tile_rows)
        if nested:
            at2 = row % extent2
            at1 = (row // extent2) % extent1
            at0 = row // extent2 // extent1
            begin = values_at + at0 * step0 + at1 * step1 + at2 * step2
        else:  # 64-bit divisions would take longer than everything else
            begin = values_at + row * step2
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        if vector > 1:
            place = values + (begin[:, None] + column[None, :])
        else:
            place = values + (begin[:, None] + column[None, :] * tl.load(entry + _COLUMN_STEP))
        slot = packed + (packed_at + row[:, None] * columns + column[None, :])
        if move == _DO_UNPACK:
            tl.store(place, tl.load(slot, mask=mask), mask=mask)
        else:
            value = tl.load(place, mask=mask, other=0)
            if move == _DO_PACK:
                tl.store(slot, value, mask=mask)
            bits = value.to(tl.int64)
            if width < 8:
                bits = bits & ((1 << (8 * width)) - 1)
            index = first_row + (at0 * index0 + at1 * index1 + at2 * index2 if nested else row * index2)
            weight = _odd_hash(index.to(tl.uint64))
            total += tl.where(mask, (bits + 1) * weight[:, None], 0)
    if move != _DO_UNPACK:
        hashed = (tl.load(entry + _COLUMN) + column).to(tl.uint64) ^ _SALT
        shares = tl.sum(total, axis=0) * _odd_hash(hashed)
        tl.atomic_add(digests + tl.load(entry + _DIGEST), tl.sum(shares, axis=0))


def move_boxes(
    move: Move,
    shape: Shape,
    values: torch.Tensor,
    packed: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    digests: torch.Tensor,
) -> None:
    """Moves or digests boxes; see :mod:`megatron_patches.refit.device_tables`.

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
        width=shape.width,
        vector=_VECTOR_BYTES // shape.width if shape.aligned else 1,
        nested=shape.nested,
        move=int(move),
        tile_rows=shape.rows,
        tile_columns=shape.columns,
        loops=shape.loops,
        num_warps=_WARPS,
    )
