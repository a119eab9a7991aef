"""Backward passes for chosen tensors only, by ``backward(inputs=...)`` and ``torch.autograd.grad``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from tests.multiproc.oracle import combined, rows_of_shard
from tests.support.launch import device, run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.plain_layers]

SIDE = 16
"""With as many rows in a batch, a GEMM with the wrong operand has a plausible shape."""

Derivative = Callable[[torch.Tensor, Sequence[Any]], list[torch.Tensor | None]]


def by_backward(loss: torch.Tensor, weights: Sequence[Any]) -> list[torch.Tensor | None]:
    loss.backward(inputs=list(weights))
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


def by_grad(loss: torch.Tensor, weights: Sequence[Any]) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, weights))


def by_edges(loss: torch.Tensor, weights: Sequence[Any]) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, [torch.autograd.graph.get_gradient_edge(weight) for weight in weights]))


DERIVATIVES = {"backward": by_backward, "grad": by_grad, "edges": by_edges}


class Deep(nn.Module):
    """Square layers, each of them recomputed as told."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            block = nn.Sequential(layer, nn.Tanh())
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return x


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(10 * step + rank)).to(device())


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and the same without sharding."""
    whole = copy.deepcopy(model)
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=1, **options))
    return model, whole


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if "weight" in name}


def chosen_weights(rank: int, world_size: int, how: str, recompute: str) -> None:
    """Some of the weights, of a model whose forward pass is repeated in the backward pass; bitwise."""
    torch.manual_seed(3)
    model, whole = pair(Deep(recompute).to(device()))
    differentiate = DERIVATIVES[how]
    for step, names in enumerate(
        (["layers.0.weight", "layers.2.weight"], ["layers.1.weight"], list(weights_of(model)))
    ):
        found = differentiate(model(data(step, rank)).square().mean(), [weights_of(model)[name] for name in names])
        each = [
            differentiate(whole(data(step, peer)).square().mean(), [weights_of(whole)[name] for name in names])
            for peer in range(world_size)
        ]
        for name, mine, *theirs in zip(names, found, *each, strict=True):
            shard = rows_of_shard(combined(theirs, mean=True), rank, world_size, 1)
            assert torch.equal(mine, shard), (step, name, (mine - shard).abs().max())
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("recompute", ["", "plain"])
@pytest.mark.parametrize("how", DERIVATIVES)
def test_gradients_of_chosen_weights_equal_those_without_sharding(how: str, recompute: str) -> None:
    run_distributed(chosen_weights, 2, args=(how, recompute))


def chosen_weights_reentrant(rank: int, world_size: int) -> None:
    """PyTorch finds no weights in the graph, or refuses: a sharded model answers the same, and nothing is added."""
    torch.manual_seed(3)
    answers: list[list[Any]] = []
    for model in pair(Deep("reentrant").to(device())):
        answers.append([])
        for differentiate in (by_backward, by_grad):
            for chosen in (list, lambda weights: weights[:1]):
                x = data(0, rank).requires_grad_()
                try:
                    found = differentiate(model(x).sum(), [*chosen(list(weights_of(model).values())), x])
                    answers[-1].append([None if grad is None else tuple(grad.shape) for grad in found])
                except RuntimeError as error:
                    answers[-1].append(str(error))
                assert all(param.grad is None for param in model.parameters())
            weights = list(weights_of(model).values())
            if differentiate is by_backward:
                assert by_backward(model(x).sum(), weights) == [None] * len(weights)
    sharded, whole = answers
    assert sharded == whole
    assert all("torch.utils.checkpoint is incompatible" in answer for answer in whole)


def test_reentrant_checkpointing_answers_as_without_sharding() -> None:
    run_distributed(chosen_weights_reentrant, 2)


def scaled_by_a_weight(rank: int, world_size: int) -> None:
    """What is computed from a shard starts the backward pass: the recomputed layers still see whole weights."""
    found = {}
    for recompute in ("", "plain"):
        torch.manual_seed(3)
        model, _ = pair(Deep(recompute).to(device()))
        scaled = model.layers[2].weight * model(data(0, rank)).square().mean()
        gradient = torch.ones_like(model.layers[2].weight)
        scaled.backward(gradient, retain_graph=True)
        torch.autograd.backward([scaled], [gradient], inputs=[model.layers[0].weight, scaled])
        assert scaled.grad is not None
        found[recompute] = [param.grad for param in model.parameters()]
    for mine, expected in zip(found["plain"], found[""], strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_backward_pass_from_what_was_computed_from_a_shard() -> None:
    run_distributed(scaled_by_a_weight, 2)


def unused_weights(rank: int, world_size: int) -> str:
    """Weights that the loss does not depend on: None, zeros, or PyTorch's own error, as without sharding."""
    torch.manual_seed(3)
    model, _ = pair(Deep("").to(device()))
    used, unused = model.layers[0].weight, model.layers[2].weight

    def loss() -> torch.Tensor:
        return model.layers[0](data(0, rank)).sum()

    first, second = torch.autograd.grad(loss(), (used, unused), allow_unused=True)
    assert first.abs().sum() > 0
    assert second is None
    again, zeros = torch.autograd.grad(loss(), (used, unused), materialize_grads=True)
    assert torch.equal(first, again)
    assert torch.equal(zeros, torch.zeros(unused.layout.shard_shape, device=device()))
    assert type(zeros) is torch.Tensor
    (alone,) = torch.autograd.grad(loss(), used)
    assert torch.equal(first, alone)
    unused.requires_grad_(False)
    with pytest.raises(RuntimeError) as refused:
        torch.autograd.grad(loss(), (used, unused))
    return str(refused.value)


