"""Bodies: sharded training against the oracle, one scenario at a time, with every buffer poisoned."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etp
from tests.multiproc.models import MODELS, PlannedFailureError, Tiny, batch, loss_of
from tests.multiproc.oracle import Scenario, Twins, poisoned
from tests.support.launch import device


def muon(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """PyTorch's for whole matrices, ours for sharded ones; other parameters are left alone."""
    matrices = [param for param in params if param.ndim == 2]
    sharded = any(isinstance(param, etp.ETPShardedParam) for param in matrices)
    return (etp.Muon if sharded else torch.optim.Muon)(matrices, lr=0.05)


OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw_for": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False, amsgrad=True),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, foreach=False),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, foreach=False),
    "adadelta": functools.partial(torch.optim.Adadelta, foreach=False),
    "adamax": functools.partial(torch.optim.Adamax, foreach=False),
    "nadam": functools.partial(torch.optim.NAdam, foreach=False),
    "radam": functools.partial(torch.optim.RAdam, foreach=False),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, foreach=False),
    "rprop": functools.partial(torch.optim.Rprop, foreach=False),
    "asgd": functools.partial(torch.optim.ASGD, foreach=False),
    "muon": muon,
}
"""Optimizers that treat every element alone, and one that gathers whole matrices.

Where nothing is said, PyTorch takes its multi-tensor kernels for plain parameters on a GPU and its loop for subclasses,
and the two round differently.
"""


