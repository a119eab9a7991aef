"""Models whose parts are called one by one, never as a whole, and in ``eval()`` mode, as when dropout is unwanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from tests.multiproc.models import LongSum, batch, loss_of
from tests.multiproc.oracle import Twins
from tests.support.launch import device, run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.plain_layers]


def logits(model: Any, tokens: torch.Tensor, recompute: str) -> torch.Tensor:
    x = model.embedding(tokens)
    for _ in range(3):
        layer = nn.Sequential(model.same, nn.Tanh())
        x = checkpoint(layer, x, use_reentrant=recompute == "reentrant") if recompute else layer(x)
    return model.head(x)


def trained_by_parts(rank: int, world_size: int, recompute: str) -> list[dict[str, int]]:
    """Bitwise equal to the model without shards; returns the number of reductions in each step."""
    torch.manual_seed(6)
    model = LongSum().to(device())
    twins = Twins(model, rank, world_size)
    for side in (model, twins.reference.model):
        side.eval()

    def scenario(model: nn.Module, step: int, data_rank: int) -> Iterator[torch.Tensor]:
        tokens, targets = batch(step, data_rank, device())
        yield loss_of(logits(model, tokens, recompute), targets)

    counts = []
    for step in range(3):
        twins.runtime.counters.reset()
        twins.step(scenario, step)
        counts.append(dict(twins.runtime.counters.reductions))
    return counts


@pytest.mark.parametrize("recompute", ["", "plain", "reentrant"])
def test_a_repeated_weight_is_reduced_once(recompute: str) -> None:
    for counts in run_distributed(trained_by_parts, 2, args=(recompute,)):
        assert counts == [{"embedding.weight": 1, "same.weight": 1, "head.weight": 1}] * 3


def evaluated_by_parts(rank: int, world_size: int, context: str) -> dict[str, bool]:
    """Which weights count as used more than once after an evaluation, which a generation repeats without an end."""
    torch.manual_seed(6)
    model = LongSum().to(device())
    twins = Twins(model, rank, world_size)
    tokens, _ = batch(0, rank, device())
    for side in (model, twins.reference.model):
        side.eval()
    with torch.no_grad() if context == "no_grad" else torch.inference_mode():
        for _ in range(3):
            mine, whole = (logits(side, tokens, "") for side in (model, twins.reference.model))
            assert torch.equal(mine, whole)
            assert not mine.requires_grad
    return {group.name: group.used_more_than_once for group in twins.runtime.groups}


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_an_evaluation_by_parts_repeats_no_weight(context: str) -> None:
    for used in run_distributed(evaluated_by_parts, 2, args=(context,)):
        assert used == dict.fromkeys(["embedding.weight", "same.weight", "head.weight"], False)


class Normed(nn.Module):
    """Trained through a method; a hook on calls of the module itself never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.last(self.norm(self.first(x)))
        return encoded


def thawed_by_parts(rank: int, world_size: int, before: str) -> float:
    """A norm that is frozen when the model is sharded, and trained later: the difference of its weight's gradient."""
    torch.manual_seed(6)
    model, whole = Normed().to(device()), Normed().to(device())
    whole.load_state_dict(model.state_dict())
    model.norm.requires_grad_(False)
    etp.shard_module(model, dist.group.WORLD)
    xs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(peer)).to(device()) for peer in range(world_size)]
    if "step" in before:
        model.encode(xs[rank]).square().mean().backward()
        model.zero_grad()
    if "evaluation" in before:
        with torch.no_grad():
            model.eval().encode(xs[rank])
    model.train().norm.requires_grad_(True)
    model.encode(xs[rank]).square().mean().backward()
    torch.stack([whole.encode(x).square().mean() for x in xs]).mean().backward()
    return float((model.get_parameter("norm.weight").grad - whole.get_parameter("norm.weight").grad).abs().max())


@pytest.mark.parametrize("before", ["", "evaluation", "step, evaluation"])
def test_gradients_of_thawed_replicated_parameters_are_combined(before: str) -> None:
    assert all(difference < 1e-6 for difference in run_distributed(thawed_by_parts, 2, args=(before,)))
