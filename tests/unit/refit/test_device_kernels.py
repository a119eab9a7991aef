"""The kernel that packs and digests, under Triton's interpreter, against numpy."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.digest import MASK, digest_array
from tests.support.launch import run_distributed

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_box(rng: np.random.Generator, most: int) -> tuple[tuple[int, ...], Box]:
    """A tensor's shape, and a region of it."""
    shape = tuple(rng.integers(1, most, int(rng.integers(1, 7))).tolist())
    start = [int(rng.integers(0, extent)) for extent in shape]
    stop = [int(rng.integers(low + 1, extent + 1)) for low, extent in zip(start, shape, strict=True)]
    return shape, Box("w", tuple(start), tuple(stop))


def compare(rng: np.random.Generator, most: int, device: str) -> None:
    """Packs and digests a random box that lies transposed, with gaps, in a larger storage."""
    from megatron_patches.refit.device_kernels import pack_and_digest

    shape, box = random_box(rng, most)
    width = int(rng.choice([1, 2, 4, 8]))
    order = rng.permutation(len(shape)).tolist()
    room = [extent + int(rng.integers(0, 3)) for extent in box.shape]
    storage = torch.from_numpy(np.frombuffer(rng.bytes(width * (int(np.prod(room)) + 5)), dtype=f"i{width}").copy())
    whole = storage.to(device)[3 : 3 + int(np.prod(room))].view([room[dim] for dim in order])
    inverse = [order.index(dim) for dim in range(len(shape))]
    values = whole.permute(inverse)[tuple(slice(0, extent) for extent in box.shape)]
    packed = torch.zeros(box.volume + 4, dtype=SIGNED[width], device=device)
    digests = torch.zeros(3, dtype=torch.int64, device=device)
    pack_and_digest(values, packed[2 : 2 + box.volume], box, shape, digests[1])
    pack_and_digest(values, None, box, shape, digests[2])
    expected = values.contiguous().cpu()
    assert torch.equal(packed[2 : 2 + box.volume].cpu(), expected.reshape(-1))
    assert not packed[:2].any()
    assert not packed[2 + box.volume :].any()
    digest = digest_array(expected.numpy(), box, shape)
    assert [value & MASK for value in digests.tolist()] == [0, digest, digest]


def body(rank: int, world_size: int, most: int, count: int) -> int:
    """Under the interpreter, which is chosen when the kernel's module is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    for seed in range(count):
        compare(np.random.default_rng(seed), most, "cpu")
    return count


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_boxes_of_up_to_six_dimensions_are_packed_and_digested_as_numpy_does() -> None:
    assert run_distributed(body, 1, None, args=(6, 60), fresh=True) == [60]
