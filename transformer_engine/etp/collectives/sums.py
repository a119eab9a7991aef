"""The local half of a reduce-scatter: sums the ranks' parts of one gradient shard and stores or adds the result.

The sum is computed in rank order, in at least fp32, and rounded once. It is therefore bitwise the same in every run,
on every transport, and with or without the kernel of :mod:`etp.collectives.kernels`.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from etp.collectives.base import GradSink

_KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def accumulate_parts(
    parts: torch.Tensor, sink: GradSink, divisor: int, *, own: torch.Tensor | None = None, rank: int = 0
) -> None:
    """Sum the ranks' parts in rank order, divide, and store or add to the sink.

    Args:
        parts: ``[ranks, shard numel]`` in any shape, contiguous, any floating dtype; without the row of ``rank``
            where ``own`` is given.
        sink: destination of the result.
        divisor: the sum is divided by it, in the accumulation dtype.
        own: this rank's part, contiguous, of the dtype of ``parts``.
        rank: this rank's place in the sum.
    """
    if _kernel_applies(parts, sink):
        from etp.collectives import kernels

        kernels.accumulate_parts(parts, sink.tensor, divisor, own, rank, accumulate=sink.accumulate)
        return
    rows = list(parts.view(-1, sink.tensor.numel()))
    if own is not None:
        rows.insert(rank, own.view(-1))
    total = rows[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total.add_(row)
    if divisor != 1:
        divide(total, divisor)
    total = total.view(sink.tensor.shape)
    if sink.accumulate:
        sink.tensor.add_(total)
    else:
        sink.tensor.copy_(total)


def divide(total: torch.Tensor, divisor: int) -> None:
    """Divide in place, rounding once.

    On CUDA, PyTorch implements division by a Python number as multiplication by its reciprocal, which rounds twice
    unless the number is a power of two. Otherwise, the divisor is therefore passed as a tensor.
    """
    exact = divisor & (divisor - 1) == 0 or total.device.type == "cpu"
    total.div_(divisor if exact else torch.full((), divisor, dtype=total.dtype, device=total.device))


def _kernel_applies(parts: torch.Tensor, sink: GradSink) -> bool:
    return (
        parts.device.type == "cuda"
        and _has_triton()
        and parts.dtype in _KERNEL_DTYPES
        and sink.tensor.dtype in _KERNEL_DTYPES
        and sink.tensor.is_contiguous()
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
