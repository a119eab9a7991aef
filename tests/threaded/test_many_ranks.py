"""Sharding over 8 to 128 ranks: every row once, forward bitwise, gradients in rank order, states that come back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from tests.threaded.threads import run_threads

WIDTH, HIDDEN, OUT = 12, 75, 20


def model() -> nn.Module:
    """Odd sizes: with many ranks, whole shards are padding."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(33, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)
    )


def tokens_of(rank: int) -> torch.Tensor:
    """Each rank's own data."""
    return torch.randint(33, (3, 4), generator=torch.Generator().manual_seed(rank))


def unsharded(source: nn.Module, world_size: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Every rank's output, and the mean of their gradients in rank order."""
    plain = copy.deepcopy(source)
    outputs: list[torch.Tensor] = []
    totals: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        plain.zero_grad()
        out = plain(tokens_of(rank))
        out.square().mean().backward()
        outputs.append(out.detach())
        for name, param in plain.named_parameters():
            totals[name] = param.grad.clone() if rank == 0 else totals[name] + param.grad
    return outputs, {name: total / world_size for name, total in totals.items()}


def train(
    rank: int, world_size: int, models: list[nn.Module], alignment: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Output, gradients by name, full state, and logical rows of the hidden weight here."""
    mine = models[rank]
    config = etp.EtpConfig(pad_for_alignment=alignment)
    etp.shard_module(mine, dist.group.WORLD, config=config)
    out = mine(tokens_of(rank))
    out.square().mean().backward()
    grads = {name: param.grad for name, param in mine.named_parameters()}
    hidden = mine[2].weight  # type: ignore[index]
    return out.detach(), grads, etp.full_state_dict(mine), hidden.layout.logical_rows(rank)


@pytest.mark.parametrize(
    ("world_size", "alignment"), [(8, 1), (8, 16), (32, 1), pytest.param(128, 1, marks=pytest.mark.slow)]
)
def test_many_ranks_match_the_unsharded_model(world_size: int, alignment: int) -> None:
    source = model()
    outputs, grads = unsharded(source, world_size)
    answers = run_threads(train, world_size, [copy.deepcopy(source) for _ in range(world_size)], alignment)
    assert sum(rows for _, _, _, rows in answers) == HIDDEN
    each = -(-HIDDEN // (world_size * alignment)) * alignment
    assert [rows for _, _, _, rows in answers] == [
        min(max(HIDDEN - rank * each, 0), each) for rank in range(world_size)
    ]
    if world_size in (32, 128):
        assert answers[-1][3] == 0
    for rank, (out, _, state, _) in enumerate(answers):
        assert torch.equal(out, outputs[rank])
        for name, value in source.state_dict().items():
            assert torch.equal(state[name], value)
    for name, expected in grads.items():
        if name in ("0.weight", "2.weight", "4.weight"):
            whole = torch.cat([answer[1][name] for answer in answers])
            assert torch.equal(whole[: expected.shape[0]], expected), name
            assert whole[expected.shape[0] :].count_nonzero() == 0
        else:
            for _, mine, _, _ in answers:
                torch.testing.assert_close(mine[name], expected)


def refuse_a_different_peer(rank: int, world_size: int, models: list[nn.Module]) -> str:
    """The message on this rank."""
    try:
        etp.shard_module(models[rank], dist.group.WORLD)
    except etp.PeerMismatchError as error:
        return str(error)
    return "no error"


def test_one_different_peer_among_many_is_found_by_all() -> None:
    source = model()
    models = [copy.deepcopy(source) for _ in range(32)]
    with torch.no_grad():
        models[29][4].weight[19, 74] += 1e-4  # type: ignore[index]
    for message in run_threads(refuse_a_different_peer, 32, models):
        assert "hold different values of 4.weight" in message
