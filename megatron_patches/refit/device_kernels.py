"""The Triton kernel that copies a strided box into a packet and digests it in the same pass.

Imported only where there is Triton. It runs on the current stream; under ``TRITON_INTERPRET=1`` on a CPU as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_patches.refit.boxes import Box, row_major_strides

_TILE = 4096  # elements a program
_WARPS = 8
_DIMS = 4  # dimensions that the kernel knows, the last of them its columns

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


# Without annotations: Triton takes them for types of its own.
@triton.jit
def _pack_and_digest(  # type: ignore[no-untyped-def]
    values,
    packed,
    digest,
    base,
    rows,
    extent1,
    extent2,
    columns,
    step0,
    step1,
    step2,
    step3,
    index0,
    index1,
    index2,
    index3,
    width: tl.constexpr,
    pack: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    blocks = tl.cdiv(columns, tile_columns)
    program = tl.program_id(0).to(tl.int64)
    row = (program // blocks) * tile_rows + tl.arange(0, tile_rows)
    column = (program % blocks) * tile_columns + tl.arange(0, tile_columns)
    at2 = row % extent2
    at1 = (row // extent2) % extent1
    at0 = row // extent2 // extent1
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offset = (at0 * step0 + at1 * step1 + at2 * step2)[:, None] + (column * step3)[None, :]
    index = (base + at0 * index0 + at1 * index1 + at2 * index2)[:, None] + (column * index3)[None, :]
    value = tl.load(values + offset, mask=mask, other=0)
    if pack:
        tl.store(packed + row[:, None] * columns + column[None, :], value, mask=mask)
    bits = value.to(tl.int64)
    if width < 8:
        bits = bits & ((1 << (8 * width)) - 1)
    # splitmix64 of the index, forced odd; unsigned, so that products wrap and shifts bring zeros.
    weight = (index.to(tl.uint64) + 1) * _GOLDEN
    weight = (weight ^ (weight >> 30)) * _MIX1
    weight = (weight ^ (weight >> 27)) * _MIX2
    weight = (weight ^ (weight >> 31)) | 1
    share = tl.where(mask, (bits + 1) * weight.to(tl.int64), 0)
    tl.atomic_add(digest, tl.sum(tl.sum(share, axis=1), axis=0))


def pack_and_digest(
    values: torch.Tensor, packed: torch.Tensor | None, box: Box, shape: tuple[int, ...], digest: torch.Tensor
) -> None:
    """Copies a box into a packet, if there is one, and adds its digest to ``digest``.

    Args:
        values: the box's elements in place, int8 to int64, of the box's shape, strided as they lie.
        packed: flat, of the same type and number of elements; None to digest alone.
        box: which region they are.
        shape: shape of the whole tensor.
        digest: int64 of no dimension on the same device; sums wrap.
    """
    strides = row_major_strides(shape)
    base = sum(low * step for low, step in zip(box.start, strides, strict=True))
    dims = merged_dims(box.shape, values.stride(), strides)
    _launch(values, 0, packed, 0, digest, base, dims)


def merged_dims(shape: Sequence[int], steps: Sequence[int], indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(extent, step in memory, step of the index) by dimension, neighbours merged where both allow it."""
    merged: list[tuple[int, int, int]] = []
    for extent, step, index in zip(shape, steps, indices, strict=True):
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * step and merged[-1][2] == extent * index:
            merged[-1] = merged[-1][0] * extent, step, index
        else:
            merged.append((extent, step, index))
    return merged


def _launch(
    values: torch.Tensor,
    offset: int,
    packed: torch.Tensor | None,
    done: int,
    digest: torch.Tensor,
    base: int,
    dims: list[tuple[int, int, int]],
) -> None:
    """Launches the kernel once, or for each index of the outermost dimensions that it does not know."""
    if len(dims) > _DIMS:
        (extent, step, index), *inner = dims
        volume = math.prod(item[0] for item in inner)
        for at in range(extent):
            _launch(values, offset + at * step, packed, done + at * volume, digest, base + at * index, inner)
        return
    (n0, s0, g0), (n1, s1, g1), (n2, s2, g2), (columns, s3, g3) = [(1, 0, 0)] * (_DIMS - len(dims)) + dims
    rows = n0 * n1 * n2
    tile_columns = min(_TILE, triton.next_power_of_2(columns))
    tile_rows = max(1, _TILE // tile_columns)
    # Views that begin where this part does: Triton takes a tensor's address.
    source = values.as_strided((1,), (1,), values.storage_offset() + offset)
    target = source if packed is None else packed[done:]
    _pack_and_digest[(triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns),)](
        source,
        target,
        digest,
        base,
        rows,
        n1,
        n2,
        columns,
        s0,
        s1,
        s2,
        s3,
        g0,
        g1,
        g2,
        g3,
        width=values.element_size(),
        pack=packed is not None,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        num_warps=_WARPS,
    )
