"""What vLLM's contract says of the pieces of ranks, compared with pieces that torch cuts."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

from tests.support.prepared import engine_release

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(engine_release() in ("0.26.0", "0.32.0"), reason="its contract says nothing of pieces"),
]


def chunk(tensor: torch.Tensor, pieces: int, dim: int, kept: int) -> torch.Tensor:
    found = tensor.chunk(pieces, dim)
    return found[kept] if kept < len(found) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("shape", [(7,), (1, 5), (8, 3), (5, 4, 3), (2, 9)])
@pytest.mark.parametrize("mesh", [(3,), (2, 3), (3, 1, 2)])
def test_a_piece_is_the_block_that_torch_cuts(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    from vllm.distributed.weight_transfer import ParamMeta, Replicate, Shard

    from megatron_patches.refit.vllm_trainer import _extent_of

    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    owners = torch.randperm(32, generator=torch.Generator().manual_seed(3))[: torch.Size(mesh).numel()].tolist()
    kinds: list[Any] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in itertools.product(kinds, repeat=len(mesh)):
        meta = ParamMeta("w", torch.bfloat16, shape, owners=tuple(owners), mesh_shape=mesh, placements=placements)
        for rank, coordinate in zip(owners, itertools.product(*map(range, mesh)), strict=True):
            piece = whole
            for placement, size, at in zip(placements, mesh, coordinate, strict=True):
                if isinstance(placement, Shard):
                    piece = chunk(piece, size, placement.dim, at)
            start, extent = _extent_of(meta, rank)
            assert extent == tuple(piece.shape)
            assert whole[tuple(map(slice, start, map(sum, zip(start, extent, strict=True))))].equal(piece)
    assert _extent_of(ParamMeta("w", torch.bfloat16, shape), 5) == ((0,) * len(shape), shape)
