"""Muon on shards against ``torch.optim.Muon`` on the unsharded model, from equal gradients."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.matrices import MatrixPlan, on_owners
from tests.multiproc.bodies_stacked import Experts
from tests.multiproc.oracle import rows_of_shard
from tests.threaded.threads import run_threads

STEPS = 3
# One unit in the last place in bf16: PyTorch's addition with a factor rounds differently for elements at the end of a
# block of memory, and for transposed operands, on the CPU.
BF16 = 2**-7


def model(dtype: torch.dtype) -> nn.Module:
    """Tall, wide and square weights of odd sizes; one is replicated, one frozen, one gets no gradient in a step."""
    torch.manual_seed(7)
    sizes = [(12, 75), (75, 12), (12, 12), (12, 5), (5, 33), (33, 9)]
    return nn.Sequential(*(nn.Linear(columns, rows) for columns, rows in sizes)).to(dtype)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """In the order in which both optimizers get them."""
    return [param for param in module.parameters() if param.ndim > 1]


def gradients(params: list[nn.Parameter], step: int) -> list[torch.Tensor | None]:
    """Whole ones; in the second step, the second weight has none."""
    generator = torch.Generator().manual_seed(step)
    found: list[torch.Tensor | None] = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
    if step == 1:
        found[1] = None
    return found


def own_rows(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """What of a whole gradient or momentum belongs to ``param``; NaN in the padding."""
    if not isinstance(param, etp.ETPShardedParam):
        return whole.clone()
    rows = rows_of_shard(whole, param.group_rank, param.layout.num_shards, param.layout.pad_for_alignment)
    rows[param.layout.logical_rows(param.group_rank) :] = torch.nan
    return rows


def step_all(
    rank: int, world_size: int, models: list[nn.Module], wholes: list[list[Any]], options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[tuple[tuple[int, int] | None, torch.Tensor]]]:
    """Full weights after the steps, and of each matrix this rank's rows (None: all) and their momentum."""
    del world_size
    mine = models[rank]
    etp.shard_module(mine, dist.group.WORLD, replicated_modules=[mine[2]], config=etp.EtpConfig(pad_for_alignment=4))  # type: ignore[index]
    params = matrices(mine)
    params[3].requires_grad_(False)
    optimizer = etp.Muon(params, **options)
    for step in wholes:
        for param, whole in zip(params, step, strict=True):
            param.grad = own_rows(whole, param) if whole is not None and param.requires_grad else None
        optimizer.step()
    momenta: list[tuple[tuple[int, int] | None, torch.Tensor]] = []
    for param in params:
        rows = param.layout.logical_range(rank) if isinstance(param, etp.ETPShardedParam) else None
        if param.requires_grad:
            kept = optimizer.state[param]["momentum_buffer"]
            momenta.append((rows, kept if rows is None else kept[: rows[1] - rows[0]]))
    return etp.full_state_dict(mine), momenta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "nesterov"), [(1, True), (2, True), (2, False), (3, True), (4, False)])
def test_whole_matrices_are_stepped_as_by_the_unsharded_optimizer(
    world_size: int, nesterov: bool, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {
        "lr": 0.1,
        "nesterov": nesterov,
        "adjust_lr_fn": "match_rms_adamw" if world_size == 3 else None,
    }
    whole = model(dtype)
    models = [copy.deepcopy(whole) for _ in range(world_size)]
    params = matrices(whole)
    params[3].requires_grad_(False)
    optimizer = torch.optim.Muon(params, **options)
    wholes = [gradients(params, step) for step in range(STEPS)]
    momenta = {param: torch.zeros_like(param) for param in params if param.requires_grad}
    for step in wholes:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone() if grad is not None and param.requires_grad else None
            if param.grad is not None:
                # PyTorch's own overwrites that of bf16 weights without Nesterov.
                optimizer.state[param]["momentum_buffer"] = momenta[param].clone()
                momenta[param].lerp_(param.grad, 1 - 0.95)
        optimizer.step()
    expected = whole.state_dict()
    for full, kept in run_threads(step_all, world_size, models, wholes, options):
        for (rows, found), momentum in zip(kept, momenta.values(), strict=True):
            assert torch.equal(found, momentum if rows is None else momentum[slice(*rows)])
        for name, value in full.items():
            if dtype is torch.float32:
                assert torch.equal(value, expected[name]), name
            else:
                torch.testing.assert_close(value, expected[name], rtol=STEPS * BF16, atol=1e-3)


def compute(rank: int, world_size: int, wholes: list[torch.Tensor], models: list[nn.Module]) -> list[int]:
    """Which matrices this rank computes on in rounds of few elements; checks this rank's rows of the results."""
    runtime = etp.shard_module(models[rank], dist.group.WORLD)
    layouts = [etp.ShardLayout(tuple(whole.shape), world_size, 4) for whole in wholes]
    plan = MatrixPlan.balanced(layouts, round_numel=40)
    assert len(plan.rounds) > 1
    owned: list[int] = []
    got: dict[int, torch.Tensor] = {}

    def turn_round(index: int, whole: torch.Tensor) -> torch.Tensor:
        assert torch.equal(whole, wholes[index])
        owned.append(index)
        found = whole.flip(0, 1)
        whole.fill_(torch.nan)
        return found

    on_owners(
        runtime.routes,
        plan,
        dist.group.WORLD,
        send=lambda index: wholes[index][slice(*layouts[index].logical_range(rank))],
        compute=turn_round,
        receive=lambda index, rows: got.update({index: rows.clone()}),
    )
    for index, whole in enumerate(wholes):
        assert torch.equal(got[index], whole.flip(0, 1)[slice(*layouts[index].logical_range(rank))])
    return owned


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_each_matrix_is_computed_once_and_every_row_comes_back(world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(rows, 3 + rows % 4, generator=generator) for rows in (1, 40, 7, 23, 4, 4, 11, 30, 17, 2)]
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(world_size)]
    for one in models:
        one.load_state_dict(models[0].state_dict())
    owned = run_threads(compute, world_size, wholes, models)
    assert sorted(index for each in owned for index in each) == list(range(len(wholes)))


