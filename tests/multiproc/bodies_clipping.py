"""Bodies: total norms and loss scaling on shards against the unsharded model, through PyTorch's own functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import etp
from tests.multiproc.bodies_modules import ALIGNMENT, Mixture, PlainGroupedLinear
from tests.multiproc.models import PlannedFailureError, Tiny, batch, loss_of
from tests.multiproc.oracle import Twins, combined, rows_of_shard
from tests.support.launch import device

MAX_NORM = 0.01


def _parts(module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    total = get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
    clip_grads_with_norm_(module.parameters(), max_norm, total)
    return total


WAYS: dict[str, Callable[[nn.Module, float, float], torch.Tensor]] = {
    "etp, module": etp.clip_grad_norm_,
    "etp, parameters": lambda m, c, p: etp.clip_grad_norm_(m.parameters(), c, p),
    "etp, one by one": lambda m, c, p: etp.clip_grad_norm_(list(m.parameters()), c, p, foreach=False),
    "torch": lambda m, c, p: clip_grad_norm_(m.parameters(), c, p),
    "torch, foreach": lambda m, c, p: clip_grad_norm_(m.parameters(), c, p, foreach=True),
    "torch, one by one": lambda m, c, p: clip_grad_norm_(m.parameters(), c, p, foreach=False),
    "torch, in two parts": _parts,
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "linears":  # no gradient of theirs has a zero, which a norm of -inf would find
        return nn.Sequential(nn.Linear(12, 29), nn.Tanh(), nn.Linear(29, 7, bias=False)).to(device())
    model = Tiny(tied=True)
    model.blocks[0].requires_grad_(False)
    return model.to(device())


def _scenario(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    if isinstance(model, Tiny):
        tokens, targets = batch(step, rank, device())
        yield loss_of(model(tokens), targets)
    else:
        generator = torch.Generator().manual_seed(50 * step + rank)
        yield model(torch.randn(9, 12, generator=generator).to(device())).square().mean()


def _same_on_all_ranks(value: torch.Tensor) -> bool:
    value = value.to(device())
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return all(torch.equal(other, value) for other in everyone)


def clip_equals_whole(rank: int, world_size: int, name: str, norm_type: float, dtype: torch.dtype) -> None:
    """Every way to clip: the unsharded model's total on all ranks, and its clipped gradients."""
    twins = Twins(_model(name).to(dtype), rank, world_size)
    for step, (way, clip) in enumerate(WAYS.items()):
        if name == "linears":
            _step_in(twins, step, dtype)
        else:
            twins.step(_scenario, step)
        expected = clip_grad_norm_(twins.reference.model.parameters(), MAX_NORM, norm_type, foreach=False)
        total = clip(twins.model, MAX_NORM, norm_type)
        assert _same_on_all_ranks(total), way
        tolerance = {"rtol": 1e-2, "atol": 0.0} if dtype is torch.bfloat16 else {"rtol": 2e-6, "atol": 0.0}
        torch.testing.assert_close(total, expected, **tolerance, msg=f"{way}: ".__add__)
        assert total > MAX_NORM or norm_type < 1, "nothing was clipped"
        theirs = dict(twins.reference.model.named_parameters())
        for key, param in twins.model.named_parameters():
            if param.grad is None:
                assert theirs[key].grad is None
                continue
            grad = theirs[key].grad
            if isinstance(param, etp.ETPShardedParam):
                grad = rows_of_shard(grad, rank, world_size, ALIGNMENT)
            torch.testing.assert_close(
                torch.as_tensor(param.grad), grad, rtol=tolerance["rtol"], atol=1e-7, msg=f"{way}: {key} ".__add__
            )


