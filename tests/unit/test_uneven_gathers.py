"""Parts of different sizes are gathered over gloo, and their gradients come back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_megatron

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, Megatron's function stays as it is"),
]

SIZES = ([2, 2, 2], [3, 0, 5], [0, 1, 0], [4, 1, 4])


def gather(rank: int, world_size: int, dtype: torch.dtype) -> list[bool]:
    """Whether this rank got every rank's part, and all ranks' gradients of its own."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    right = []
    for sizes in SIZES:
        numbers = torch.Generator().manual_seed(7)  # the same on all ranks
        whole = torch.randn(sum(sizes), 3, generator=numbers, dtype=dtype)
        # Small integers, whose sums have no rounding.
        grads = torch.randint(-8, 8, (world_size, *whole.shape), generator=numbers).to(dtype)
        part = whole.split(sizes)[rank].clone().requires_grad_()
        gathered = gather_from_sequence_parallel_region(part, group=dist.group.WORLD, output_split_sizes=sizes)
        gathered.backward(grads[rank])
        assert part.grad is not None
        right += [torch.equal(gathered, whole), torch.equal(part.grad, grads.sum(dim=0).split(sizes)[rank])]
    return right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_different_sizes_are_gathered(dtype: torch.dtype) -> None:
    assert run_megatron(gather, 3, args=(dtype,)) == [[True] * 2 * len(SIZES)] * 3
