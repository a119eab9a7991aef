"""What a vLLM worker would send to other engines: only what still has the form in which it arrived."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_patches.refit.control.messages import Model
from megatron_patches.refit.errors import UnsupportedEngineError
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp, Rule
from megatron_patches.refit.layout.manifest import Manifest, Storage

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.device_allocator.cumem import CuMemAllocator

from megatron_patches.refit.vllm import relaying
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.relaying import Relays
from megatron_patches.refit.vllm.worker_session import ServingModel

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
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, world_size_across_dp=1, rank=0)
    config = cast(Any, SimpleNamespace(additional_config={}, parallel_config=parallel))
    serving = ServingModel(torch.nn.Identity(), config, torch.device("cpu"))
    return Relays(Model({}, ()), manifest, layers, serving)


def memory(*storages: Storage, **tensors: torch.Tensor) -> Any:
    return relays(*storages, **tensors)._memory()


def test_weights_are_read_where_they_serve() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    found = memory(PLAIN, w=weight)
    weight[1] = 4.0
    assert found["w"].tolist() == weight.tolist()


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
    rule = Rule("A", (ElementOp(CONVERT, "float32"),))
    with pytest.raises(UnsupportedEngineError, match="it keeps A as float32, computed from the bfloat16"):
        memory(PLAIN, Storage("A@bfloat16", "bfloat16", 3, 3, rule), w=torch.zeros(3, dtype=torch.bfloat16))


def test_an_engine_that_may_sleep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", object())
    with pytest.raises(UnsupportedEngineError, match="without --enable-sleep-mode"):
        memory(PLAIN, w=torch.zeros(3, dtype=torch.bfloat16))


class Relay:
    """Sends until it may end, or is stopped."""

    made: list[Relay]

    def __init__(self, *_: object) -> None:
        self.sent, self.goes_on, self.has_left = list[int](), False, False
        self.may_end = threading.Event()
        self.made.append(self)

    def run(self, version: int, _: object) -> None:
        self.may_end.wait(10.0)
        self.sent.append(version)
        self.goes_on = not self.has_left

    def leave(self) -> None:
        self.has_left, self.goes_on = True, False
        self.may_end.set()

    def stop(self) -> bool:
        self.leave()
        return True


def test_a_meeting_goes_on_until_it_is_stopped_in_the_middle_or_the_session_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Relay.made = list[Relay]()
    monkeypatch.setattr(relaying, "Relay", Relay)
    under_test = relays(PLAIN, w=torch.zeros(3, dtype=torch.bfloat16))

    def start(key: str, version: int) -> None:
        place: dict[str, Any] = {"host": "a", "port": 1, "token": "0" * 64, "timeout_s": 1.0, "sources": 2, "first": 1}
        under_test.start(RefitCall(call="relay", key=key * 64, version=version, **place), version, ())

    start("1", 7)
    start("2", 7)
    made[0].may_end.set()
    under_test._relays["1" * 64][1].finish(10.0)
    under_test.stop(10.0)  # what is between two versions goes on
    assert [(relay.sent, relay.has_left) for relay in made] == [([7], False), ([7], True)]
    start("1", 8)
    start("2", 8)  # that meeting has ended, so this is another one of that key
    made[2].may_end.set()
    for _, thread in under_test._relays.values():
        thread.finish(10.0)
    assert [relay.sent for relay in made] == [[7, 8], [7], [8]]
    under_test.leave(10.0)
    assert all(relay.has_left for relay in made)
