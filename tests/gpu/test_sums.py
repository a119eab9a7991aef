"""On a GPU, with the Triton kernel or without, a sum of gradient parts has the bits of the one on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from etp.collectives.base import GradSink
from etp.collectives.sums import accumulate_parts
from tests.gpu.devices import needs_gpus

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@needs_gpus(1)
@pytest.mark.parametrize(("dtype", "sink_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("with_own", [False, True])
def test_sums_equal_those_of_the_cpu(dtype: torch.dtype, sink_dtype: torch.dtype, ranks: int, with_own: bool) -> None:
    rank, numel = ranks - 1, 4096 * 3 + 77
    parts = torch.randn(ranks, numel, device="cuda").to(dtype)
    start = torch.randn(numel, device="cuda").to(sink_dtype)
    for divisor, accumulate in itertools.product((1, 3), (False, True)):
        sink, expected = (GradSink(start.clone(), accumulate) for _ in range(2))
        if with_own and ranks > 1:
            others = torch.cat([parts[:rank], parts[rank + 1 :]])
            accumulate_parts(others, sink, divisor, own=parts[rank].clone(), rank=rank)
        else:
            accumulate_parts(parts, sink, divisor)
        on_cpu = GradSink(start.cpu(), accumulate)
        accumulate_parts(parts.cpu(), on_cpu, divisor)
        expected.tensor.copy_(on_cpu.tensor)
        assert torch.equal(sink.tensor, expected.tensor)
