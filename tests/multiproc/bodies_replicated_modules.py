"""Bodies: submodules that the caller leaves replicated, because they read their weights as a shard would refuse."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import etp
from tests.multiproc.bodies_clipping import WAYS
from tests.multiproc.models import INNER, TOKENS, VOCAB, WIDTH, Tiny, batch, loss_of
from tests.multiproc.oracle import Twins, poisoned, rows_of_shard
from tests.support.launch import device, on_gpus

ALIGNMENT = 16


class Rows(nn.Embedding):
    """Learned positions: the first rows of the table."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Rows for ``[batch, sequence]`` indices."""
        return self.weight[: input.shape[1]]


class Products(nn.Module):
    """A gated layer that multiplies with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.gate = parametrizations.weight_norm(nn.Linear(WIDTH, INNER, bias=False))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., WIDTH]`` to ``[..., WIDTH]``."""
        inner = x @ self.up.weight.T + self.up.bias
        return torch.einsum("...i,oi->...o", inner * torch.sigmoid(self.gate(x)), self.down.weight)


class ReadsWeights(nn.Module):
    """Sharded layers around layers that read their weights."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = Rows(TOKENS + 4, WIDTH)
        self.products = Products()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens) + self.positions(tokens)
        return self.head(self.norm(self.middle(torch.tanh(x + self.products(x)))))


READING = ("positions", "products")
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[str], set[str]]] = {
    "reads": (ReadsWeights, READING, {"embedding.weight", "middle.weight", "head.weight"}),
    "tied": (functools.partial(ReadsWeights, tied=True), READING, {"embedding.weight", "middle.weight"}),
    "tied to a replicated one": (
        functools.partial(ReadsWeights, tied=True),
        (*READING, "head"),
        {"middle.weight"},
    ),
    "all but one": (ReadsWeights, (*READING, "embedding", "norm", "head"), {"middle.weight"}),
    "blocks": (
        functools.partial(Tiny, tied=True),
        ("blocks.1", "blocks.2.up"),
        {"embedding.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.2.down.weight"},
    ),
}
"""How each is built, what stays replicated in it, and the names of the weights that do not."""


def _built(name: str) -> tuple[nn.Module, Sequence[str], set[str]]:
    torch.manual_seed(7)
    build, replicated, shards = MODELS[name]
    return build().to(device()), replicated, shards


def _micros(model: nn.Module, step: int, rank: int) -> Iterator[Any]:
    for micro in range(2):
        tokens, targets = batch(10 * step + micro, rank, device())
        yield loss_of(model(tokens), targets)


def _names_of_shards(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if isinstance(param, etp.ETPShardedParam)}


def matches_oracle(rank: int, world_size: int, name: str, training: bool, options: dict[str, Any]) -> None:
    """Three steps of AdamW, compared at each."""
    model, replicated, shards = _built(name)
    with poisoned():
        twins = Twins(model.train(training), rank, world_size, replicated=replicated, **options)
        assert _names_of_shards(twins.model) == shards
        # Nothing but these: one optimizer's step of foreach differs from that of a loop in the last bits.
        optimizers = [torch.optim.AdamW(side.parameters(), lr=1e-2, foreach=False) for side in _sides(twins)]
        for step in range(3):
            twins.step(_micros, step)
            for optimizer in optimizers:
                optimizer.step()
            twins.compare_weights(f"{name}, step {step}")


def _sides(twins: Twins) -> tuple[nn.Module, nn.Module]:
    return twins.model, twins.reference.model


def frozen(rank: int, world_size: int) -> None:
    """Frozen from the start and thawed later, or the other way around; a hook of the user's sees the whole gradient."""
    model, replicated, _ = _built("tied")
    model.get_submodule("products").requires_grad_(False)
    seen: list[torch.Tensor] = []
    model.positions.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    with poisoned():
        twins = Twins(model, rank, world_size, replicated=replicated)
        for step, trained in enumerate((False, True, False)):
            for side in _sides(twins):
                side.get_submodule("products").requires_grad_(trained)
                side.get_submodule("positions").requires_grad_(not trained)
            twins.step(_micros, step)
    assert len(seen) == 4
    last = dict(twins.reference.model.named_parameters())["positions.weight"].grad
    assert last is not None
    assert torch.equal(seen[-1], last)


