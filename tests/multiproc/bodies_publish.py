"""Bodies of test_publish.py: small models of odd sizes, sharded in several ways, that are trained and published."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import etp
from etp.formats import quantize_blocks
from megatron_patches.refit import Fate, OnEngineFailure, RefitOptions, WeightPublisher
from megatron_patches.refit.control.messages import Standing
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.weight_format import WeightFormat, quantized_weights, scales_of
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.source.modules import ModuleSource, describe_tensor
from megatron_patches.refit.trainer.session import RefitSession
from tests.support import plain_engine
from tests.support.plain_engine import PlainEngine

NAMES = [
    "steps",
    "scale",
    "embed.weight",
    "layers.0.norm.weight",
    "layers.0.norm.bias",
    "layers.0.up.weight",
    "layers.0.up.bias",
    "layers.0.down.weight",
    "layers.1.norm.weight",
    "layers.1.norm.bias",
    "layers.1.up.weight",
    "layers.1.up.bias",
    "layers.1.down.weight",
]
"""In ``state_dict()``, but for the head, which is the embedding."""


class Layer(nn.Module):
    """A norm and two linears; rows and columns divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(11)
        self.up = nn.Linear(11, 23)
        self.down = nn.Linear(23, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied embeddings, a buffer of one number, one of float64, and one that no checkpoint has."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 11)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(11, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.register_buffer("frequencies", torch.randn(5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain(model: nn.Module, world_size: int) -> nn.Module:
    return model


def ddp(model: nn.Module, world_size: int) -> nn.Module:
    return DistributedDataParallel(model)


def shards(model: nn.Module, world_size: int) -> nn.Module:
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=4))
    return model


def fsdp(model: nn.Module, world_size: int) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def hsdp(model: nn.Module, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def columns(model: nn.Module, world_size: int) -> nn.Module:
    """FSDP2 that cuts the columns of matrices."""
    options: Any = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}
    even = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    fully_shard(even, **options)
    return even


Sharding = Callable[[nn.Module, int], nn.Module]
CONFIG = {"model_type": "tiny"}


