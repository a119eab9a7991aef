"""Triton kernels that quantize the shards of all weights in one launch. Imported only where there is a CUDA device.

[Note: tiles] A launch has one program for each tile of 128 x 128 elements of any shard. A table in device memory tells
a program to which shard its tile belongs. So a model takes one launch, however many layers and experts it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

TILE = 128
_WARPS = 8
_ALIGNMENT = 16


class TileTable:
    """The tiles of some matrices of one type; see [Note: tiles].

    Args:
        rows: for each matrix: the matrix ``[rows, columns]`` and its bytes, of the same shape, both contiguous; the
            place of its numbers in a vector of fp32; and the distance there from one row of tiles to the next, 0 if
            the matrix has a single number.
    """

    def __init__(self, rows: Sequence[tuple[tuple[torch.Tensor, torch.Tensor], int, int]]) -> None:
        counts = [-(-source.shape[0] // TILE) * -(-source.shape[1] // TILE) for (source, _), _, _ in rows]
        firsts = [0, *accumulate(counts)]
        self.count = firsts.pop()
        entries = [
            (source.data_ptr(), target.data_ptr(), *source.shape, place, stride, first)
            for ((source, target), place, stride), first in zip(rows, firsts, strict=True)
        ]
        first = rows[0][0][0]
        self.dtype = first.dtype
        self.matrices = torch.tensor(entries, dtype=torch.int64, device=first.device)
        owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        self.owners = owners.to(first.device)
        self.aligned = all(entry[i] % _ALIGNMENT == 0 for entry in entries for i in (0, 1, 3))
        """Whether all rows begin at multiples of 16 bytes."""
        # The addresses are of memory that must live as long as the table.
        self._kept = rows


# Without annotations, which Triton would interpret as its own types.
@triton.jit
def _tile(matrices, owners, aligned: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses, offsets and mask of this program's tile, and the place of its number."""
    program = tl.program_id(0)
    matrix = matrices + tl.load(owners + program).to(tl.int64) * 7
    source, target = tl.load(matrix), tl.load(matrix + 1)
    rows, columns = tl.load(matrix + 2), tl.load(matrix + 3)
    place, stride, first = tl.load(matrix + 4), tl.load(matrix + 5), tl.load(matrix + 6)
    if aligned:
        # So that loads and stores are of 16 bytes: Triton cannot know it of numbers that it reads from memory.
        source, target, columns = tl.multiple_of(source, 16), tl.multiple_of(target, 16), tl.multiple_of(columns, 16)
    across = (columns + tile - 1) // tile
    number = program - first
    down, right = number // across, number % across
    row, column = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None, :]
    mask = (row < rows - down * tile) & (column < columns - right * tile)
    place = tl.where(stride == 0, place, place + down * stride + right)
    # 64 bits for the tile's first element only: one offset for each element would take twice the registers.
    begin = (down * columns + right) * tile
    offsets = row * columns.to(tl.int32) + column
    return source, target, begin, offsets, mask, place


@triton.jit
def _scale(amax, epsilon, largest, power_of_two: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`etp.formats.scale_of` for one tile."""
    amax = tl.maximum(amax, epsilon)
    usable = (amax > 0) & (amax < float("inf"))
    scale = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), tl.where(usable, amax, 1.0))
    scale = tl.where(scale < float("inf"), scale, largest)
    if power_of_two:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def _quantize_blocks(  # type: ignore[no-untyped-def]
    matrices,
    owners,
    numbers,
    epsilon,
    largest,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    power_of_two: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    source, target, begin, offsets, mask, place = _tile(matrices, owners, aligned, tile)
    values = tl.load(source.to(tl.pointer_type(dtype)) + begin + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(values)), epsilon, largest, power_of_two)
    bytes_ = (values * scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + begin + offsets, bytes_, mask=mask)
    tl.store(numbers + place, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    matrices, owners, numbers, dtype: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr
) -> None:
    source, _, begin, offsets, mask, place = _tile(matrices, owners, aligned, tile)
    values = tl.load(source.to(tl.pointer_type(dtype)) + begin + offsets, mask=mask, other=0.0).to(tl.float32)
    # Of numbers that are not negative, the order of the bits is that of the values.
    tl.atomic_max((numbers + place).to(tl.pointer_type(tl.int32)), tl.max(tl.abs(values)).to(tl.int32, bitcast=True))


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    matrices, owners, numbers, dtype: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr
) -> None:
    source, target, begin, offsets, mask, place = _tile(matrices, owners, aligned, tile)
    values = tl.load(source.to(tl.pointer_type(dtype)) + begin + offsets, mask=mask, other=0.0).to(tl.float32)
    bytes_ = (values * tl.load(numbers + place)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + begin + offsets, bytes_, mask=mask)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def quantize_blocks(table: TileTable, numbers: torch.Tensor, *, power_of_two: bool, epsilon: float) -> None:
    """Quantize each tile to E4M3 with a scale of its own, whose inverse goes to the tile's place in ``numbers``."""
    _quantize_blocks[(table.count,)](
        table.matrices,
        table.owners,
        numbers,
        epsilon,
        torch.finfo(table.dtype).max,
        dtype=_TYPES[table.dtype],
        aligned=table.aligned,
        power_of_two=power_of_two,
        tile=TILE,
        num_warps=_WARPS,
    )


def largest_magnitudes(table: TileTable, numbers: torch.Tensor) -> None:
    """The largest magnitude of each matrix, into its place in ``numbers``, which is 0 or a lower bound before."""
    _largest[(table.count,)](
        table.matrices,
        table.owners,
        numbers,
        dtype=_TYPES[table.dtype],
        aligned=table.aligned,
        tile=TILE,
        num_warps=_WARPS,
    )


def cast(table: TileTable, scales: torch.Tensor) -> None:
    """Cast each matrix to E4M3 after multiplying it with its number in ``scales``."""
    _cast[(table.count,)](
        table.matrices,
        table.owners,
        scales,
        dtype=_TYPES[table.dtype],
        aligned=table.aligned,
        tile=TILE,
        num_warps=_WARPS,
    )