def plain(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    yield loss_of(model(tokens), targets)


def several_backwards(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    for micro in range(3):
        tokens, targets = batch(10 * step + micro, rank, device())
        yield loss_of(model(tokens), targets)


def all_forwards_first(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    losses = []
    for micro in range(3):
        tokens, targets = batch(10 * step + micro, rank, device())
        losses.append(loss_of(model(tokens), targets))
    yield from losses


def two_losses_of_one_graph(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    logits = model(tokens)
    yield loss_of(logits, targets), {"retain_graph": True}
    yield logits.square().mean()


def skips_a_block_in_odd_steps(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    yield loss_of(model(tokens, order=[0, 2] if step % 2 else None), targets)


def reorders_blocks_in_odd_steps(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    yield loss_of(model(tokens, order=[2, 0, 1] if step % 2 else None), targets)


def repeats_blocks(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    yield loss_of(model(tokens, order=[0, 1, 1, 2] if step % 2 else [0, 1, 2, 0, 2]), targets)


def reentrant_checkpoint(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    yield loss_of(model(tokens, checkpointed="reentrant"), targets)


def plain_checkpoint(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    yield loss_of(model(tokens, checkpointed="plain"), targets)


def evaluates_between(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    model.eval()
    with torch.no_grad():
        unseen = loss_of(model(tokens), targets)
    with torch.inference_mode():
        seen = loss_of(model(tokens), targets)
    assert torch.equal(unseen, seen)
    model.train()
    loss = loss_of(model(tokens), targets)
    assert torch.equal(loss.detach(), unseen)
    with torch.no_grad():  # between a forward and its backward
        model(targets)
    yield loss


def parts_called_one_by_one(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    """Never through the root, whose call would mark the pass."""
    tokens, targets = batch(step, rank, device())
    with torch.no_grad():
        for _ in range(3):
            model.blocks[0](model.embedding(tokens))
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x)
    yield loss_of(model.head(model.norm(x)), targets)


def fails_in_forward_first(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    with contextlib.suppress(PlannedFailureError):
        model(tokens, fail_before=step % 3)
    yield loss_of(model(tokens), targets)


def fails_in_backward_first(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    with contextlib.suppress(PlannedFailureError):
        loss_of(model(tokens, fail_behind=step % 3), targets).backward()
    model.zero_grad()
    yield loss_of(model(tokens), targets)


def fails_between_backwards(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    """What the microbatches before the failure left must not reach the step after zero_grad()."""
    tokens, targets = batch(step + 50, rank, device())
    loss_of(model(tokens), targets).backward()
    with contextlib.suppress(PlannedFailureError):
        loss_of(
            model(tokens, fail_behind=1 if step == 1 else None, fail_before=0 if step != 1 else None), targets
        ).backward()
    model.zero_grad()
    for micro in range(2):
        tokens, targets = batch(10 * step + micro, rank, device())
        yield loss_of(model(tokens), targets)


def fails_between_backwards_and_writes_zeros(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    """As before, with gradients that stay in place: the failed pass must not add to them behind ``zero_grad()``."""
    tokens, targets = batch(step + 50, rank, device())
    loss_of(model(tokens), targets).backward()
    with contextlib.suppress(PlannedFailureError):
        loss_of(model(tokens, fail_behind=step % 3), targets).backward()
    model.zero_grad(set_to_none=False)
    yield loss_of(model(tokens), targets)


def penalises_weights(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    """The penalty's gradient reaches a shard through autograd itself, beside the reduction."""
    tokens, targets = batch(step, rank, device())
    loss = loss_of(model(tokens), targets)
    penalty = sum(param.square().sum() for param in model.parameters())
    # The value differs on shards; its gradient does not. Both sides yield the same value.
    yield loss + 0.01 * (penalty - penalty.detach())


def asks_for_input_gradients(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    """torch.autograd.grad of activations must leave every parameter's gradient alone."""
    tokens, targets = batch(step, rank, device())
    x = model.embedding(tokens).detach().requires_grad_()
    for _ in range(2):
        (grad,) = torch.autograd.grad(loss_of(model.head(model.norm(model.blocks[0](x))), targets), x)
    (shift,) = torch.autograd.grad(loss_of(model.head(model.norm(x)), targets), model.norm.bias)
    assert grad.abs().sum() > 0
    assert shift.abs().sum() > 0
    assert model.head.weight.grad is None
    assert model.norm.bias.grad is None
    yield loss_of(model(tokens), targets)


def differentiates_some_inputs(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    tokens, targets = batch(step, rank, device())
    some = [model.blocks[1].up.weight, model.norm.weight]
    yield loss_of(model(tokens), targets), {"inputs": some}


def siamese(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    first, targets = batch(step, rank, device())
    second, _ = batch(step + 77, rank, device())
    yield loss_of(model(first) * torch.sigmoid(model(second)), targets)


def empty_batch(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    """One rank has no data: it takes part with gradients of zero."""
    tokens, targets = batch(step, rank, device(), sequences=0 if rank == 0 else 2)
    yield (model(tokens).flatten(0, 1).square().sum() + targets.sum() * 0) * 0.1


SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        plain,
        several_backwards,
        all_forwards_first,
        two_losses_of_one_graph,
        skips_a_block_in_odd_steps,
        reorders_blocks_in_odd_steps,
        repeats_blocks,
        reentrant_checkpoint,
        plain_checkpoint,
        evaluates_between,
        parts_called_one_by_one,
        fails_in_forward_first,
        fails_in_backward_first,
        fails_between_backwards,
        fails_between_backwards_and_writes_zeros,
        penalises_weights,
        asks_for_input_gradients,
        differentiates_some_inputs,
        siamese,
        empty_batch,
    )
}


INEXACT = frozenset({"penalises_weights", "siamese"})
"""Where a rank's own sum (of two uses, or with autograd's part) is rounded elsewhere than without sharding."""


def build(model: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A named model with the same weights on all ranks."""
    torch.manual_seed(7)
    return MODELS[model]().to(device=device(), dtype=dtype)


def matches_oracle(
    rank: int,
    world_size: int,
    model: str,
    scenario: str,
    steps: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> dict[str, int]:
    """Steps of SGD by hand, compared at each; returns how often buffers were poisoned."""
    with poisoned() as counts:
        twins = Twins(build(model, dtype), rank, world_size, exact=scenario not in INEXACT, **options)
        for step in range(steps):
            twins.step(SCENARIOS[scenario], step)
            with torch.no_grad():
                for side in (twins.model, twins.reference.model):
                    for param in side.parameters():
                        if param.grad is not None:
                            param.sub_(param.grad, alpha=0.5)
        twins.compare_weights("at the end")
    return counts


def written_between_calls(rank: int, world_size: int, steps: int) -> None:
    """A target network: evaluated through a method, never as a module, and changed through ``.data`` in between."""
    model = build("tiny")
    plain = copy.deepcopy(model)
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(transport="c10d"))
    for step in range(steps):
        tokens, _ = batch(step, rank, device())
        with torch.no_grad():
            assert torch.equal(model.forward(tokens), plain.forward(tokens)), f"step {step}"
        for side in (model, plain):
            for param in side.parameters():
                param.data.mul_(0.5).add_(0.01 * (step % 3))


def matches_with_optimizer(rank: int, world_size: int, name: str) -> None:
    """Four steps of one optimizer on shards and on the whole: equal weights, bit by bit."""
    with poisoned():
        # The fused kernel's vector loop and its scalar tail round differently, and a shard has its tail elsewhere.
        twins = Twins(build("tied"), rank, world_size, exact=not name.endswith("fused"))
        optimizers = [OPTIMIZERS[name](side.parameters()) for side in (twins.model, twins.reference.model)]
        for step in range(4):
            twins.step(plain, step)
            for optimizer in optimizers:
                optimizer.step()
            twins.compare_weights(f"{name}, step {step}")


def frozen_weights(rank: int, world_size: int) -> dict[str, int]:
    """Frozen from the start, thawed later, frozen again; sharded and replicated alike."""
    model = build("tiny")
    assert isinstance(model, Tiny)
    model.blocks[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    with poisoned():
        twins = Twins(model, rank, world_size)
        for step, trained in enumerate((False, True, False, True)):
            for side in (twins.model, twins.reference.model):
                side.blocks[0].requires_grad_(trained)
                side.norm.requires_grad_(not trained)
            twins.step(several_backwards, step)
    return dict(twins.runtime.counters.reductions)


def frozen_before_backward(rank: int, world_size: int) -> None:
    """Frozen between a forward pass and its backward pass, which then leaves their gradients out, as PyTorch does."""

    def freezes(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        tokens, targets = batch(step, data_rank, device())
        loss = loss_of(model(tokens), targets)
        model.blocks[1].requires_grad_(False)
        yield loss
        model.blocks[1].requires_grad_(True)
        yield loss_of(model(targets), tokens)

    with poisoned():
        twins = Twins(build("tiny"), rank, world_size)
        for step in range(2):
            twins.step(freezes, step)


def zeros_in_main_grad(rank: int, world_size: int) -> list[bool]:
    """Whether ``main_grad`` is as if a backward pass had not failed before it was set to zero, by where it failed."""
    del world_size
    answers = []
    for behind in range(3):
        model = build("tiny")
        etp.shard_module(model, dist.group.WORLD)
        shards = [param for param in model.parameters() if isinstance(param, etp.ETPShardedParam)]
        found = []
        for fails in (False, True):
            for shard in shards:
                shard.main_grad = torch.zeros_like(shard.local_shard())  # type: ignore[attr-defined]
            tokens, targets = batch(behind, rank, device())
            if fails:
                with contextlib.suppress(PlannedFailureError):
                    loss_of(model(tokens, fail_behind=behind), targets).backward()
                for shard in shards:
                    shard.main_grad.zero_()  # type: ignore[attr-defined]
            loss_of(model(tokens), targets).backward()
            found.append([shard.main_grad for shard in shards])  # type: ignore[attr-defined]
        answers.append(all(torch.equal(one, other) for one, other in zip(*found, strict=True)))
    return answers


def gradients_of_another_dtype(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Parameters in bf16 whose ``grad_dtype`` is fp32, which they got before sharding or after it."""
    model = build("tiny", torch.bfloat16)
    for block in model.blocks:
        for param in block.parameters():
            param.grad_dtype = torch.float32
    with poisoned():
        twins = Twins(model, rank, world_size, **options)
        assert twins.model.blocks[0].up.weight.grad_dtype is torch.float32
        for side in (twins.model, twins.reference.model):
            for param in side.parameters():
                param.grad_dtype = torch.float32
        for step in range(2):
            twins.step(several_backwards, step)
        assert {param.grad.dtype for param in twins.model.parameters()} == {torch.float32}


def two_models_interleaved(rank: int, world_size: int) -> None:
    """Forward and backward passes of two models in turn, and one loss of both."""
    with poisoned():
        twins = [Twins(build(name), rank, world_size) for name in ("tiny", "tied")]

        def both(model: nn.ModuleList, step: int, data_rank: int) -> Iterator[Any]:
            tokens, targets = batch(step, data_rank, device())
            first = loss_of(model[0](tokens), targets)
            second = loss_of(model[1](targets), tokens)
            third = loss_of(model[0](targets) + model[1](tokens), targets)
            yield second
            yield first
            yield third

        pair = nn.ModuleList([twin.model for twin in twins])
        reference = nn.ModuleList([twin.reference.model for twin in twins])
        for step in range(3):
            joined = twins[0].reference.__class__(reference, world_size)
            joined.step(both, step)
            pair.zero_grad()
            for loss in both(pair, step, rank):
                loss.backward()
            for twin in twins:
                twin.compare_grads(f"step {step}")


def autocast(rank: int, world_size: int) -> None:
    """bf16 autocast over fp32 weights: losses and gradients as without sharding."""

    def under_autocast(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        tokens, targets = batch(step, data_rank, device())
        with torch.autocast(device().type, dtype=torch.bfloat16):
            loss = loss_of(model(tokens), targets)
        yield loss

    with poisoned():
        for name in ("no_bias", "tiny"):
            twins = Twins(build(name), rank, world_size)
            for step in range(2):
                twins.step(under_autocast, step)


def float64_under_autocast(rank: int, world_size: int) -> None:
    """Autocast leaves fp64 alone, with sharded weights too."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 10).double().to(device())
    x = torch.randn(3, 6, dtype=torch.float64, device=device())
    with torch.autocast(device().type, dtype=torch.bfloat16):
        expected = layer(x)
    etp.shard_module(layer, torch.distributed.group.WORLD)
    with torch.autocast(device().type, dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)
    assert expected.dtype is torch.float64


def mixed_dtypes_are_an_error(rank: int, world_size: int) -> tuple[str, str]:
    """Without autocast a bf16 weight and an fp32 input are refused, sharded or not."""
    layer = nn.Linear(6, 10).bfloat16().to(device())
    x = torch.randn(3, 6, device=device())
    messages = []
    for attempt in range(2):
        if attempt:
            for param in layer.parameters():
                torch.distributed.broadcast(param.detach(), 0)
            etp.shard_module(layer, torch.distributed.group.WORLD)
        try:
            layer(x)
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages[0], messages[1]


def even_sizes_without_padding(rank: int, world_size: int) -> None:
    """``pad_for_alignment=0`` on sizes that divide: shards are the very halves."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(18, 10), nn.Linear(10, 34), nn.ReLU(), nn.Linear(34, 18)).to(device())

    def scenario(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        tokens, targets = (drawn % 18 for drawn in batch(step, data_rank, device()))
        yield loss_of(model(tokens), targets)

    with poisoned():
        twins = Twins(model, rank, world_size, pad_for_alignment=0)
        for step in range(2):
            twins.step(scenario, step)
    shapes = [tuple(p.shape) for p in model.parameters() if isinstance(p, etp.ETPShardedParam)]
    assert shapes == [(18 // world_size, 10), (34 // world_size, 10), (18 // world_size, 34)]


def one_reduction_per_iteration(rank: int, world_size: int, scenario: str) -> None:
    """Local sums, reduced by wait_async_comms: right to rounding, and as many reductions as weights."""
    with poisoned():
        twins = Twins(build("tied"), rank, world_size, exact=False, reduce_once_per_iteration=True)
        for step in range(3):
            twins.runtime.counters.reset()
            twins.step(SCENARIOS[scenario], step)
            assert set(twins.runtime.counters.reductions.values()) == {1}


def compiled_into_graphs(rank: int, world_size: int) -> None:
    """Weights of several shapes, in a model that is compiled in place by AOTAutograd, as by most backends."""
    twins = Twins(build("tiny"), rank, world_size)
    twins.model.compile(backend="aot_eager")
    for step in range(3):
        twins.step(plain, step)


def compiled(rank: int, world_size: int) -> None:
    """A compiled forward pass, and a compiled step of the optimizer, which dynamo traces after the former."""
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 10, bias=False)).to(device())
    model = copy.deepcopy(plain)
    etp.shard_module(model, dist.group.WORLD)
    ours, theirs = (torch.optim.AdamW(side.parameters(), lr=0.1) for side in (model, plain))
    forward = torch.compile(model, backend="eager")
    step = torch.compile(ours.step, backend="eager")
    x = torch.randn(5, 6, device=device(), generator=torch.Generator(device()).manual_seed(1))
    for _ in range(2):
        for run, then in ((forward, step), (plain, theirs.step)):
            run(x).square().mean().backward()
            then()
        ours.zero_grad()
        theirs.zero_grad()
    for name, value in etp.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])
