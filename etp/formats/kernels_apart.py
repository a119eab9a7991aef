"""Triton kernels that quantize rows and columns of the shards of all weights in one launch.

See [Note: tiles] in ``etp/formats/kernels.py``. Imported only where there is a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from etp.formats.kernels import Table

TILE = 64
_WARPS = 4


class ApartTable(Table):
    """The tiles of some matrices of one dtype.

    Args:
        weights: for each matrix: its number among those of all tables; and the matrix ``[rows, columns]``, the bytes
            and the scales of its rows, and those of its columns, all contiguous.
    """

    def __init__(self, weights: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        entries = [
            (*(tensor.data_ptr() for tensor in tensors), *tensors[0].shape, number) for number, tensors in weights
        ]
        # All rows of elements and of bytes begin at multiples of 16 bytes.
        sources = [tensors[0] for _, tensors in weights]
        super().__init__(sources, entries, aligned=(0, 1, 3, 6), tile=TILE, warps=_WARPS)
        # The addresses are of memory that must live as long as the table.
        self._kept = weights


# Without annotations, which Triton would interpret as its own types.
@triton.jit
def _tile(matrices, owners, aligned: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's matrix in the table, and the place and extent of its tile."""
    program = tl.program_id(0)
    matrix = matrices + tl.load(owners + program).to(tl.int64) * 9
    rows, columns, first = tl.load(matrix + 5), tl.load(matrix + 6), tl.load(matrix + 8)
    if aligned:
        columns = tl.multiple_of(columns, 16)
    across = (columns + tile - 1) // tile
    number = program - first
    return matrix, rows, columns, (number // across) * tile, (number % across) * tile


@triton.jit
def _pointer(matrix, which: tl.constexpr, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(matrix + which)
    if aligned:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(dtype))


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    matrix, rows, columns, row, column, dtype: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr
):
    """The tile in fp32, with zeros beyond the matrix."""
    down, across = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None, :]
    mask = (down < rows - row) & (across < columns - column)
    source = _pointer(matrix, 0, dtype, aligned) + row * columns + column
    return tl.load(source + down * columns + across, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    matrix, which: tl.constexpr, bytes_, rows, columns, row, column, aligned: tl.constexpr
) -> None:
    """Write a tile of bytes into array ``which`` of the matrix, of ``[rows, columns]``."""
    down, across = tl.arange(0, bytes_.shape[0])[:, None], tl.arange(0, bytes_.shape[1])[None, :]
    mask = (down < rows - row) & (across < columns - column)
    target = _pointer(matrix, which, tl.uint8, aligned) + row * columns + column
    tl.store(target + down * columns + across, bytes_, mask=mask)


@triton.jit
def _mxfp8(values):  # type: ignore[no-untyped-def]
    """:func:`etp.formats.quantize_mxfp8` for blocks along the rows of a tile."""
    blocks = tl.reshape(values, (values.shape[0], values.shape[1] // 32, 32))
    inverse = tl.max(tl.abs(blocks), axis=2) * (1.0 / 448.0)
    bits = inverse.to(tl.int32, bitcast=True)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000)) & (exponent < 254)
    exponent = tl.where(inverse == float("inf"), 254, exponent + up.to(tl.int32))
    exponent = tl.where(inverse != inverse, 255, exponent)
    scale = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
    scale = tl.where(exponent == 255, 0x7FFFFFFF, scale).to(tl.float32, bitcast=True)
    bytes_ = (blocks * scale[:, :, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.reshape(bytes_, values.shape), exponent.to(tl.uint8)


@triton.jit
def _quantize_mxfp8(  # type: ignore[no-untyped-def]
    matrices, owners, dtype: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr
) -> None:
    matrix, rows, columns, row, column = _tile(matrices, owners, aligned, tile)
    values = _values(matrix, rows, columns, row, column, dtype, aligned, tile)
    data, scales = _mxfp8(values)
    _store(matrix, 1, data, rows, columns, row, column, aligned)
    _store(matrix, 2, scales, rows, columns // 32, row, column // 32, False)
    data, scales = _mxfp8(tl.trans(values))
    _store(matrix, 3, tl.trans(data), rows, columns, row, column, aligned)
    _store(matrix, 4, tl.trans(scales), rows // 32, columns, row // 32, column, False)


@triton.jit
def _nvfp4(values, scale, square: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`etp.formats.quantize_nvfp4` for blocks along the rows of a tile."""
    down: tl.constexpr = values.shape[0]
    across: tl.constexpr = values.shape[1] // 16
    blocks = tl.reshape(values, (down, across, 16))
    amax = tl.max(tl.abs(blocks), axis=2)
    if square:
        amax = tl.max(tl.reshape(amax, (down // 16, 16, across)), axis=1, keep_dims=True)
        amax = tl.reshape(tl.broadcast_to(amax, (down // 16, 16, across)), (down, across))
    inverse = tl.minimum(amax * (scale * (1.0 / 6.0)), 448.0).to(tl.float8e4nv)
    one = tl.full((down, across), 1.0, tl.float32)
    factor = tl.div_rn(one, inverse.to(tl.float32) * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    scaled = blocks * tl.minimum(factor, 3.4028234663852886e38)[:, :, None]
    size = tl.abs(scaled)
    numbers = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    numbers += (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    numbers += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    numbers += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    first, second = tl.split(tl.reshape(numbers, (down, values.shape[1] // 2, 2)))
    return (first | second << 4).to(tl.uint8), inverse.to(tl.uint8, bitcast=True)


@triton.jit
def _quantize_nvfp4(  # type: ignore[no-untyped-def]
    matrices,
    owners,
    amaxes,
    amax_stride: tl.constexpr,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    square: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    matrix, rows, columns, row, column = _tile(matrices, owners, aligned, tile)
    values = _values(matrix, rows, columns, row, column, dtype, aligned, tile)
    amax = tl.load(amaxes + tl.load(matrix + 7) * amax_stride)
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, 2688.0, tl.float32), amax), 3.4028234663852886e38)
    scale = tl.where((amax == 0) | (scale == 0), 1.0, scale)
    data, scales = _nvfp4(values, scale, square)
    _store(matrix, 1, data, rows, columns // 2, row, column // 2, False)
    _store(matrix, 2, scales, rows, columns // 16, row, column // 16, False)
    data, scales = _nvfp4(tl.trans(values), scale, square)
    _store(matrix, 3, tl.trans(data), rows // 2, columns, row // 2, column, aligned)
    _store(matrix, 4, tl.trans(scales), rows // 16, columns, row // 16, column, False)


def quantize_mxfp8(table: ApartTable) -> None:
    """Quantize each matrix to MXFP8, by rows and by columns."""
    table.launch(_quantize_mxfp8)


def quantize_nvfp4(table: ApartTable, amaxes: torch.Tensor, *, square: bool) -> None:
    """Quantize each matrix to NVFP4, by rows and by columns.

    Args:
        table: the matrices, shards of weights.
        amaxes: fp32; the first element of row i is the largest magnitude of weight number i.
        square: whether blocks are 16 x 16 elements.
    """
    table.launch(_quantize_nvfp4, amaxes, amax_stride=amaxes.stride(0), square=square)
