"""Models whose parts are called one by one, never as a whole, and in ``eval()`` mode, as when dropout is unwanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