def clipping(rank: int, world_size: int, name: str) -> None:
    """Every way to clip: the unsharded model's total, and its clipped gradients."""
    model, replicated, shards = _built(name)
    twins = Twins(model, rank, world_size, replicated=replicated)
    for step, (way, clip) in enumerate(WAYS.items()):
        twins.step(_micros, step)
        expected = torch.nn.utils.clip_grad_norm_(twins.reference.model.parameters(), 0.01, foreach=False)
        assert expected > 0.01, "nothing was clipped"
        torch.testing.assert_close(clip(twins.model, 0.01, 2.0), expected, msg=f"{way}: ".__add__)
        theirs = dict(twins.reference.model.named_parameters())
        for key, param in twins.model.named_parameters():
            grad = theirs[key].grad
            assert grad is not None
            if key in shards:
                grad = rows_of_shard(grad, rank, world_size, ALIGNMENT)
            torch.testing.assert_close(torch.as_tensor(param.grad), grad, rtol=2e-6, atol=1e-8, msg=key.__add__)


def gradient_penalty(rank: int, world_size: int) -> list[str]:
    """Second derivatives through replicated modules are the oracle's; those of their own gradients are refused."""

    def penalised(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        tokens, targets = batch(step, data_rank, device())
        x = model.embedding(tokens)
        out = torch.tanh(model.products(x))
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        yield loss_of(model.head(out), targets) + 0.1 * grad.square().mean()

    model, replicated, _ = _built("reads")
    twins = Twins(model, rank, world_size, replicated=replicated)
    for step in range(2):
        twins.step(penalised, step)
    answers = []
    x = torch.ones(2, WIDTH, device=device())
    weight = twins.model.get_submodule("products.up").weight
    attempts: list[Callable[[], Any]] = [
        lambda: torch.autograd.grad(twins.model.products(x).sum(), weight, create_graph=True),
        lambda: twins.model.products(x).square().sum().backward(create_graph=True),
    ]
    for attempt in attempts:
        try:
            attempt()
        except RuntimeError as error:
            answers.append(str(error))
    twins.step(_micros, 5)
    return answers


def ranks_that_differ(rank: int, world_size: int) -> dict[str, str]:
    """Ranks that leave other modules replicated, and ranks whose backward passes reach other replicated weights."""
    answers = {}
    torch.manual_seed(7)
    model = Tiny().to(device())
    try:
        etp.shard_module(model, dist.group.WORLD, replicated_modules=[model.blocks[rank]])
    except etp.PeerMismatchError as error:
        answers["choice"] = str(error)
    assert not _names_of_shards(model)
    if on_gpus():
        # Gradients of other sizes may keep the device busy for ever: tests/gpu/test_transports.py.
        return answers
    config = etp.EtpConfig(transport="c10d")
    etp.shard_module(model, dist.group.WORLD, config=config, replicated_modules=[model.blocks[1]])
    tokens, targets = batch(0, rank, device())
    try:
        for order in ([0, 1, 2], [0, 1, 2] if rank == 0 else [0, 2], [0, 1, 2]):
            loss_of(model(tokens, order=order), targets).backward()
    except etp.PeerMismatchError as error:
        answers["pass"] = str(error)
    return answers


class _FakeTE(nn.Module):
    """Looks like Transformer Engine's module of the same name, as far as sharding looks."""

    __module__ = "transformer_engine.pytorch.module.fake"

    def __init__(self, *weights: nn.Parameter) -> None:
        super().__init__()
        self.num_gemms = len(weights)
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", weight)


class GroupedLinear(_FakeTE):
    """Experts."""

    __module__ = "transformer_engine.pytorch.module.fake"


class LayerNormMLP(_FakeTE):
    """A feed-forward layer, with gradients that may be delayed."""

    __module__ = "transformer_engine.pytorch.module.fake"

    class _Store:
        def __init__(self, delays: bool) -> None:
            self._delays = delays

        def delay_wgrad_compute(self) -> bool:
            """Whether gradients come later."""
            return self._delays

    def __init__(self, *, delays: bool = False, fuses: bool = False) -> None:
        super().__init__(nn.Parameter(torch.ones(4, 4)))
        self.fuse_wgrad_accumulation = fuses
        self.wgrad_store = self._Store(delays)


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What is refused before anything is changed, by the name of the case."""
    alone = [dist.new_group([peer]) for peer in range(world_size)][rank]
    answers = {}
    with device():  # modules are created there
        cases = _cases(dist.group.WORLD)
    for case, (root, chosen) in cases.items():
        before = list(root.parameters())
        try:
            expert_group = alone if case == "experts" else None
            etp.shard_module(root, dist.group.WORLD, expert_group, replicated_modules=chosen)
        except (ValueError, TypeError) as error:
            answers[case] = f"{type(error).__name__}: {error}"
        assert all(one is other for one, other in zip(before, root.parameters(), strict=True)), case
    return answers


def _cases(group: Any) -> dict[str, tuple[nn.Module, Any]]:
    """A module to shard, and what is chosen to stay replicated."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 6)))
    holds_shard = nn.Sequential(nn.Sequential(etp.Linear(4, 5, etp_group=group)), nn.Linear(5, 6))
    weight = _weight()
    half = nn.ModuleDict({"experts": GroupedLinear(weight, _weight()), "one": nn.Linear(4, 4)})
    half["one"].weight = weight
    twice = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 4).requires_grad_(False))
    etp.shard_module(twice, group, replicated_modules=twice[1:])
    table = nn.ModuleDict({"table": nn.Embedding(8, 4, max_norm=1.0), "linear": nn.Linear(4, 4)})
    bag = nn.ModuleDict({"bag": nn.EmbeddingBag(8, 4, max_norm=1.0), "linear": nn.Linear(4, 4)})
    delayed = nn.ModuleDict({"mlp": LayerNormMLP(delays=True), "linear": nn.Linear(4, 4)})
    fused = nn.ModuleDict({"mlp": LayerNormMLP(fuses=True), "linear": nn.Linear(4, 4)})
    experts = nn.ModuleDict({"experts": GroupedLinear(_weight(), _weight()), "linear": nn.Linear(4, 4)})
    return {
        "name": (net, ["1.0"]),
        "parameter": (net, [net[0].weight]),
        "stranger": (net, [nn.Linear(7, 3, bias=False)]),
        "copy": (net, [copy.deepcopy(net)[1]]),
        "root": (net, [net]),
        "outside": (net[1], [net[0]]),
        "shard": (holds_shard, [holds_shard[0]]),
        "half": (half, [half["one"]]),
        "again": (twice, []),
        "again, frozen": (twice, [twice[1]]),
        "table": (table, [table["table"]]),
        "bag": (bag, []),
        "delayed": (delayed, [delayed["mlp"]]),
        "fused": (fused, [fused["mlp"]]),
        "experts": (experts, [experts["experts"]]),
    }


