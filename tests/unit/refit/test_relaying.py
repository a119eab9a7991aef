"""What a vLLM worker would send to other engines: only what still has the form in which it arrived."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any, cast

import pytest
import torch

from megatron_patches.refit.conversion import CONVERT, Rule, Step
from megatron_patches.refit.errors import UnsupportedEngineError
from megatron_patches.refit.manifest import Manifest, Storage
from megatron_patches.refit.parties.messages import Model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.device_allocator.cumem import CuMemAllocator

from megatron_patches.refit.vllm.relaying import Relays

PLAIN = Storage("w", "bfloat16", 3, 3)


class Layers:
    """Weights in loader form."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def readable(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._tensors.items() if name in names}


def relays(*storages: Storage, **tensors: torch.Tensor) -> Relays:
    manifest = Manifest(0, "here", storages, ())
    layers = cast(Any, Layers(**tensors))
    return Relays(Model({}, ()), manifest, layers, torch.device("cpu"), worker=0, name="worker 0")


def memory(*storages: Storage, **tensors: torch.Tensor) -> Any:
    return relays(*storages, **tensors)._memory()


def test_weights_are_read_where_they_serve() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    found = memory(PLAIN, w=weight)
    weight[1] = 4.0
    assert found["w"].tolist() == weight.view(torch.uint16).tolist()


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "vLLM has changed the form of w after loading"),
        ({"w": torch.zeros(4, dtype=torch.bfloat16)}, "vLLM has changed the form of w after loading"),
        ({"w": torch.zeros(3)}, "vLLM has changed the form of w after loading"),
    ],
)
def test_a_weight_of_another_form_is_refused(tensors: dict[str, torch.Tensor], told: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=told):
        memory(PLAIN, **tensors)


def test_what_would_be_refused_is_known_beforehand() -> None:
    assert not relays(PLAIN, w=torch.zeros(3, dtype=torch.bfloat16)).refusal
    assert relays(PLAIN).refusal.endswith("vLLM has changed the form of w after loading")


def test_a_converted_weight_is_refused() -> None:
    rule = Rule("A", (Step(CONVERT, "float32"),))
    with pytest.raises(UnsupportedEngineError, match="it keeps A as float32, computed from the bfloat16"):
        memory(PLAIN, Storage("A@bfloat16", "bfloat16", 3, 3, rule), w=torch.zeros(3, dtype=torch.bfloat16))


def test_an_engine_that_may_sleep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", object())
    with pytest.raises(UnsupportedEngineError, match="without --enable-sleep-mode"):
        memory(PLAIN, w=torch.zeros(3, dtype=torch.bfloat16))
