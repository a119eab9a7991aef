"""Bodies: experts stacked in parameters of three dimensions, which their module reads in ways of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import etp
from tests.multiproc.oracle import Twins, poisoned
from tests.support.launch import device

EXPERTS, WIDTH, INNER = 5, 6, 4  # 5 do not divide over 2 or 4 ranks
TOKENS = 7


class Experts(nn.Module):
    """Each token's experts compute by themselves.

    Args:
        way: how weights are read: ``index``, ``batch`` or ``transposed``.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.num_experts, self.way = EXPERTS, way
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.offset = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """From ``[tokens, width]`` and ``[tokens]`` to ``[tokens, width]``."""
        if self.way == "index":
            out = torch.zeros_like(x)
            for expert in chosen.unique():
                rows = torch.where(chosen == expert)[0]
                inner = F.linear(x[rows], self.up[expert]).relu()
                out = out.index_add(0, rows, F.linear(inner, self.down[expert]) + self.offset[expert])
            return out
        if self.way == "batch":
            inner = torch.bmm(self.up[chosen], x[..., None]).relu()
            return torch.bmm(self.down[chosen], inner)[..., 0] + self.offset[chosen]
        every = (x @ self.up.transpose(1, 2)).relu() @ self.down.transpose(1, 2)
        return every[chosen, torch.arange(len(x))] + self.offset[chosen]


class Mixture(nn.Module):
    """Two layers of a router and experts.

    Args:
        way: see :class:`Experts`.
        recompute: None, or ``use_reentrant`` of activation checkpointing around each layer's experts.
    """

    def __init__(self, way: str, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(11, WIDTH)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(2))
        self.experts = nn.ModuleList(Experts(way) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From ``[tokens]`` to a number."""
        x = self.embedding(tokens)
        for router, experts in zip(self.routers, self.experts, strict=True):
            weight, chosen = router(x).softmax(-1).max(-1)
            if self.recompute is None:
                out = experts(x, chosen)
            else:
                out = checkpoint(experts, x, chosen, use_reentrant=self.recompute)
            x = x + weight[:, None] * out
        return x.square().mean()


def scenario(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
    """One loss; ranks choose other experts, and other numbers of them."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    tokens = torch.randint(0, 11, (1 + TOKENS * (data_rank % 2),), generator=generator)
    yield model(tokens.to(device()))


def _mixture(way: str, recompute: bool | None = None, frozen: bool = False) -> Mixture:
    torch.manual_seed(5)
    model = Mixture(way, recompute)
    for experts in model.experts:
        experts.requires_grad_(not frozen)
    return model.to(device())


def train(rank: int, world_size: int, way: str, recompute: bool | None, frozen: bool) -> tuple[list[int], int]:
    """Three steps beside the unsharded model. Returns the gathers of each step, and this rank's bytes of shards."""
    with poisoned():
        twins = Twins(_mixture(way, recompute, frozen), rank, world_size, timeout_s=30.0, pad_for_alignment=1)
        sides = (twins.model, twins.reference.model)
        optimizers = [torch.optim.AdamW(side.parameters(), lr=1e-2, foreach=False) for side in sides]
        gathers = []
        for step in range(3):
            twins.runtime.counters.reset()
            twins.step(scenario, step)
            gathers.append(sum(n for name, n in twins.runtime.counters.gathers.items() if "experts" in name))
            for optimizer in optimizers:
                optimizer.step()
            twins.compare_weights(f"step {step}")
    return gathers, etp.resident_nbytes(twins.model)["shards"]


def kept(rank: int, world_size: int, way: str) -> list[bool]:
    """Whether each full weight of the forward pass is freed before the backward pass."""
    model = _mixture(way)
    etp.shard_module(model, dist.group.WORLD)
    found: list[StorageWeakRef] = []

    def note(module: nn.Module, args: Any) -> None:
        found.extend(StorageWeakRef(param.untyped_storage()) for param in (module.up, module.down))

    for experts in model.experts:
        experts.register_forward_pre_hook(note)
    (loss,) = scenario(model, 0, 1)
    freed = [storage.expired() for storage in found]
    loss.backward()
    return freed


def seen_by_hooks_around(rank: int, world_size: int) -> list[list[torch.Size]]:
    """Of an unsharded and of a sharded model, shapes of what hooks on saved tensors around experts get, but weights."""
    found = []
    for shard in (False, True):
        model = _mixture("transposed")
        if shard:
            etp.shard_module(model, dist.group.WORLD)
        x, chosen = torch.randn(3, WIDTH, device=device()).requires_grad_(), torch.tensor([0, 2, 1], device=device())
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, to: list[torch.Tensor] = packed) -> int:
            to.append(tensor)
            return len(to) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            model.experts[0](x, chosen).sum().backward()
        found.append([each.shape for each in packed if each.numel() != EXPERTS * WIDTH * INNER])
    return found


def told(rank: int, world_size: int) -> dict[str, str]:
    """What is answered to wrong uses, after each of which the weights are shards again."""
    model = _mixture("index")
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    etp.shard_module(model, dist.group.WORLD)
    answers = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (TypeError, IndexError, etp.EtpError) as error:
            answers[name] = f"{type(error).__name__}: {error}"
        shards = [param for experts in model.experts for param in (experts.up, experts.down)]
        assert all(isinstance(param, etp.ETPShardedParam) for param in shards)

    first = model.experts[0]
    x, chosen = torch.randn(2, WIDTH, device=device()), torch.tensor([0, 1], device=device())
    attempt("fails inside", lambda: first(x, torch.tensor([9], device=device())))
    attempt("outside of forward", lambda: first.up[0])
    loss = first(x.requires_grad_(), chosen).sum()
    with torch.no_grad():
        first.up.local_shard().mul_(2)
    attempt("changed before backward", loss.backward)
    with torch.no_grad():
        first.up.local_shard().div_(2)
    attempt("create_graph", lambda: torch.autograd.grad(first(x, chosen).sum(), x, create_graph=True))
    full = etp.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in whole.items())
    return answers


def left_whole(rank: int, world_size: int) -> list[str]:
    """Types of the parameters of experts that stay replicated, and of those beside them."""
    model = _mixture("index")
    etp.shard_module(model, dist.group.WORLD, replicated_modules=[model.experts[0]])
    return [type(experts.up).__name__ for experts in model.experts]


def alone(rank: int, world_size: int) -> bool:
    """Whether a module of experts that is the whole sharded module computes as before, twice."""
    torch.manual_seed(5)
    experts = Experts("index").to(device())
    x, chosen = torch.randn(3, WIDTH, device=device()), torch.tensor([0, 2, 2], device=device())
    expected = experts(x, chosen)
    etp.shard_module(experts, dist.group.WORLD)
    same = True
    for _ in range(2):
        out = experts(x, chosen)
        out.sum().backward()
        same &= torch.equal(out, expected)
    return same
