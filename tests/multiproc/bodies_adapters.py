"""Bodies of test_adapters.py: a small model with adapters of PEFT, sharded in several ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import etp
from megatron_patches.refit import AdapterPublisher, Fate
from megatron_patches.refit.errors import RefitError
from tests.multiproc.bodies_publish import OPTIONS, engine_of, gathered
from tests.support import plain_engine

RANK, ALPHA = 5, 12
"""Odd, so that rows of both factors divide unevenly."""


class Layer(nn.Module):
    """Two linears of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(11, 23)
        self.down = nn.Linear(23, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Config(dict[str, Any]):
    """As a configuration of transformers, as far as it matters here."""

    def to_json_string(self) -> str:
        return '{"model_type": "tiny"}'


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def adapted(**settings: Any) -> Any:
    """A model with random factors."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    usual = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["up", "down"], "init_lora_weights": False}
    return get_peft_model(Model(), LoraConfig(**usual | settings))


Sharding = Callable[[Any], None]


def plain(model: Any) -> None:
    """On every rank the same."""


def shards(model: Any) -> None:
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(pad_for_alignment=4))


def fsdp(model: Any) -> None:
    for layer in model.base_model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def train(model: Any, seed: int) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1, foreach=False)
    x = torch.randn(3, 11, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def expected(model: Any) -> dict[str, str]:
    """Digests of what PEFT would save of the whole model, and of the scales."""
    from peft import get_peft_model_state_dict
    from torch.distributed.tensor import DTensor

    state = etp.full_state_dict(model)
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=state)
    scales = {
        name.removesuffix("A.weight") + "scale": torch.tensor([ALPHA / RANK], dtype=torch.float64)
        for name in found
        if name.endswith("lora_A.weight")
    }
    return {
        name: plain_engine.digest(name, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, value in {**found, **scales}.items()
    }


def published(
    rank: int, world_size: int, sharding: Sharding, folder: str
) -> tuple[list[Any], list[Any], list[tuple[Fate, int]], list[str]]:
    """Trains and publishes two versions, and trains on before each has been committed.

    Returns:
        What the engine received of each and what the adapter was; what each report says; and the names it was given.
    """
    del world_size
    model = adapted()
    sharding(model)
    served, were, told = [], [], []
    engine = engine_of(rank, folder)
    with AdapterPublisher(model, "math", options=OPTIONS) as publisher:
        if engine is not None:
            publisher.attach(engine)
        for version in (3, 9):
            train(model, version)
            were.append((version, expected(model)))
            handle = publisher.publish(version)
            train(model, 100 + version)
            report = handle.result(30.0).engines["engine"]
            told.append((report.fate, report.nbytes))
            served.append(engine.run("content") if engine is not None else None)
            gathered(None)
        names = [] if engine is None else [name for name, _ in engine.added]
        assert publisher.name_of(9) == "math@9"
    return served, were, told, names


def refused_on_one_rank(rank: int, world_size: int, folder: str) -> tuple[str, Any]:
    """What is said if one rank has a scale that is no number; and what the engine serves afterwards."""
    del world_size
    model = adapted()
    shards(model)
    engine = engine_of(rank, folder)
    with AdapterPublisher(model, "math", options=OPTIONS) as publisher:
        if engine is not None:
            publisher.attach(engine)
        publisher.publish(1).result(30.0)
        layer = model.base_model.model.layers[1].down
        usual = layer.scaling["default"]
        layer.scaling["default"] = math.nan if rank == 1 else usual
        said = ""
        try:
            publisher.publish(2)
        except RefitError as error:
            said = str(error)
        layer.scaling["default"] = usual
        publisher.publish(3).result(30.0)
        return said, engine.run("content")[0] if engine is not None else None
