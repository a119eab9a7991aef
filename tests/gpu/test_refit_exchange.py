"""Weights that change places with new ones on a GPU, by one kernel."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.vllm.swap import Pair, Swap
from tests.gpu.devices import needs_gpus

pytestmark = needs_gpus(1)


def weights(seed: int) -> list[torch.Tensor]:
    """Of several types and sizes, some at odd places of larger storages, one of more than 2**31 bytes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [1, 15, 4096, 4097, 12288 * 4096, (1 << 31) + 4096 + 3]
    flat = [
        torch.randint(0, 256, (size + 64,), dtype=torch.uint8, device="cuda", generator=generator) for size in sizes
    ]
    found = [
        memory[offset : memory.numel() - 64 + offset] for memory, offset in zip(flat, (0, 3, 16, 8, 0, 0), strict=True)
    ]
    return [*found, torch.randn(3001, 17, device="cuda", generator=generator).bfloat16().t()]


@pytest.mark.parametrize("streams", [1, 2])
def test_contents_change_places_and_back(streams: int) -> None:
    """Also in another stream than the one in which the exchange was made."""
    old, new = weights(1), weights(2)
    pairs: list[Pair] = list(zip(old, new, strict=True))
    kept = [(one.clone(), other.clone()) for one, other in pairs]
    swap = Swap(pairs)
    assert swap.copied_bytes == 0
    assert len(swap._kernels) == 1
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if streams == 2 else torch.cuda.current_stream()):
        swap.run()
        torch.cuda.synchronize()
        for (one, other), (was, came) in zip(pairs, kept, strict=True):
            assert torch.equal(one, came)
            assert torch.equal(other, was)
        swap.undo()
        torch.cuda.synchronize()
    for (one, other), (was, came) in zip(pairs, kept, strict=True):
        assert torch.equal(one, was)
        assert torch.equal(other, came)


def test_content_that_nobody_could_ask_for_is_overwritten() -> None:
    """Bytes beside the parts that are aligned on both sides are still swapped: another launch, before the last one."""
    old, new = weights(1), weights(2)
    kept = [other.clone() for other in new]
    swap = Swap(list(zip(old, new, strict=True)))
    assert len(swap._kernels) == 1
    swap.run(keeps_old=False)
    torch.cuda.synchronize()
    assert all(map(torch.equal, old, kept))
    assert torch.equal(new[4], kept[4])  # aligned, and a multiple of 16 bytes
    with pytest.raises(TransferError, match="the old weights were overwritten"):
        swap.undo()
