"""What attention derives from other layers' weights follows them at a commit, and is back after one that failed.

Captured graphs refer to the derived tensors too, so they must stay in their memory. vLLM has no backend for
multi-latent attention on CPUs; its processing of weights needs none, and is run here as it is.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_patches.refit.control import messages
from megatron_patches.refit.control.messages import State, StateLog
from megatron_patches.refit.errors import LostWeightsError, TransferError
from megatron_patches.refit.layout.manifest import Manifest, Storage

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.v1.attention.backend import AttentionImplBase

from megatron_patches.refit.vllm import all_or_none
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.relaying import Relays
from megatron_patches.refit.vllm.version_memory import InPlace
from megatron_patches.refit.vllm.worker_session import ServingModel, WorkerLayout, WorkerSession

HEADS, NOPE, VALUE, RANK = 3, 4, 5, 6
WEIGHT = "kv_b_proj.weight"
CPU = torch.device("cpu")


class BrokenError(RuntimeError):
    """What a layer of these tests raises when it cannot derive."""


class Scales(nn.Module):
    """Attention without a backend: what vLLM's classes set when their weights are processed."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.quant_config, self.layer_name, self.kv_cache_dtype = None, "", "auto"
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            self.register_buffer(name, torch.tensor(1.0))


class Absorbing(Scales, MLAAttention):
    """vLLM's own multi-latent attention, which keeps the halves of ``kv_b_proj`` as matrices of each head."""

    def __init__(self, kv_b_proj: nn.Linear) -> None:
        Scales.__init__(self)
        self.kv_b_proj = kv_b_proj
        self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim = HEADS, RANK, NOPE, VALUE
        self.is_aiter_triton_fp4_bmm_enabled = self.is_aiter_triton_fp8_bmm_enabled = False
        # Of vLLM 0.32.0.
        self.impl = SimpleNamespace(process_weights_after_loading=lambda _: None)
        self.is_amx_bmm_enabled, self.dcp_q_replicate = False, None

    def derived(self) -> list[torch.Tensor]:
        """What it derives."""
        return [cast(torch.Tensor, matrix).data for matrix in (self.W_UK_T, self.W_UV)]


class Widening(AttentionImplBase[Any]):
    """A backend that keeps a weight in another type, as FlashInfer does with its sinks."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source, self.wide = source, torch.empty(0)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        del act_dtype
        if self.wide.numel():
            self.wide.copy_(self.source)
        else:
            self.wide = self.source.detach().to(torch.float64)


class WithBackend(Scales, Attention):
    """vLLM's attention, whose backend derives something."""

    def __init__(self, source: torch.Tensor) -> None:
        Scales.__init__(self)
        self.impl = Widening(source)

    def derived(self) -> list[torch.Tensor]:
        """What it derives."""
        return [self.impl.wide]


class Failing(Scales, MLAAttention):
    """Attention that cannot derive anything while it is told not to."""

    def __init__(self) -> None:
        Scales.__init__(self)
        self.refuses = 0

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        del act_dtype
        if self.refuses:
            self.refuses -= 1
            raise BrokenError("no kernel for this weight")


class Model(nn.Module):
    """One projection, and attention layers that derive from its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False).to(weight.dtype).requires_grad_(False)
        cast(Any, self.kv_b_proj).quant_method = None
        self.kv_b_proj.weight.copy_(weight)
        self.absorbing, self.backend = Absorbing(self.kv_b_proj), WithBackend(self.kv_b_proj.weight)
        self.last = Failing()  # the others have followed when it fails

    def derived(self) -> list[torch.Tensor]:
        """What all of them derive."""
        return [*self.absorbing.derived(), *self.backend.derived()]


class Party:
    """A trainer whose weights arrive as they are."""

    def __init__(self) -> None:
        self.weight, self.beside_bytes, self.verified = torch.empty(0), -1, ()

    def receive(
        self,
        version: int,
        step: int,
        linked: bool,
        make_memory: Callable[[], Any],
        meanwhile: Callable[[], None] | None,
        base: Callable[[], Any],
    ) -> None:
        del version, step, linked, base
        memory: dict[str, torch.Tensor] = make_memory()
        memory[WEIGHT].copy_(self.weight.flatten())
        if meanwhile is not None:
            meanwhile()

    def post_commit(self, version: int, reason: str | None) -> None:
        """Nobody waits for it."""

    def leave(self) -> None:
        """Nobody stays."""

    close = leave


class Worker:
    """A worker that serves a model in which attention derives, and gets versions.

    Args:
        dtype: of the weights, other than the activations' where what is derived shall have memory of its own.
        in_place: whether versions arrive in the memory that serves.
    """

    def __init__(self, dtype: torch.dtype, *, in_place: bool) -> None:
        self.serving = random_weight(dtype, 0)
        self.model = Model(self.serving)
        record_metadata_for_reloading(self.model)
        for layer in (self.model.absorbing, self.model.backend):
            cast(Any, layer).process_weights_after_loading(torch.bfloat16)
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        layers = Layers(self.model)
        storages = (Storage(WEIGHT, str(dtype).removeprefix("torch."), self.serving.numel(), self.serving.numel()),)
        serving = InPlace(layers, storages, CPU) if in_place else None
        self.party = Party()
        model = ServingModel(self.model, config, CPU)
        relays = Relays(messages.Model({}, ()), Manifest(0, "here", storages, ()), layers, model)
        log = StateLog("a trainer", logging.DEBUG)
        log.enter(State.READY)
        self.session = WorkerSession(
            cast(Any, self.party),
            model,
            WorkerLayout(Manifest(0, "here", storages, ()), (), layers, serving, relays),
            version=0,
            may_go_on=not in_place,
            timeout_s=30.0,
            log=log,
        )
        self.captured = self.model.derived()  # as a graph has it: these tensors' memory, whatever the layers have later

    def push(self, version: int) -> None:
        """Receives a version and commits it."""
        self.party.weight = random_weight(self.serving.dtype, version)
        self.session.receive(version, 0, True)
        self.session.commit(version)

    def check(self, version: int) -> None:
        """Whether weight and derived tensors are a version's, bit for bit, and in the memory that graphs refer to."""
        weight = random_weight(self.serving.dtype, version)
        assert np.array_equal(bits_of(self.model.kv_b_proj.weight), bits_of(weight))
        wanted = expected(weight)
        for captured, current, new in zip(self.captured, self.model.derived(), wanted, strict=True):
            assert np.array_equal(bits_of(captured), bits_of(new))
            assert (current.data_ptr(), current.stride()) == (captured.data_ptr(), captured.stride())


