"""The local half of a reduce-scatter: sums the ranks' parts of one gradient shard and stores or adds the result.

The sum is computed in rank order, in at least fp32, and rounded once. It is therefore bitwise the same in every run,
over ``c10d`` and ``copy_engine``, and with or without the kernel of :mod:`etp.collectives.kernels`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch

from etp.stack import Stack

Launch = Callable[[int, int, int, int], None]
"""Sums once more: ``launch(parts, own, sinks, stream)``, three addresses and a CUDA stream's handle.

Without ``own``, its address is that of ``parts``.
"""

_KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def accumulate_parts(
    parts: torch.Tensor, sinks: Stack, divisor: int, *, accumulate: bool, own: Stack | None = None, rank: int = 0
) -> Sequence[Launch]:
    """Sum the ranks' parts of each gradient in rank order, divide, and store or add to its sink.

    Args:
        parts: ``[ranks, gradients, shard numel]`` in any shape, contiguous, any floating dtype; without the row of
            ``rank`` where ``own`` is given.
        sinks: destination of each result, of the shard's shape.
        divisor: the sum is divided by it, in the accumulation dtype.
        accumulate: add to the sinks; otherwise overwrite them.
        own: the full gradients, of the dtype of ``parts``, of which this rank's part is the ``rank``-th chunk.
        rank: this rank's place in the sum.

    Returns:
        launches that do the same again without looking at the tensors, at any addresses with the same
        :attr:`etp.stack.Stack.placement`, and the same remainder by :data:`etp.stack.KERNEL_ALIGNMENT` for ``parts``.
        Empty without the kernel.
    """
    if _kernel_applies(parts, sinks):
        from etp.collectives import kernels

        return kernels.accumulate_parts(parts, sinks, divisor, own, rank, accumulate=accumulate)
    count = len(sinks.tensors)
    rows = list(parts.view(-1, count, sinks.numel))
    if own is not None:
        rows.insert(rank, own.block().view(count, -1, sinks.numel)[:, rank])
    total = rows[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total.add_(row)
    if divisor != 1:
        divide(total, divisor)
    totals = total.view(count, *sinks.shape).unbind(0)
    if accumulate:
        torch._foreach_add_(sinks.tensors, totals)
    else:
        torch._foreach_copy_(sinks.tensors, totals)
    return ()


def divide(total: torch.Tensor, divisor: int) -> None:
    """Divide in place, rounding once.

    On CUDA, PyTorch implements division by a Python number as multiplication by its reciprocal, which rounds twice
    unless the number is a power of two. Other divisors are therefore passed as a tensor.
    """
    exact = divisor & (divisor - 1) == 0 or total.device.type == "cpu"
    total.div_(divisor if exact else torch.full((), divisor, dtype=total.dtype, device=total.device))


def _kernel_applies(parts: torch.Tensor, sinks: Stack) -> bool:
    supported = parts.dtype in _KERNEL_DTYPES and sinks.dtype in _KERNEL_DTYPES
    return parts.device.type == "cuda" and supported and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