def _step_in(twins: Twins, step: int, dtype: torch.dtype) -> None:
    def scenario(model: nn.Module, number: int, rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(50 * number + rank)
        yield model(torch.randn(9, 12, generator=generator).to(device=device(), dtype=dtype)).square().mean()

    twins.step(scenario, step)


def norms_inside_hooks(rank: int, world_size: int) -> None:
    """A hook that clips its own parameter inside the backward pass, as memory-saving trainers do."""
    twins = Twins(_model("tied"), rank, world_size)
    seen: dict[str, torch.Tensor] = {}
    for name, param in twins.model.named_parameters():
        if param.requires_grad:

            def note(param: torch.Tensor, name: str = name) -> None:
                seen[name] = clip_grad_norm_([param], 1e6)

            param.register_post_accumulate_grad_hook(note)
    twins.step(_scenario, 0)
    for name, param in twins.reference.model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(seen[name], torch.linalg.vector_norm(param.grad), msg=name.__add__)


# Experts ------------------------------------------------------------------------------------------------------


def _mixture(rank: int) -> tuple[Mixture, nn.Module, Any]:
    """Dense layers over 4 ranks, two experts over pairs, all pairs with the same experts; and the same unsharded."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(11)
    model = Mixture(pairs[rank // 2]).to(device())
    plain = Mixture.__new__(Mixture)
    nn.Module.__init__(plain)
    plain.first, plain.last = copy.deepcopy(model.first), copy.deepcopy(model.last)
    plain.experts = PlainGroupedLinear(model.experts, etp.full_state_dict(model.experts))
    etp.shard_module(model, dist.group.WORLD, expert_group=pairs[rank // 2])
    return model, plain, across[rank % 2]


def _mixture_loss(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return model(torch.randn(5, 6, generator=generator).to(device())).square().mean()


def clip_with_experts(rank: int, world_size: int) -> list[str]:
    """Experts averaged over the pairs: the unsharded total. Not averaged: refused, and nothing is scaled."""
    model, plain, across = _mixture(rank)
    parts: list[dict[str, torch.Tensor]] = []
    for peer in range(world_size):
        plain.zero_grad()
        _mixture_loss(plain, peer).backward()
        parts.append({name: param.grad for name, param in plain.named_parameters()})
    for name, param in plain.named_parameters():
        param.grad = combined([part[name] for part in parts], mean=True)
    expected = clip_grad_norm_(plain.parameters(), MAX_NORM)
    messages = []
    for way, clip in WAYS.items():
        model.zero_grad()
        _mixture_loss(model, rank).backward()
        if way.startswith("etp"):
            before = [param.grad.clone() for param in model.parameters()]
            try:
                clip(model, MAX_NORM, 2.0)
            except etp.PeerMismatchError as error:
                messages.append(str(error))
            assert all(torch.equal(old, param.grad) for old, param in zip(before, model.parameters(), strict=True))
        for param in model.experts.parameters():
            dist.all_reduce(param.grad, group=across)
            param.grad.div_(2)
        torch.testing.assert_close(clip(model, MAX_NORM, 2.0), expected, msg=way.__add__)
        theirs = dict(plain.named_parameters())
        for name, param in model.named_parameters():
            grad = theirs[name].grad
            if isinstance(param, etp.ETPShardedParam):
                size = 2 if name.startswith("experts") else 4
                grad = rows_of_shard(grad, rank % size, size, ALIGNMENT)
            torch.testing.assert_close(torch.as_tensor(param.grad), grad, msg=f"{way}: {name} ".__add__)
    return messages


# Loss scaling -------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


def scaler_equals_whole(rank: int, world_size: int, name: str, unscale: bool) -> tuple[list[float], list[bool]]:
    """A scale that overflows now and then: each scale and each skipped step as without sharding."""
    torch.manual_seed(7)
    # Without biases: a replicated gradient overflows on all ranks at once.
    linears = [nn.Linear(12, 29, bias=False), nn.Tanh(), nn.Linear(29, 7, bias=False)]
    twins = Twins(nn.Sequential(*linears).to(device()), rank, world_size)
    sides: tuple[nn.Module, ...] = (twins.model, twins.reference.model)
    # Near the top of fp32, so that only the largest elements of a few gradients overflow, on some ranks' shards.
    small_steps = {"init_scale": 2.0**123, "growth_factor": 1.5, "backoff_factor": 0.6, "growth_interval": 1}
    scalers = [torch.amp.GradScaler(device().type, **small_steps) for _ in sides]
    optimizers = [OPTIMIZERS[name](side.parameters()) for side in sides]

    def scaled(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(50 * step + data_rank)
        out = model(torch.randn(9, 12, generator=generator).to(device()))
        yield scalers[sides.index(model)].scale(torch.sin(out).sum())

    scales, local_overflows = [], []
    for step in range(16):
        before = etp.full_state_dict(twins.model)
        expected = twins.reference.step(scaled, step)
        twins.model.zero_grad()
        for loss in scaled(twins.model, step, rank):
            loss.backward()
        assert len(expected) == world_size
        local_overflows.append(any(not p.grad.isfinite().all() for p in twins.model.parameters()))
        for side, scaler, optimizer in zip(sides, scalers, optimizers, strict=True):
            if unscale:
                scaler.unscale_(optimizer)
                clip_grad_norm_(side.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scalers[0].get_scale())
        assert scales[-1] == scalers[1].get_scale(), f"step {step}: the scales part"
        after = etp.full_state_dict(twins.model)
        for key, value in twins.reference.model.state_dict().items():
            torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5)
        moved = any(not torch.equal(before[key], after[key]) for key in after)
        assert moved == (scales[-1] >= (scales[-2] if step else 2.0**123))
    return scales, local_overflows


def overflow_on_one_rank(rank: int, world_size: int, culprit: int) -> None:
    """An infinity in one rank's shard of one expert: all ranks of all groups skip and scale down alike."""
    model, _, _ = _mixture(rank)
    scaler = torch.amp.GradScaler(device().type, init_scale=4.0)
    dense = [*model.first.parameters(), *model.last.parameters()]
    optimizers = [torch.optim.SGD(dense, lr=0.1), torch.optim.SGD(model.experts.parameters(), lr=0.1)]
    for step, overflows in enumerate((True, False)):
        before = [param.detach().clone() for param in model.parameters()]
        model.zero_grad()
        scaler.scale(_mixture_loss(model, rank)).backward()
        if rank == culprit and overflows:
            model.experts.weight1.grad.view(-1)[0] = float("inf")
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scale = torch.tensor(scaler.get_scale())
        assert _same_on_all_ranks(scale), f"step {step}"
        assert scale.item() == 2.0
        moved = [
            not torch.equal(old, new) for old, new in zip(before, (p.detach() for p in model.parameters()), strict=True)
        ]
        names = [name for name, _ in model.named_parameters()]
        for name, param_moved in zip(names, moved, strict=True):
            # Each optimizer skips for its own parameters, as without sharding.
            if overflows and name.startswith("experts"):
                assert not param_moved, name
            elif not overflows and not name.startswith("experts.bias"):
                assert param_moved or "weight" in name, name
        skipped = torch.tensor([float(any(moved))])
        assert _same_on_all_ranks(skipped), f"step {step}"


# Refusals and abandoned sums ----------------------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What is answered to a norm or a step that would be wrong."""
    torch.manual_seed(7)
    model = Tiny().to(device())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(reduce_once_per_iteration=True))
    tokens, targets = batch(0, rank, device())
    scaler = torch.amp.GradScaler(device().type, init_scale=4.0)
    scaler.scale(loss_of(model(tokens), targets)).backward()
    optimizer = torch.optim.SGD(model.parameters())
    megatrons = Tiny().to(device())
    for param in megatrons.parameters():
        dist.broadcast(param.detach(), 0)
    etp.shard_module(megatrons, dist.group.WORLD)
    megatrons.head.weight.main_grad = torch.zeros_like(megatrons.head.weight)

    def set_where(grad: torch.Tensor) -> None:
        grad[grad < 1] = 0

    attempts: dict[str, Callable[[], Any]] = {
        "etp": lambda: etp.clip_grad_norm_(model, 1.0),
        "torch": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "scaler": lambda: scaler.step(optimizer),
        "step": optimizer.step,
        "scaled": lambda: model.head.weight.grad.mul_(0.5),
        "scaled together": lambda: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
        "masked": lambda: set_where(model.head.weight.grad),
        "replaced": lambda: setattr(model.head.weight, "grad", model.head.weight.grad * 0.5),
        "main_grad": lambda: etp.clip_grad_norm_(megatrons, 1.0),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (etp.EtpStateError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    etp.wait_async_comms(model)
    total = etp.clip_grad_norm_(model, 1.0)
    assert total > 0
    with_nan = next(model.parameters()).grad
    if rank == world_size - 1:
        with_nan.view(-1)[0] = float("nan")
    try:
        etp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        messages["nonfinite"] = str(error)
    return messages


def abandoned_sums(rank: int, world_size: int, how: str) -> None:
    """Microbatches given up before the reduction, gradients zeroed in place: the next iteration has none of them."""
    torch.manual_seed(7)
    twins = Twins(Tiny(tied=True).to(device()), rank, world_size, exact=False, reduce_once_per_iteration=True)

    def zero(model: nn.Module) -> None:
        if how == "module":
            model.zero_grad(set_to_none=False)
        else:
            torch.optim.SGD(model.parameters(), foreach=how == "foreach").zero_grad(set_to_none=False)

    def scenario(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        for micro in range(2):
            tokens, targets = batch(10 * step + micro, data_rank, device())
            yield loss_of(model(tokens), targets)

    for step in range(3):
        expected = twins.reference.step(scenario, step)
        assert len(expected[rank]) == 2
        tokens, targets = batch(99 + step, rank, device())
        loss_of(twins.model(tokens), targets).backward()
        try:
            twins.model(tokens, fail_before=1)
        except PlannedFailureError:
            zero(twins.model)
        for loss in scenario(twins.model, step, rank):
            loss.backward()
        etp.wait_async_comms(twins.model)
        twins.compare_grads(f"{how}, step {step}")
        zero(twins.model)


def abandoned_sums_of_a_penalised_weight(rank: int, world_size: int) -> None:
    """Microbatches given up before the reduction, and an iteration that reaches a weight by a penalty alone."""
    torch.manual_seed(7)
    twins = Twins(Tiny().to(device()), rank, world_size, exact=False, reduce_once_per_iteration=True)
    for step in range(3):
        tokens, targets = batch(step, rank, device())
        abandoned = loss_of(twins.model(tokens), targets)
        abandoned.backward()
        for side in (twins.model, twins.reference.model):
            if step == 2:
                tokens = targets
                loss_of(side(tokens), targets)  # zeroed between a forward pass and its backward pass
            side.zero_grad()
            (side.head.weight.square().sum() + side.blocks[0].up.bias.square().sum()).backward()
        etp.wait_async_comms(twins.model)
        twins.compare_grads(f"step {step}")
        twins.model.zero_grad()
