"""What vLLM needs on a CPU: weights stay in their parameters, and the workers' shared memory leaves nothing behind."""

from __future__ import annotations

import functools
import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("vLLM is not installed for CPUs", allow_module_level=True)

from vllm import _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.layers import utils

from megatron_patches.refit.vllm import patches

if not hasattr(torch.ops._C, "init_shm_manager"):
    pytest.skip("vLLM's kernels for CPUs without AVX-512 have no shared memory", allow_module_level=True)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, and one file of this test's own


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _as_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a plugin has changed before."""
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    for owner, name in ((_CPUSHMDistributed, "_init_cpu_shm"), (utils, "dispatch_cpu_unquantized_gemm")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(own, "__wrapped__", own))


def test_linear_layers_compute_with_their_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself vLLM packs it into memory that nobody else knows, with oneDNN or, where a CPU has AMX, without."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    layer: Any = torch.nn.Linear(64, 32, bias=True, dtype=torch.bfloat16)
    weight, pointer = layer.weight, layer.weight.data_ptr()
    patches.adapt_to_cpu()
    patches.adapt_to_cpu()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
            assert torch.equal(layer.cpu_linear(x, layer.weight, layer.bias), expected)
            layer.weight.copy_(torch.randn(32, 64))  # as a push does
    assert layer.weight is weight
    assert layer.weight.data_ptr() == pointer
    assert layer.bias.dtype is torch.bfloat16


def test_linear_layers_compute_with_their_parameter_though_another_plugin_came_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(own)
    def wrapped(layer: Any, remove_weight: bool) -> None:
        own(layer, remove_weight)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", wrapped)
    patches.adapt_to_cpu()
    layer: Any = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.cpu_linear is torch.nn.functional.linear


def test_weights_of_other_layers_are_vllms_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda *args: seen.append(args))
    patches.adapt_to_cpu()
    layer = torch.nn.Conv1d(4, 4, 3, groups=4)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert seen == [(layer, True)]


def test_a_port_of_an_earlier_engine_is_no_obstacle_and_nothing_is_left(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = uuid.uuid4().hex  # what an interrupted run has left is no obstacle either
    monkeypatch.setenv("VLLM_DIST_IDENT", port)
    left = SHARED_MEMORY / f"{port}-tp:0-[0]-cpushm_0"
    left.touch(exist_ok=False)
    try:
        with pytest.raises(RuntimeError, match=r"create shm in SHMManager failed\. errno: 17"):
            CpuCommunicator(group, torch.device("cpu"), group, "tp:0")
        patches.adapt_to_cpu()
        patches.adapt_to_cpu()  # as often as vLLM loads its plugins in one process
        for _ in range(2):
            assert CpuCommunicator(group, torch.device("cpu"), group, "tp:0").supports_tensor_dict
        assert list(SHARED_MEMORY.glob(f"{port}*")) == [left]
    finally:
        left.unlink()