def random_weight(dtype: torch.dtype, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(version)
    return torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator).to(dtype)


def expected(weight: torch.Tensor) -> list[torch.Tensor]:
    """What the layers must have derived from a weight, element by element."""
    by_head = weight.to(torch.bfloat16).view(HEADS, NOPE + VALUE, RANK)
    return [by_head[:, :NOPE], by_head[:, NOPE:].transpose(1, 2), weight.to(torch.float64)]


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    unsigned = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(unsigned).numpy().copy()


@pytest.fixture(autouse=True)
def votes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answers of the engine's other worker, in turn; 1 once there are none."""
    answers: list[int] = []

    def all_reduce(own: torch.Tensor, **_: object) -> object:
        own.clamp_(max=answers.pop(0) if answers else 1)
        return SimpleNamespace(wait=lambda _: None)

    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return answers


# Where weights have the activations' type, what vLLM derives are views of them; elsewhere it has memory of its own.
every_way = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["own_memory", "views"])
both_ways = pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in_place"])


@both_ways
@every_way
def test_what_attention_derives_follows_every_commit(dtype: torch.dtype, in_place: bool) -> None:
    worker = Worker(dtype, in_place=in_place)
    worker.check(0)
    for version in (1, 2):
        worker.push(version)
        worker.check(version)


@both_ways
@every_way
def test_what_attention_derived_is_back_when_another_worker_fails(
    dtype: torch.dtype, in_place: bool, votes: list[int]
) -> None:
    worker = Worker(dtype, in_place=in_place)
    worker.push(1)
    votes += [1, 0]  # it has received the version, and then fails to put it in place
    with pytest.raises(TransferError, match=r"version 2 was not taken.*; version 1 serves on"):
        worker.push(2)
    worker.check(1)
    worker.push(3)
    worker.check(3)


@both_ways
@every_way
def test_what_attention_derived_is_back_when_another_layer_cannot_derive(dtype: torch.dtype, in_place: bool) -> None:
    worker = Worker(dtype, in_place=in_place)
    worker.push(1)
    worker.model.last.refuses = 1
    with pytest.raises(TransferError, match="version 2 was not taken") as raised:
        worker.push(2)
    assert isinstance(raised.value.__cause__, BrokenError)
    worker.check(1)
    worker.push(3)
    worker.check(3)


def test_weights_are_lost_where_what_attention_derived_cannot_come_back() -> None:
    """A model whose weights are one version's and whose attention is another's must not serve."""
    worker = Worker(torch.float32, in_place=False)
    worker.model.last.refuses = 2
    with pytest.raises(LostWeightsError, match="no kernel for this weight"):
        worker.push(1)
    with pytest.raises(LostWeightsError, match="no kernel for this weight"):
        worker.push(2)


def test_in_place_what_attention_derived_is_put_back_at_the_next_call() -> None:
    worker = Worker(torch.float32, in_place=True)
    worker.push(1)
    worker.model.last.refuses = 3  # at the commit, and at two ways back
    with pytest.raises(LostWeightsError, match="cannot be put back: no kernel for this weight"):
        worker.push(2)
    with pytest.raises(LostWeightsError, match="cannot be put back: no kernel for this weight"):
        worker.session.abandon()
    worker.session.abandon()
    worker.check(1)
    worker.push(3)
    worker.check(3)
