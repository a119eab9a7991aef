"""Bodies: weights that Megatron builds and never announces as a model."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etp
from megatron_patches.arguments import MegatronEtpConfig
from megatron_patches.weight_shard_api import WeightShardApi
from tests.support.launch import device

# Three shapes in turn, more weights than slots: backward passes gather, too, and how far ahead depends on the bytes.
SHAPES = ((16, 24), (24, 40), (40, 16)) * 4
LARGE = ((16, 4096), (4096, 16))
SMALL = ((16, 64), (64, 16))


def _stack(api: WeightShardApi, group: dist.ProcessGroup, shapes: tuple[tuple[int, int], ...]) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for columns, rows in shapes)).to(device())
    for layer in model:
        api.wrap_module(layer, ["weight"], group)
    return model


def _train(model: nn.Module, rank: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, SHAPES[0][0], generator=torch.Generator().manual_seed(10 * step + rank)).to(device())
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
    return losses


def ranks_with_another_past(rank: int, world_size: int, others: tuple[tuple[int, int], ...]) -> list[float]:
    """Two of four ranks have trained a larger model before; then all train, a rank with that past with one without.

    Args:
        rank: this rank.
        world_size: ranks.
        others: shapes of the model that the other two have trained before; none for no past at all.
    """
    assert world_size == 4
    api = WeightShardApi(MegatronEtpConfig(engine=etp.EtpConfig(timeout_s=20.0)))
    # As many of each rank: torch names groups that not all ranks make, as NCCL's of reductions, by their number too.
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    before = LARGE if rank < 2 else others
    if before:
        _train(_stack(api, groups[rank // 2], before), rank, 2)
    return _train(_stack(api, groups[2 + rank % 2], SHAPES), rank, 4)


def a_model_that_only_one_rank_has_let_go(rank: int, world_size: int) -> bool:
    """A model in a cycle of references, whose last pass nobody finished; one rank's garbage collector has come.

    Returns:
        whether the next model's gradients could be finished.
    """
    assert world_size == 2
    api = WeightShardApi(MegatronEtpConfig(engine=etp.EtpConfig(timeout_s=20.0)))
    gc.disable()
    try:
        former: Any = _stack(api, dist.group.WORLD, SMALL)
        api.classify_chains(former)
        former.itself = [former]
        former(torch.ones(4, SMALL[0][0], device=device()))
        del former
        if rank == 1:
            gc.collect()
        model = _stack(api, dist.group.WORLD, SHAPES)
        api.classify_chains(model)
        for _ in range(2):
            model(torch.ones(4, SHAPES[0][0], device=device())).sum().backward()
            api.finish_gradients()
    finally:
        gc.enable()
    return True
