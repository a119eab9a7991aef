"""Bodies of the engine's tests on GPUs: sharded models against the same models whole.

Those that :mod:`tests.multiproc.test_engine` runs as well need no GPU.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from etp.cache import Slot
from etp.group import WeightGroup
from tests.multiproc.bodies_modules import PlainExperts, PlainGroupedLinear
from tests.multiproc.oracle import poisoned
from tests.support.launch import device, on_gpus

VOCABULARY, HIDDEN, WIDE, LAYERS = 300, 128, 336, 3


class Net(nn.Module):
    """Biases, weights whose rows do not divide, optional recomputation and tied embeddings."""

    def __init__(self, recompute: bool, tied: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN, bias=False))
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        logits: torch.Tensor = self.out(x)
        return logits


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, VOCABULARY).float(), (tokens.view(-1) + 1) % VOCABULARY)


def _mean(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (total / len(parts)).to(parts[0].dtype)


def poison_on_claim() -> Callable[[], None]:
    """Fill every slot with NaN when it is claimed. Returns what undoes it."""
    claim = Slot.claim

    def poisoned(self: Slot, owner: str) -> int:
        for buffer in self.buffers:
            buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        return claim(self, owner)

    Slot.claim = poisoned  # type: ignore[method-assign]

    def undo() -> None:
        Slot.claim = claim  # type: ignore[method-assign]

    return undo


def training_equals_unsharded(
    rank: int, world_size: int, transport: str, dtype: torch.dtype, recompute: bool, poison: bool
) -> dict[str, Any]:
    """Three optimizer steps of two microbatches: outputs are bitwise equal, gradients too with two ranks."""
    torch.manual_seed(0)
    undo = poison_on_claim() if poison else lambda: None
    # In bf16 autograd rounds the sum of a tied weight's two gradients, and the engine does not.
    whole = Net(recompute, tied=dtype == torch.float32).to(device(), dtype)
    model = copy.deepcopy(whole)
    runtime = etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(transport=transport))  # type: ignore[arg-type]
    worst = 0.0
    for step in range(3):
        for micro in range(2):
            seeds = [torch.Generator().manual_seed(1000 * step + 10 * micro + r) for r in range(world_size)]
            batches = [torch.randint(0, VOCABULARY, (4, 32), generator=s).to(device()) for s in seeds]
            assert torch.equal(model(batches[rank]), whole(batches[rank])), ("output", step, micro)
            model.zero_grad()
            _loss(model, batches[rank]).backward()
            params = list(whole.parameters())
            grads = [torch.autograd.grad(_loss(whole, batch), params) for batch in batches]
            for index, ((name, ours), theirs) in enumerate(zip(model.named_parameters(), params, strict=True)):
                expected = _mean([g[index] for g in grads])
                theirs.grad = expected
                assert ours.grad is not None, name
                got = ours.grad
                if isinstance(ours, etp.ETPShardedParam):
                    start, stop = ours.layout.logical_range(rank)
                    assert not ours.grad[stop - start :].any(), name
                    got, expected = ours.grad[: stop - start], expected[start:stop]
                worst = max(worst, (got.float() - expected.float()).abs().max().item() if got.numel() else 0.0)
                # Both go on from the same weights: what is compared next is not this difference.
                ours.grad[: got.shape[0]].copy_(expected)
        with torch.no_grad():
            for p in (*model.parameters(), *whole.parameters()):
                p.sub_(p.grad, alpha=0.1)
    undo()
    full = etp.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in whole.state_dict().items())
    gathers = runtime.counters.gathers
    names = {type(t).__name__ for t in runtime.routes.transports.values()}
    return {"worst": worst, "bytes": etp.resident_nbytes(model), "gathers": dict(gathers), "transports": names}


def changed_in_backward_is_refused(rank: int, world_size: int) -> str:
    """With copy_engine a weight that changes between forward and backward raises instead of being read stale."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).to(device())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(transport="copy_engine"))  # type: ignore[arg-type]
    loss = model(torch.randn(4, 64, device=device(), requires_grad=True)).sum()
    with torch.no_grad():
        model[1].weight.add_(1.0)
    try:
        loss.backward()
    except (RuntimeError, etp.StaleWeightError) as error:
        return str(error)
    return ""


SIDE = 64