def allowed(rank: int, world_size: int) -> None:
    """Modules of TE that cannot be sharded, a choice that overlaps, and a second call for an adapter."""
    torch.manual_seed(3)
    group = dist.group.WORLD
    with device():
        net = nn.ModuleDict({"mlp": LayerNormMLP(), "experts": GroupedLinear(_weight(), _weight())})
        net["linear"] = nn.Linear(4, 4)
    etp.shard_module(net, group, replicated_modules=(net[name] for name in ("mlp", "experts", "experts")))
    assert _names_of_shards(net) == {"linear.weight"}

    model, replicated, shards = _built("reads")
    twins = Twins(model, rank, world_size, replicated=(*replicated, "products.up"))
    twins.step(_micros, 0)
    model.zero_grad()
    torch.manual_seed(9)
    adapter = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)).to(device())
    full = etp.full_state_dict(model)
    assert set(full) == set(twins.reference.model.state_dict())
    grown, plain = nn.Sequential(model, nn.Identity()), nn.Sequential(twins.reference.model, nn.Identity())
    for side, added in ((grown, adapter), (plain, copy.deepcopy(adapter))):
        side[0].norm = nn.Sequential(side[0].norm, added)
    runtime = etp.shard_module(grown, group, replicated_modules=[*(model.get_submodule(n) for n in replicated)])
    again = {"0.norm.1.0.weight", "0.norm.1.1.weight"} | {f"0.{name}" for name in shards}
    assert _names_of_shards(grown) == again
    twins.model, twins.reference.model, twins.runtime = grown, plain, runtime
    for step in range(2):
        twins.step(_micros, step)
    state = {name: torch.full_like(value, 0.01) for name, value in etp.full_state_dict(grown).items()}
    etp.load_full_state_dict(grown, state)
    assert all(torch.equal(value, state[name]) for name, value in etp.full_state_dict(grown).items())