def build(sharding: Sharding, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    return sharding(Model(), world_size)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    """A step, after a look at the model that leaves FSDP2's gathered weights behind, and before another."""
    tokens = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(version))
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    inner = getattr(model, "module", model)
    if hasattr(inner, "steps"):
        inner.steps += 1
        inner.scale.mul_(1.1)
    with torch.no_grad():
        model(tokens)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model's state, by means of its own: what any checkpoint would hold."""
    state = etp.full_state_dict(getattr(model, "module", model))
    state.pop("head.weight", None)  # tied
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def digests(model: nn.Module) -> dict[str, str]:
    """Of the whole model, as the engine tells its own."""
    return {
        name: plain_engine.digest(name, value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, value in whole(model).items()
    }


def described(rank: int, world_size: int, sharding: Sharding) -> tuple[dict[str, list[str]], list[str]]:
    """The boxes that this rank describes, each compared with the same part of the whole model; and all names."""
    model = build(sharding, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    train(model, optimizer, 1)
    source = ModuleSource(model, CONFIG)
    held = source.describe(rank)
    memory = source.look_up()
    full = whole(model)
    assert held.config == CONFIG
    assert {name: tuple(value.shape) for name, value in full.items()} == held.shapes
    found: dict[str, list[str]] = {}
    for placement in held.manifest.placements:
        box, storage = placement.box, held.manifest.storage[placement.view.storage]
        flat = memory[storage.name]
        assert (flat.numel(), storage.dtype) == (storage.numel, str(full[box.tensor].dtype).removeprefix("torch."))
        assert storage.logical_numel == box.volume
        part = full[box.tensor][tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]
        assert torch.equal(placement.view.tensor(flat), part), str(box)
        found.setdefault(box.tensor, []).append(str(box).removeprefix(box.tensor))
    return found, list(held.shapes)


def fsdp_over_tp(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A weight whose rows tensor parallelism has cut, and then FSDP2."""
    linear: Any = nn.Linear(7, 5, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(full, mesh["inner"], [Shard(0)]))
    fully_shard(linear, mesh=mesh["outer"])
    return linear.weight


def blocks_of_a_grid(rank: int, world_size: int) -> list[str]:
    """The block of a matrix that this rank describes, for each way to spread it over 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    full = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    found = []
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Replicate()], None):
        spread = distribute_tensor(full, mesh, placements) if placements is not None else fsdp_over_tp(full, mesh)
        block = describe_tensor("w", spread)
        box = block.placement.box
        part = full[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]
        assert torch.equal(spread.to_local(), part)
        assert (block.shape, block.held_shape) == ((5, 7), tuple(part.shape))
        found.append(str(box))
    return found


def engine_of(rank: int, folder: str, name: str = "engine") -> PlainEngine | None:
    """On the first rank, an engine process that the test has started."""
    return None if rank else PlainEngine(name, str(Path(folder) / f"{name}.sock"), 30.0)


def gathered(value: Any) -> list[Any]:
    """``value`` of each rank, once all are here."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


OPTIONS = RefitOptions(timeout_s=30.0, staging_bytes=1 << 14, on_engine_failure=OnEngineFailure.DROP)


def published(
    rank: int, world_size: int, sharding: Sharding, folder: str
) -> tuple[list[tuple[int, dict[str, str]]], list[tuple[int, dict[str, str]]], list[tuple[Fate, int]]]:
    """Trains and publishes three versions, and trains on before each has been committed.

    Returns:
        What the engine served after each and what the model was; and what each report says.
    """
    model = build(sharding, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    served, were, told = [], [], []
    handles, reports = [], []
    engine = engine_of(rank, folder)
    with WeightPublisher(model, config=CONFIG, options=OPTIONS) as publisher:
        if engine is not None:
            publisher.attach(engine)
        for version in (3, 4, 9):
            train(model, optimizer, version)
            were.append((version, digests(model)))
            handle = publisher.publish(version)
            train(model, optimizer, 100 + version)  # the weights may change at once
            report = handle.result(30.0)
            assert (handle.version, handle.done()) == (version, True)
            handles.append(handle)
            reports.append(report)
            told.append((report.engines["engine"].fate, report.engines["engine"].nbytes))
            served.append(engine.run("content") if engine is not None else (version, {}))
            gathered(None)
        assert [handle.result(0.0) for handle in handles] == reports  # later versions change nothing
    return served, were, told


def in_blocks(model: nn.Module, *, power_of_two: bool) -> dict[str, str]:
    """Digests of the whole model in block FP8, by a quantizer of whole weights."""
    found = {}
    state = whole(model)
    quantized = quantized_weights({name: tuple(value.shape) for name, value in state.items()})
    for name in quantized:
        state[name], state[scales_of(name)] = quantize_blocks(state[name], power_of_two=power_of_two)
    for name, value in state.items():
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = plain_engine.digest(name, content)
    return found


def quantized(
    rank: int, world_size: int, sharding: Sharding, folder: str
) -> tuple[list[tuple[int, dict[str, str]]], list[tuple[int, dict[str, str]]], list[str]]:
    """Publishes in each quantized format, as each payload: a version, one with a NaN on a rank, and the next.

    Returns:
        What the engine served after each, what it should serve, and why versions were refused.
    """
    served, should, said = [], [], []
    version = 0
    engine = engine_of(rank, folder)
    formats = (one for one in WeightFormat if one.is_quantized)
    for payload, weight_format in product(PayloadKind, formats):
        model = build(sharding, world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        options = replace(
            OPTIONS, on_engine_failure=OnEngineFailure.RAISE, payload=payload, weight_format=weight_format
        )
        good = (0, dict[str, str]())
        with WeightPublisher(model, config=CONFIG, options=options) as publisher:
            if engine is not None:
                publisher.attach(engine)
            for harmed in (False, True, False):
                version += 1
                train(model, optimizer, version)
                state = {name: value.detach().clone() for name, value in model.state_dict().items()}
                if harmed:
                    spoil(model, rank, world_size)
                else:
                    good = version, in_blocks(model, power_of_two=weight_format.has_powers_of_two)
                try:
                    publisher.publish(version).result(30.0)
                except RefitError as error:
                    said.append(str(error))
                model.load_state_dict(state)
                should.append(good)
                served.append(engine.run("content") if engine is not None else good)
                gathered(None)
    return served, should, said


def spoil(model: nn.Module, rank: int, world_size: int) -> None:
    """Makes one number of a weight no number, on its last rank; on each, if all hold it."""
    param = model.get_parameter("layers.0.down.weight")
    local = param.to_local().detach() if isinstance(param, DTensor) else param.data
    if rank == world_size - 1 or local.shape == (11, 23):
        local.view(-1)[3] = float("nan")


def two_trainers(rank: int, world_size: int, folder: str) -> tuple[list[str], list[int]]:
    """Each rank is a trainer of its own, and both push into one engine in turn: the second trainer comes in between.

    Returns:
        Why this rank's pushes failed, and what the engine served after each turn, on the first rank.
    """
    own = [dist.new_group([one]) for one in range(world_size)][rank]
    options = RefitOptions(timeout_s=30.0, staging_bytes=1 << 14)
    said, served = list[str](), list[int]()
    engine = engine_of(rank, folder)
    gathered(None)
    client = PlainEngine("rollout 0", str(Path(folder) / "engine.sock"), 30.0)
    with contextlib.closing(
        RefitSession(nn.Linear(5, 3), [client], config=CONFIG, group=own, options=options)
    ) as session:
        for version, (trainer, joins) in enumerate([(0, True), (1, True), (0, False), (1, False), (0, True)], 1):
            if trainer == rank:
                try:
                    if joins:
                        session.prepare()
                    session.push(version, wait=True)
                except RefitError as error:
                    said.append(str(error))
            gathered(None)
            if engine is not None:
                served.append(engine.run("content")[0])
            gathered(None)
    return said, served


def refused(rank: int, world_size: int, folder: str, known: str, dtype: str) -> tuple[list[str], Any, Any]:
    """An engine that has other tensors is attached first, and then, by the side of one that serves.

    Returns:
        What was said of it, and what the serving engine and it served at last.
    """
    model = build(fsdp, world_size)
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in whole(model).items()}
    dtypes = {name: dtype if name == known else of for name, of in dtypes.items() if (name, dtype) != (known, "")}
    said = []
    good, bad = engine_of(rank, folder), engine_of(rank, folder, "another")
    with WeightPublisher(model, config=CONFIG, options=OPTIONS) as publisher:
        if good is not None and bad is not None:
            bad.run("know", dtypes)
            publisher.attach(bad)
        try:
            publisher.publish(1)
        except RefitError as error:
            said.append(str(error))
        if good is not None:
            publisher.detach("another")
            publisher.attach(good)
        publisher.publish(2)
        if bad is not None:
            publisher.attach(bad)
        version, report = 3, publisher.publish(3).result(30.0)
        while gathered("another" not in report.engines or report.engines["another"].fate is Fate.JOINING)[0]:
            version += 1
            report = publisher.publish(version).result(30.0)
        said.append(str(report.engines["another"].reason))
        assert report.engines["another"].fate is Fate.FAILED
        assert report.engines["engine"].fate is Fate.SERVES
        gathered(None)
        content = good.run("content") if good is not None else None
        other = bad.run("content") if bad is not None else None
    return said, (content, (version, digests(model))), other


def undescribed(rank: int, world_size: int, folder: str) -> list[str]:
    """The last rank has no memory for a weight. Why publishing fails, with and without an engine."""
    model, said = Model(), []
    if rank == world_size - 1:
        model.layers[1].up.to("meta")
    engine = engine_of(rank, folder)
    with WeightPublisher(model, config=CONFIG, options=OPTIONS) as publisher:
        for _ in range(2):
            try:
                publisher.publish(1)
            except RefitError as error:
                said.append(str(error))
            if engine is not None and len(said) == 1:
                publisher.attach(engine)
    return said


def come_and_gone(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, Fate]], Any, list[str]]:
    """Nobody is there at first; an engine comes, and goes before the last version."""
    model = build(fsdp, world_size)
    fates, states = list[dict[str, Fate]](), list[dict[str, Standing]]()

    def publish(version: int) -> dict[str, Fate]:
        found = publisher.publish(version).result(30.0)
        fates.append({name: one.fate for name, one in found.engines.items()})
        return fates[-1]

    engine = engine_of(rank, folder)
    with WeightPublisher(model, config=CONFIG, options=OPTIONS) as publisher:
        publish(1)
        if engine is not None:
            publisher.attach(engine)
        version = 2
        while Fate.SERVES not in publish(version).values():
            version += 1
        states.append(dict(publisher.state()))
        if engine is not None:
            publisher.detach("engine")
        publish(version + 1)
        gathered(None)
        content = engine.run("content")[0] - version if engine is not None else 0
    said = []
    for wrong in (lambda: publisher.publish(version + 2), lambda: publisher.detach("engine")):
        try:
            wrong()
        except (RefitError, ValueError) as error:
            said.append(str(error))
    return fates, (content, {name: one.state.value for name, one in states[0].items()}), said
