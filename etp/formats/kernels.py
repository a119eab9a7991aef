"""Triton kernels that quantize the shards of all weights in one launch. Imported only where there is a CUDA device.

[Note: tiles] A launch has one program for each tile of 128 x 128 elements of any shard. A table in device memory tells
a program to which shard its tile belongs. So a model takes one launch, however many layers and experts it has.

[Note: quarters] A tile is read as four quarters of its rows, which share their offsets and differ in a scalar. As one
block of 128 x 128 it would keep an address and a mask for each element in registers, and take 1.5 times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

TILE = 128
# Warps for each byte of an element: a tile stays in registers between its reading and its writing.
_WARPS = 2
_ALIGNMENT = 16
_DOWN, _ACROSS, _TRANSPOSE_WARPS = 64, 128, 4
_TYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiled:
    """A matrix, cut into tiles from its first element on.

    Attributes:
        source: the matrix ``[rows, columns]``. The elements of a row are adjacent.
        target: its bytes, uint8 ``[rows, columns]``, with as many elements from one row to the next as the matrix has.
        place: index of the first tile's number (its scale or largest magnitude) in a vector of fp32.
        steps: distance there from a tile to the one below it, and to the one right of it. 0 if the matrix has a single
            number.
    """

    source: torch.Tensor
    target: torch.Tensor
    place: int
    steps: tuple[int, int] = (0, 0)


class Table:
    """The tiles of some matrices of one dtype, for launches of one program each; see [Note: tiles].

    Args:
        sources: the matrices ``[rows, columns]``.
        entries: for each, what a kernel reads of it: addresses and numbers. The number of its first tile is appended.
        aligned: which of these must be multiples of 16 for loads and stores of 16 bytes.
        tile: rows and columns of a tile.
        warps: for each program.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        entries: Sequence[Sequence[int]],
        *,
        aligned: Sequence[int],
        tile: int,
        warps: int,
    ) -> None:
        counts = [-(-rows // tile) * -(-columns // tile) for rows, columns in (source.shape for source in sources)]
        firsts = [0, *accumulate(counts)]
        self.count = firsts.pop()
        rows = [(*entry, first) for entry, first in zip(entries, firsts, strict=True)]
        self.dtype = sources[0].dtype
        self.matrices = torch.tensor(rows, dtype=torch.int64, device=sources[0].device)
        owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        self.owners = owners.to(sources[0].device)
        self._constants = {
            "dtype": _TYPES[self.dtype],
            "aligned": all(row[i] % _ALIGNMENT == 0 for row in rows for i in aligned),
            "tile": tile,
            "num_warps": warps,
        }
        self._again: dict[tuple[Any, ...], tuple[Callable[..., None], list[Any]]] = {}
        """What launches a compiled kernel, and its last arguments, by all that Triton compiles it for."""

    def launch(self, kernel: Any, *numbers: Any, **constants: Any) -> None:
        """Run one program of ``kernel`` for each tile."""
        form = kernel, *map(_form, numbers), *constants.values()
        if form in self._again:
            run, last = self._again[form]
            run(self.matrices, self.owners, *numbers, *last)
            return
        grid, constants = (self.count, 1, 1), constants | self._constants
        compiled = kernel[grid](self.matrices, self.owners, *numbers, **constants)
        # Nothing is compiled under Triton's interpreter.
        if compiled is not None:
            last = [constants[name] for name in kernel.arg_names[2 + len(numbers) :]]
            self._again[form] = compiled[grid], last


def _form(number: Any) -> object:
    """What Triton compiles a kernel for, of an argument that is no constant; of an integer, more than that."""
    if isinstance(number, torch.Tensor):
        return number.dtype, number.data_ptr() % _ALIGNMENT == 0
    return number


class TileTable(Table):
    """The tiles of some matrices of one dtype.

    Args:
        matrices: the matrices. Their memory, of which the table has the addresses alone, must live during launches.
    """

    def __init__(self, matrices: Sequence[Tiled]) -> None:
        sources = [one.source for one in matrices]
        entries = [
            (
                one.source.data_ptr(),
                one.target.data_ptr(),
                *one.source.shape,
                one.source.stride(0),
                one.place,
                *one.steps,
            )
            for one in matrices
        ]
        # All rows begin and end at multiples of 16 elements and bytes.
        super().__init__(sources, entries, aligned=(0, 1, 3, 4), tile=TILE, warps=_WARPS * sources[0].dtype.itemsize)


def tables_of(matrices: Iterable[Tiled]) -> list[TileTable]:
    """The tiles of some matrices, a table for each dtype."""
    found: dict[torch.dtype, list[Tiled]] = defaultdict(list)
    for one in matrices:
        found[one.source.dtype].append(one)
    return list(map(TileTable, found.values()))


# Without annotations, which Triton would interpret as its own types.
@triton.jit
def _tile(matrices, owners, dtype: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile: where it is read and written, distance between rows, rows and columns left, its number."""
    program = tl.program_id(0)
    matrix = matrices + tl.load(owners + program).to(tl.int64) * 9
    source, target = tl.load(matrix), tl.load(matrix + 1)
    rows, columns, pitch = tl.load(matrix + 2), tl.load(matrix + 3), tl.load(matrix + 4)
    place, first = tl.load(matrix + 5), tl.load(matrix + 8)
    step_down, step_right = tl.load(matrix + 6), tl.load(matrix + 7)
    if aligned:
        # So that loads and stores are of 16 bytes: Triton cannot know this of numbers that it reads from memory.
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        columns, pitch = tl.multiple_of(columns, 16), tl.multiple_of(pitch, 16)
    across = (columns + tile - 1) // tile
    number = program - first
    down, right = number // across, number % across
    place += down * step_down + right * step_right
    # 32 bits, because they are compared with an offset for each element.
    down_left, across_left = (rows - down * tile).to(tl.int32), (columns - right * tile).to(tl.int32)
    begin = (down * pitch + right) * tile
    source, target = source.to(tl.pointer_type(dtype)) + begin, target.to(tl.pointer_type(tl.uint8)) + begin
    return source, target, pitch, down_left, across_left, place


@triton.jit
def _quarter(pitch, down, across, number: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets and mask of a quarter of a tile's rows; see [Note: quarters]."""
    row, column = tl.arange(0, tile // 4)[:, None], tl.arange(0, tile)[None, :]
    mask = (row < down - number * (tile // 4)) & (column < across)
    # 64 bits for the first element only.
    return number * (tile // 4) * pitch, row * pitch.to(tl.int32) + column, mask


@triton.jit
def _read(source, pitch, down, across, number: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    begin, offsets, mask = _quarter(pitch, down, across, number, tile)
    return tl.load(source + begin + offsets, mask=mask, other=0.0)


@triton.jit
def _read_all(source, pitch, down, across, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    a, b = _read(source, pitch, down, across, 0, tile), _read(source, pitch, down, across, 1, tile)
    c, d = _read(source, pitch, down, across, 2, tile), _read(source, pitch, down, across, 3, tile)
    return a, b, c, d


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    target, values, scale, pitch, down, across, number: tl.constexpr, tile: tl.constexpr
) -> None:
    begin, offsets, mask = _quarter(pitch, down, across, number, tile)
    bytes_ = (values.to(tl.float32) * scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(target + begin + offsets, bytes_, mask=mask)


@triton.jit
def _write_all(target, a, b, c, d, scale, pitch, down, across, tile: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    _write(target, a, scale, pitch, down, across, 0, tile)
    _write(target, b, scale, pitch, down, across, 1, tile)
    _write(target, c, scale, pitch, down, across, 2, tile)
    _write(target, d, scale, pitch, down, across, 3, tile)


@triton.jit
def _magnitude(a, b, c, d, checked: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude in the quarters of a tile. NaN is the largest if ``checked``, otherwise it is ignored."""
    a, b, c, d = tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32)), tl.abs(c.to(tl.float32)), tl.abs(d.to(tl.float32))
    if not checked:
        return tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
    # As integers, magnitudes have the same order, and NaN comes last.
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    c, d = c.to(tl.int32, bitcast=True), d.to(tl.int32, bitcast=True)
    return tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d))).to(tl.float32, bitcast=True)


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
    checked: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    source, target, pitch, down, across, place = _tile(matrices, owners, dtype, aligned, tile)
    a, b, c, d = _read_all(source, pitch, down, across, tile)
    amax = _magnitude(a, b, c, d, checked)
    scale = _scale(amax, epsilon, largest, power_of_two)
    _write_all(target, a, b, c, d, scale, pitch, down, across, tile)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    if checked:
        inverse = tl.where(amax < float("inf"), inverse, float("nan"))
    tl.store(numbers + place, inverse)


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    matrices, owners, numbers, dtype: tl.constexpr, aligned: tl.constexpr, checked: tl.constexpr, tile: tl.constexpr
) -> None:
    source, _, pitch, down, across, place = _tile(matrices, owners, dtype, aligned, tile)
    a, b, c, d = _read_all(source, pitch, down, across, tile)
    # For numbers that are not negative, the order of the bits is that of the values.
    magnitude = _magnitude(a, b, c, d, checked).to(tl.int32, bitcast=True)
    tl.atomic_max((numbers + place).to(tl.pointer_type(tl.int32)), magnitude)


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    matrices, owners, numbers, dtype: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr
) -> None:
    source, target, pitch, down, across, place = _tile(matrices, owners, dtype, aligned, tile)
    scale = tl.load(numbers + place)
    a, b, c, d = _read_all(source, pitch, down, across, tile)
    _write_all(target, a, b, c, d, scale, pitch, down, across, tile)


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]
    source, target, rows, columns, source_stride, target_stride, down: tl.constexpr, across: tl.constexpr
) -> None:
    # Offsets over many weights do not fit in 32 bits.
    weight = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * down + tl.arange(0, down), tl.program_id(1) * across + tl.arange(0, across)
    source += weight * source_stride
    target += weight * target_stride
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(source + row[:, None] * columns + column[None, :], mask=mask)
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(values), mask=tl.trans(mask))


def quantize_blocks(
    table: TileTable, numbers: torch.Tensor, *, power_of_two: bool, epsilon: float, checked: bool = False
) -> None:
    """Quantize each tile to E4M3 with a scale of its own, whose inverse goes to the tile's place in ``numbers``.

    If ``checked``, NaN goes there for a tile that has an element which is infinite or NaN.
    """
    largest = torch.finfo(table.dtype).max
    table.launch(_quantize_blocks, numbers, epsilon, largest, power_of_two=power_of_two, checked=checked)


def largest_magnitudes(table: TileTable, numbers: torch.Tensor, *, checked: bool = False) -> None:
    """Write the largest magnitude of each tile to its place in ``numbers``, which holds 0 or a lower bound before.

    Tiles may share a place. NaN is the largest if ``checked``, otherwise it is ignored.
    """
    table.launch(_largest, numbers, checked=checked)


def cast(table: TileTable, scales: torch.Tensor) -> None:
    """Cast each tile to E4M3 after multiplying it by its number in ``scales``."""
    table.launch(_cast, scales)


def transpose(matrices: torch.Tensor) -> torch.Tensor:
    """Transpose byte matrices ``[count, rows, columns]``, each contiguous, to ``[count, columns, rows]``."""
    count, rows, columns = matrices.shape
    out = torch.empty((count, columns, rows), dtype=torch.uint8, device=matrices.device)
    grid = (triton.cdiv(rows, _DOWN), triton.cdiv(columns, _ACROSS), count)
    strides = matrices.stride(0), columns * rows
    constants = {"down": _DOWN, "across": _ACROSS, "num_warps": _TRANSPOSE_WARPS}
    _transpose[grid](matrices, out, rows, columns, *strides, **constants)
    return out