def test_weights_that_a_loss_does_not_use() -> None:
    for message in run_distributed(unused_weights, 2):
        assert "does not require grad" in message


# Experts ------------------------------------------------------------------------------------------------------

EXPERTS = 4
SPLITS = (5, 3, 0, 8)


class Experts(nn.Module):
    """Grouped linears whose weights are gathered together; the first one is used as often as told."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        options: dict[str, Any] = {"bias": False, "etp_group": dist.group.WORLD, "device": device()}
        config = etp.EtpConfig(pad_for_alignment=1)
        self.first = etp.GroupedLinear(EXPERTS, SIDE, SIDE, config=config, **options)
        self.second = etp.GroupedLinear(EXPERTS, SIDE, SIDE, config=config, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.first(x, SPLITS))
        return self.second(x, SPLITS)


def chosen_experts(rank: int, world_size: int, uses: int, once: bool) -> None:
    """Some experts' weights, in several passes into the same gradients: the others get none, nor hooks."""
    torch.manual_seed(4)
    model = Experts(uses)
    model.second.weight1.requires_grad_(False)
    config = etp.EtpConfig(pad_for_alignment=1, reduce_once_per_iteration=once)
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    params = dict(model.named_parameters())
    ran: list[str] = []
    for name, param in params.items():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    model(data(0, rank)).sum().backward()
    etp.wait_async_comms(model)

    def gradients(*passes: Sequence[str]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        ran.clear()
        for step, names in enumerate(passes):
            loss = model(data(step, rank)).square().mean()
            loss.backward(inputs=[params[name] for name in names] or None)
        etp.wait_async_comms(model)
        return {name: param.grad.clone() for name, param in params.items() if param.grad is not None}

    whole = gradients([])
    assert set(whole) == set(params) - {"second.weight1"}
    for names in (["first.weight2", "first.weight0"], ["second.weight3"], ["first.weight3", "second.weight0"]):
        some = gradients(names)
        assert set(some) == set(names)
        assert all(torch.equal(some[name], whole[name]) for name in names)
        assert sorted(ran) == sorted(names)
    alone = [gradients([], ["first.weight1", "second.weight0"]), gradients(["first.weight0"], ["first.weight1"])]
    assert set(alone[0]) == set(whole)
    assert torch.equal(alone[0]["first.weight2"], whole["first.weight2"])
    assert torch.equal(alone[1]["first.weight0"], whole["first.weight0"])
    assert not torch.equal(alone[0]["first.weight1"], whole["first.weight1"])
    # Nothing of these experts: no reduction, and the buffers are there for the next pass.
    runtime.counters.reset()
    x = data(0, rank).requires_grad_()
    model.zero_grad()
    model(x).square().mean().backward(inputs=[x])
    etp.wait_async_comms(model)
    assert runtime.counters.reductions == {}
    assert all(param.grad is None for param in params.values())
    for name, grad in gradients([]).items():
        assert torch.equal(grad, whole[name])


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("uses", [1, 2])
def test_chosen_experts_alone_get_gradients(uses: int, once: bool) -> None:
    run_distributed(chosen_experts, 2, args=(uses, once))
