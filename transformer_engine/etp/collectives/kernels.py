"""The Triton kernel that sums gradient parts. Imported only where there is a CUDA device and Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_WARPS = 8


# Without annotations, which Triton would interpret as its own types.
@triton.jit
def _accumulate_parts(  # type: ignore[no-untyped-def]
    parts,
    own,
    out,
    numel,
    divisor,
    rank: tl.constexpr,
    world: tl.constexpr,
    has_own: tl.constexpr,
    divide: tl.constexpr,
    accumulate: tl.constexpr,
    block: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offsets < numel
    # Triton passes a number below 2^31 in 32 bits, in which its multiples would overflow for the largest embeddings.
    row = tl.full((), numel, tl.int64)
    total = tl.zeros((block,), dtype=tl.float32)
    for index in tl.static_range(world):
        if has_own and index == rank:
            part = tl.load(own + offsets, mask=mask).to(tl.float32)
        elif has_own and index > rank:
            part = tl.load(parts + (index - 1) * row + offsets, mask=mask).to(tl.float32)
        else:
            part = tl.load(parts + index * row + offsets, mask=mask).to(tl.float32)
        # Starting from the first part rather than from zero keeps the sign of a sum of negative zeros.
        total = part if index == 0 else total + part
    if divide:
        # The exact division; "/" compiles to an approximate one.
        total = tl.div_rn(total, divisor)
    if accumulate:
        total = tl.load(out + offsets, mask=mask).to(tl.float32) + total
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def accumulate_parts(
    parts: torch.Tensor, out: torch.Tensor, divisor: int, own: torch.Tensor | None, rank: int, *, accumulate: bool
) -> None:
    """:func:`etp.collectives.sums.accumulate_parts` in one kernel on the current stream, for bf16, fp16 and fp32.

    ``out`` is the tensor of the sink; ``accumulate`` adds to it instead of overwriting it.
    """
    numel = out.numel()
    if numel == 0:
        return
    world = parts.numel() // numel + (own is not None)
    _accumulate_parts[(triton.cdiv(numel, _BLOCK),)](
        parts,
        parts if own is None else own,
        out,
        numel,
        float(divisor),
        rank=rank,
        world=world,
        has_own=own is not None,
        divide=divisor != 1,
        accumulate=accumulate,
        block=_BLOCK,
        num_warps=_WARPS,
    )