def messages_name_the_option(rank: int, world_size: int) -> list[str]:
    """What the layers are answered that the option is for."""
    torch.manual_seed(7)
    models: list[nn.Module] = [ReadsWeights(), nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))]
    models += [nn.Sequential(LayerNormMLP()), nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))]
    answers = []
    for model in models:
        if isinstance(model, ReadsWeights):
            model.products = nn.Identity()
        try:
            etp.shard_module(model.to(device()), dist.group.WORLD)
            model(torch.ones(2, 3, dtype=torch.long, device=device()))
        except (ValueError, TypeError) as error:
            answers.append(str(error))
    linear = etp.Linear(4, 4, etp_group=dist.group.WORLD, device=device())
    x = torch.ones(2, 4, device=device(), requires_grad=True)
    try:
        torch.autograd.grad(F.relu(linear(x)).sum(), x, create_graph=True)
    except RuntimeError as error:
        answers.append(str(error))
    return answers


def complex_weights(rank: int, world_size: int) -> None:
    """A replicated layer of complex weights trains as the unsharded one."""

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, INNER)
            self.waves = nn.Linear(INNER, 5, dtype=torch.complex64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.waves(self.inner(x).to(torch.complex64)).abs()

    def scenario(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(50 * step + data_rank)
        yield model(torch.randn(6, WIDTH, generator=generator).to(device())).square().mean()

    torch.manual_seed(7)
    twins = Twins(Waves().to(device()), rank, world_size, replicated=("waves",))
    for step in range(2):
        twins.step(scenario, step)


def experts_of_each_rank(rank: int, world_size: int) -> None:
    """Every rank has experts of its own, biases included: neither compared with, nor combined over, other ranks."""
    alone = [dist.new_group([peer]) for peer in range(world_size)][rank]

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first = nn.Linear(WIDTH, 6)
            torch.manual_seed(10 + rank)
            self.experts = etp.GroupedLinear(2, 6, 5, etp_group=alone, device=device())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts(self.first(x), [2, 3])

    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device())
    model = Mixture().to(device())
    full = {name: value.requires_grad_() for name, value in etp.full_state_dict(model).items()}
    inner = F.linear(x, full["first.weight"], full["first.bias"])
    parts = [F.linear(inner[:2], full["experts.weight0"], full["experts.bias0"])]
    parts.append(F.linear(inner[2:], full["experts.weight1"], full["experts.bias1"]))
    torch.cat(parts).square().mean().backward()
    etp.shard_module(model, dist.group.WORLD, expert_group=alone)
    model(x).square().mean().backward()
    for name in ("experts.bias0", "experts.bias1"):
        assert torch.equal(model.get_parameter(name).grad, full[name].grad), name
