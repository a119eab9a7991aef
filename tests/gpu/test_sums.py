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
        memory, moved = start.clone(), start.clone()
        sinks, moved_sinks = _in_two_runs(memory), _in_two_runs(moved)
        if with_own and ranks > 1:
            received = torch.cat([parts[:rank], parts[rank + 1 :]])
            own, moved_own = (Stack(parts.transpose(0, 1).contiguous().unbind(0)) for _ in range(2))
            again = accumulate_parts(received, sinks, divisor, accumulate=accumulate, own=own, rank=rank)
            moved_received = received.clone()
            addresses = moved_received.data_ptr(), moved_own.address, moved_sinks.address
        else:
            received = parts.clone()
            again = accumulate_parts(received, sinks, divisor, accumulate=accumulate)
            moved_received = received.clone()
            addresses = moved_received.data_ptr(), moved_received.data_ptr(), moved_sinks.address
        expected = start.cpu()
        accumulate_parts(parts.cpu(), _in_two_runs(expected), divisor, accumulate=accumulate)
        assert torch.equal(memory.cpu(), expected)
        # The same again, without looking at the tensors, in other memory, on a stream that is not the current one.
        assert bool(again) != (torch.float64 in (dtype, sink_dtype))
        received.fill_(torch.nan)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for launch in again:
            launch(*addresses, side.cuda_stream)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(moved.cpu(), expected if again else start.cpu())
        assert torch.equal(memory.cpu(), expected)


def _in_two_runs(memory: torch.Tensor) -> Stack:
    """Five tensors: three that end behind one another, and two from the last to the first."""
    return Stack([*memory[:3], memory[4], memory[3]])
