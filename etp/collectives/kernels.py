"""The Triton kernel that sums gradient parts. Imported only where there is a CUDA device and Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from etp.stack import Stack

_BLOCK = 4096
_WARPS = 8


# Without annotations, which Triton would interpret as its own types.
@triton.jit
def _accumulate_parts(  # type: ignore[no-untyped-def]
    parts,
    own,
    out,
    numel,
    row,
    own_stride,
    out_stride,
    divisor,
    rank: tl.constexpr,
    world: tl.constexpr,
    has_own: tl.constexpr,
    divide: tl.constexpr,
    accumulate: tl.constexpr,
    block: tl.constexpr,
) -> None:
    # 64 bits throughout: Triton passes a number below 2^31 in 32 bits, and its multiples would overflow for the
    # largest embeddings, and for the experts of a layer.
    gradient = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offsets < numel
    parts += gradient * numel + offsets
    own += gradient * own_stride + offsets
    out += gradient * out_stride + offsets
    rows = tl.full((), row, tl.int64)
    total = tl.zeros((block,), dtype=tl.float32)
    for index in tl.static_range(world):
        if has_own and index == rank:
            part = tl.load(own, mask=mask).to(tl.float32)
        elif has_own and index > rank:
            part = tl.load(parts + (index - 1) * rows, mask=mask).to(tl.float32)
        else:
            part = tl.load(parts + index * rows, mask=mask).to(tl.float32)
        # Starting from the first part rather than from zero keeps the sign of a sum of negative zeros.
        total = part if index == 0 else total + part
    if divide:
        # The exact division; "/" compiles to an approximate one.
        total = tl.div_rn(total, divisor)
    if accumulate:
        total = tl.load(out, mask=mask).to(tl.float32) + total
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)


def accumulate_parts(
    parts: torch.Tensor, sinks: Stack, divisor: int, own: Stack | None, rank: int, *, accumulate: bool
) -> list[Callable[[int, int, int, int], None]]:
    """:func:`etp.collectives.sums.accumulate_parts` for bf16, fp16 and fp32, on the current stream.

    One launch for all gradients whose sinks, and own parts, lie at a constant distance.
    """
    numel, row = sinks.numel, len(sinks) * sinks.numel
    if numel == 0:
        return []
    world = parts.numel() // row + (own is not None)
    others = parts.view(-1)
    mine = sinks if own is None else own
    again: list[Callable[[int, int, int, int], None]] = []
    for first, count in sinks.joint_runs(mine):
        grid = (triton.cdiv(numel, _BLOCK), count, 1)
        own_part = mine[first].view(-1)[rank * numel :] if own is not None else parts
        tensors = others[first * numel :], own_part, sinks[first]
        strides = _stride(mine, first, count), _stride(sinks, first, count)
        constants = rank, world, own is not None, divisor != 1, accumulate, _BLOCK
        numbers = numel, row, *strides, float(divisor), *constants
        compiled = _accumulate_parts[grid](*tensors, *numbers, num_warps=_WARPS)
        # Nothing is compiled under Triton's interpreter.
        if compiled is not None:
            # What it was compiled for, such as the alignment of addresses, stays true for the same placements.
            origins = parts.data_ptr(), parts.data_ptr() if own is None else own.address, sinks.address
            offsets = [tensor.data_ptr() - start for tensor, start in zip(tensors, origins, strict=True)]
            again.append(partial(_launch, compiled[grid], offsets, numbers))
    return again


def _launch(
    run: Callable[..., None],
    offsets: Sequence[int],
    numbers: Sequence[Any],
    parts: int,
    own: int,
    out: int,
    stream: int,
) -> None:
    run(parts + offsets[0], own + offsets[1], out + offsets[2], *numbers, stream=stream)


def _stride(stack: Stack, first: int, count: int) -> int:
    """Elements from one tensor to the next, of ``count`` tensors within a run."""
    if count == 1:
        return 0
    return (stack[first + 1].data_ptr() - stack[first].data_ptr()) // stack.dtype.itemsize