def step_experts(rank: int, world_size: int, models: list[nn.Module], wholes: list[torch.Tensor]) -> torch.Tensor:
    """The full stack after a step with each of the gradients."""
    del world_size
    mine = models[rank]
    etp.shard_module(mine, dist.group.WORLD)
    param = mine.up
    assert isinstance(param, etp.ETPShardedParam)
    optimizer = etp.Muon([param], lr=0.1)
    for whole in wholes:
        param.grad = own_rows(whole, param)
        optimizer.step()
    return etp.full_state_dict(mine)["up"]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_each_stacked_expert_is_a_matrix(world_size: int) -> None:
    torch.manual_seed(3)
    whole = Experts("batch")
    wholes = [torch.randn(whole.up.shape) for _ in range(STEPS)]
    models = [copy.deepcopy(whole) for _ in range(world_size)]
    experts = [nn.Parameter(expert.detach().clone()) for expert in whole.up]
    optimizer = torch.optim.Muon(experts, lr=0.1)
    for grads in wholes:
        for expert, grad in zip(experts, grads, strict=True):
            expert.grad = grad.clone()
        optimizer.step()
    for found in run_threads(step_experts, world_size, models, wholes):
        assert torch.equal(found, torch.stack([expert.detach() for expert in experts]))


def step_differently(rank: int, world_size: int, models: list[nn.Module], missing: int, after_another: bool) -> str:
    """What is raised where one rank has no gradients of the first matrices, perhaps after a step with all of them."""
    del world_size
    mine = models[rank]
    etp.shard_module(mine, dist.group.WORLD, replicated_modules=[mine[2]])  # type: ignore[index]
    params = matrices(mine)
    for param, whole in zip(params, gradients(params, 0), strict=True):
        param.grad = whole
    optimizer = etp.Muon(params)
    if after_another:
        optimizer.step()
    if rank == 1:
        for param in params[:missing]:
            param.grad = None
    with pytest.raises(etp.PeerMismatchError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("after_another", [False, True])
@pytest.mark.parametrize(("missing", "left", "first"), [(1, 4, r"begins with 1\.weight"), (6, 0, "has none")])
def test_gradients_of_different_matrices_are_refused_on_every_rank(
    missing: int, left: int, first: str, after_another: bool
) -> None:
    models = [model(torch.float32) for _ in range(2)]
    messages = run_threads(step_differently, 2, models, missing, after_another)
    for rank, message in enumerate(messages):
        assert f"by rank, their numbers are {{0: 5, 1: {left}}}" in message
        assert re.search(rf"rank {rank} {(r'begins with 0.weight', first)[rank]}", message)


def use_closure(rank: int, world_size: int, models: list[nn.Module]) -> tuple[float, bool]:
    """The closure's loss, and whether it had gradients enabled."""
    del world_size
    mine = models[rank]
    etp.shard_module(mine, dist.group.WORLD)
    optimizer = etp.Muon(matrices(mine), lr=torch.tensor(0.1))
    enabled = []

    def closure() -> torch.Tensor:
        enabled.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss: torch.Tensor = mine(torch.ones(3, 12)).square().mean()
        loss.backward()
        return loss

    first, second = (optimizer.step(closure).item() for _ in range(2))
    assert second < first
    return first, all(enabled)


def test_closures_and_rates_in_tensors() -> None:
    whole = model(torch.float32)
    expected = whole(torch.ones(3, 12)).square().mean().item()
    for loss, enabled in run_threads(use_closure, 2, [copy.deepcopy(whole) for _ in range(2)]):
        assert loss == expected
        assert enabled
