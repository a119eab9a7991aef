"""Bodies: hooks of sharded weights: how often, behind which use, with an optimizer in them, and when they raise."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etp
from tests.multiproc.bodies_engine import SIDE, fail, stack, train_once
from tests.multiproc.models import PlannedFailureError, Tiny, batch, loss_of
from tests.multiproc.oracle import Twins
from tests.support.launch import device


def optimizer_in_backward(rank: int, world_size: int) -> None:
    """Every parameter steps in its own hook and forgets its gradient, as memory-saving trainers do."""

    def steps_itself(model: nn.Module) -> None:
        for param in model.parameters():
            optimizer = torch.optim.AdamW([param], lr=1e-2, foreach=False)

            def step(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)

    torch.manual_seed(7)
    plain = Tiny(tied=True).to(device())
    torch.manual_seed(7)
    model = Tiny(tied=True).to(device())
    etp.shard_module(model, dist.group.WORLD)
    steps_itself(model)
    for step in range(3):
        tokens, targets = batch(step, rank, device())
        loss = loss_of(model(tokens), targets)
        loss.backward()
    optimizers = {name: torch.optim.AdamW([p], lr=1e-2, foreach=False) for name, p in plain.named_parameters()}
    for step in range(3):
        total: dict[str, torch.Tensor] = {}
        for peer in range(world_size):
            tokens, targets = batch(step, peer, device())
            plain.zero_grad()
            loss_of(plain(tokens), targets).backward()
            for name, param in plain.named_parameters():
                total[name] = param.grad.clone() if peer == 0 else total[name] + param.grad
        for name, param in plain.named_parameters():
            param.grad = total[name] / world_size
            optimizers[name].step()
    for name, value in etp.full_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name


def a_hook_that_raises(rank: int, world_size: int) -> int:
    """The step after it is clean: the same gradients as a model that never had the hook."""
    model, _ = stack(4)
    other, _ = stack(4)
    handles = [layer.weight.register_post_accumulate_grad_hook(fail) for layer in (model.layers[1], model.layers[3])]
    failures = 0
    for _ in range(2):
        try:
            train_once(model, rank)
        except PlannedFailureError:
            failures += 1
    for handle in handles:
        handle.remove()
    train_once(model, rank)
    train_once(other, rank)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    return failures


def hooks_of_microbatches(rank: int, world_size: int) -> list[dict[str, int]]:
    """Hooks that run from the start of each iteration's last microbatch on, where reductions finish as they may.

    Megatron takes a hook in that time for the last microbatch's, and reduces a bucket when it has seen all of them.
    """
    model, _ = stack(5)
    etp.EtpRuntime(etp.EtpConfig(), finish_with_backward=False).adopt(model)
    counts: dict[str, int] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: counts.__setitem__(name, counts.get(name, 0) + 1))
    seen = []
    for step in range(3):
        for micro in range(3):
            if micro == 2:
                counts.clear()
            generator = torch.Generator().manual_seed(10 * step + micro + 100 * rank)
            model(torch.randn(2, SIDE, generator=generator).to(device())).square().sum().backward()
        etp.wait_async_comms(model)
        seen.append(dict(counts))
    return seen


def _count_hooks(model: nn.Module) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Counts of each parameter's hook, and the gradient that it last saw; both are filled as hooks run."""
    counts: dict[str, int] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        counts[name] = 0

        def count(param: torch.Tensor, name: str = name) -> None:
            assert param.grad is not None
            counts[name] += 1
            seen[name] = param.grad.clone()

        param.register_post_accumulate_grad_hook(count)
    return counts, seen


def hook_counts(rank: int, world_size: int) -> dict[str, int]:
    """How often each parameter's hook ran in one backward pass of a model with a tied weight and a repeated block."""
    torch.manual_seed(7)
    model = Tiny(tied=True).to(device())
    etp.shard_module(model, dist.group.WORLD)
    counts, _ = _count_hooks(model)
    tokens, targets = batch(0, rank, device())
    loss_of(model(tokens, order=[0, 1, 1, 2]), targets).backward()
    return counts


def hooks_of_two_forwards(rank: int, world_size: int, ways: dict[str, Any]) -> None:
    """One loss of two calls of the model: hooks run as often as those of the unsharded one, and see the whole sum."""
    for options in ({}, {"prefetch_depth": 3}, {"reduce_once_per_iteration": True}):
        torch.manual_seed(7)
        model = Tiny(**ways).to(device())
        plain = copy.deepcopy(model)
        etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(**options))
        counts, seen = _count_hooks(model)
        expected, _ = _count_hooks(plain)
        for step in range(3):
            for side in (model, plain):
                side.zero_grad()
                first, targets = batch(step, rank, device())
                second, _ = batch(step + 9, rank, device())
                loss_of(side(first) * torch.sigmoid(side(second)), targets).backward()
                etp.wait_async_comms(side)
            assert counts == expected == dict.fromkeys(counts, step + 1), (options, counts)
            for name, param in model.named_parameters():
                assert torch.equal(seen[name], param.grad), f"{options}: the hook of {name} saw part of its gradient"


def hooks_on_replicated(rank: int, world_size: int) -> None:
    """Tensor hooks on replicated parameters see the gradient and may change it, whenever they were registered."""
    torch.manual_seed(7)
    twins = Twins(Tiny().to(device()), rank, world_size)
    seen: dict[nn.Module, int] = {twins.model: 0, twins.reference.model: 0}

    def hook(side: nn.Module, name: str) -> None:
        def halve(grad: torch.Tensor) -> torch.Tensor:
            assert grad.abs().sum() > 0, f"a hook of {name} saw zeros"
            seen[side] += 1
            return grad / 2

        side.get_parameter(name).register_hook(halve)

    def scenario(side: nn.Module, step: int, peer: int) -> Iterator[torch.Tensor]:
        tokens, targets = batch(step, peer, device())
        loss = loss_of(side(tokens), targets)
        if step == 1 and (side is twins.model or peer == 0):
            hook(side, "blocks.2.down.bias")
        yield loss

    for side in seen:
        hook(side, "norm.weight")
        hook(side, "norm.bias")
    for step in range(4):
        twins.step(scenario, step)
    assert seen == {twins.model: 2 * 4 + 3, twins.reference.model: world_size * (2 * 4 + 3)}
