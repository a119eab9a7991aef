"""Bodies of the engine's tests on GPUs: sharded models against the same models whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import etp
from etp.cache import Slot
from tests.support.launch import device

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
    names = {type(t).__name__ for t in runtime.transports.values()}
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
