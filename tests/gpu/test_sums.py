"""On a GPU, with the Triton kernel or without, a sum of gradient parts has the bits of the one on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from etp.collectives.sums import accumulate_parts
from etp.stack import Stack
from tests.gpu.devices import needs_gpus

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@needs_gpus(1)
@pytest.mark.parametrize(("dtype", "sink_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("with_own", [False, True])
def test_sums_equal_those_of_the_cpu(dtype: torch.dtype, sink_dtype: torch.dtype, ranks: int, with_own: bool) -> None:
    rank, numel, gradients = ranks - 1, 4096 * 3 + 77, 5
    parts = torch.randn(ranks, gradients, numel, device="cuda").to(dtype)
    start = torch.randn(gradients, numel, device="cuda").to(sink_dtype)
    for divisor, accumulate in itertools.product((1, 3), (False, True)):
        # Two runs: three that end behind one another, and two from the last to the first.
        memory = start.clone()
        sinks = Stack([*memory[:3], memory[4], memory[3]])
        if with_own and ranks > 1:
            others = torch.cat([parts[:rank], parts[rank + 1 :]])
            whole = Stack([parts[:, gradient].contiguous() for gradient in range(gradients)])
            again = accumulate_parts(others, sinks, divisor, accumulate=accumulate, own=whole, rank=rank)
        else:
            again = accumulate_parts(parts, sinks, divisor, accumulate=accumulate)
        expected = start.cpu()
        on_cpu = Stack([*expected[:3], expected[4], expected[3]])
        accumulate_parts(parts.cpu(), on_cpu, divisor, accumulate=accumulate)
        assert torch.equal(memory.cpu(), expected)
        # The same again, without looking at the tensors, on a stream that is not the current one.
        assert bool(again) != (torch.float64 in (dtype, sink_dtype))
        memory.copy_(start)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for launch in again:
            launch(stream=side.cuda_stream)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(memory.cpu(), expected if again else start.cpu())