class OneExpert(nn.Module):
    """Weights of one shape, which share slots, although one is sharded over a process group of its own.

    Args:
        experts: what the third of four layers is; it takes the rows of each expert too.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(3))
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense[1](torch.tanh(self.dense[0](x))))
        x = torch.tanh(self.experts(x, [x.shape[0]]))
        out: torch.Tensor = self.dense[2](x)
        return out


def one_expert_twins(world_size: int, transport: str) -> tuple[OneExpert, OneExpert, etp.EtpRuntime]:
    """A whole model, the same sharded with look-ahead across passes, and its runtime."""
    torch.manual_seed(0)
    expert_group = dist.new_group(list(range(world_size)))
    experts = PlainExperts(1, SIDE, SIDE, bias=False, etp_group=expert_group, device=device())
    model = OneExpert(experts).to(device())
    whole = OneExpert(PlainGroupedLinear(experts, etp.full_state_dict(experts))).to(device())
    for mine, other in zip(model.dense, whole.dense, strict=True):
        other.load_state_dict(mine.state_dict())
    config = etp.EtpConfig(transport=transport, reuse_across_forwards=True)  # type: ignore[arg-type]
    runtime = etp.shard_module(model, dist.group.WORLD, expert_group=expert_group, config=config)
    return whole, model, runtime


def rows(rank: int, step: int, micro: int) -> torch.Tensor:
    """An input of :class:`OneExpert`."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(6, SIDE, generator=generator).to(device())


def train_twins(whole: OneExpert, model: OneExpert, rank: int, world_size: int, step: int, micro: int) -> float:
    """Add one microbatch's gradients on both. Returns the largest difference of a gradient so far, and removes it."""
    out = model(rows(rank, step, micro))
    assert torch.equal(out, whole(rows(rank, step, micro))), ("output", step, micro)
    out.square().mean().backward()
    params = list(whole.parameters())
    grads = [torch.autograd.grad(whole(rows(r, step, micro)).square().mean(), params) for r in range(world_size)]
    worst = 0.0
    for index, ((name, ours), theirs) in enumerate(zip(model.named_parameters(), params, strict=True)):
        mean = _mean([g[index] for g in grads])
        theirs.grad = mean if theirs.grad is None else theirs.grad + mean
        assert isinstance(ours, etp.ETPShardedParam), name
        assert ours.grad is not None, name
        start, stop = ours.layout.logical_range(rank)
        got, expected = ours.grad[: stop - start], theirs.grad[start:stop]
        worst = max(worst, (got - expected).abs().max().item() if got.numel() else 0.0)
        got.copy_(expected)
    return worst


def _delay_gathers(transport: Any) -> None:
    """Let the gathers of ``transport`` begin some milliseconds late on their stream."""
    gather = transport.all_gather

    def late(outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], label: str) -> Any:
        torch.cuda._sleep(20_000_000)
        return gather(outputs, shards, label)

    transport.all_gather = late


@contextlib.contextmanager
def _abandoned() -> Iterator[list[str]]:
    """The names of groups whose gathers nobody took."""
    names: list[str] = []
    abandon = WeightGroup.abandon_gather

    def noted(self: WeightGroup) -> None:
        if self.pending:
            names.append(self.name)
        abandon(self)

    with mock.patch.object(WeightGroup, "abandon_gather", noted):
        yield names


def look_ahead_equals_unsharded(rank: int, world_size: int, transport: str, poison: bool) -> dict[str, Any]:
    """Iterations of changing length, with look-ahead from pass to pass that is wrong at times.

    Evaluations lie between them. Every other one is by a module in training mode, whose forward passes may be those of
    reentrant checkpointing: the iteration after the next is expected to have forward passes behind forward passes as
    well. What is gathered for those is abandoned, for weights that travel on another lane into the same slots.

    Args:
        rank: this rank.
        world_size: all ranks.
        transport: which collectives move the shards.
        poison: fill slots with NaN when they are claimed, with the device idle; otherwise, on GPUs, one of the two
            process groups is late.
    """
    whole, model, runtime = one_expert_twins(world_size, transport)
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (whole, model)]
    worst, ahead = 0.0, 0
    with _abandoned() as abandoned, poisoned() if poison else contextlib.nullcontext():
        for step, microbatches in enumerate((2, 2, 1, 3, 2, 2, 2)):
            for micro in range(microbatches):
                worst = max(worst, train_twins(whole, model, rank, world_size, step, micro))
                ahead += sum(group.pending for group in runtime.groups)
            if step == 0 and not poison and on_gpus():
                assert dist.group.WORLD is not None
                _delay_gathers(runtime.routes.transports[dist.group.WORLD])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model.train(step % 2 == 1)
            with torch.no_grad():
                for micro in (7, 8):
                    x = rows(rank, step, micro)
                    assert torch.equal(model(x), whole(x)), ("evaluation", step, micro)
            model.train()
    full = etp.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in whole.state_dict().items())
    return {
        "worst": worst,
        "ahead": ahead,
        "abandoned": len(abandoned),
        "slots": len({id(group.slot) for group in runtime.groups}),
        "transports": {type(t).__name__ for t in runtime.routes.transports.values()},
    }
