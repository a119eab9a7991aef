"""The local half of a reduce-scatter: sum the ranks' parts of one gradient shard and put the sum where it goes.

The sum runs in rank order in at least fp32 and is rounded once, so it has the same bits in every run, on every
transport, and with the kernel of :mod:`etp.collectives.kernels` as well as without.
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
        sink: where the sum goes.
        divisor: what the sum is divided by, in the accumulation dtype.
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

    On CUDA, PyTorch multiplies by the reciprocal of a number of the host. Where that is no power of two it rounds
    twice, so it gets a tensor instead.
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
