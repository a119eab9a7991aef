"""What vLLM needs on a CPU: the name of its workers' shared memory is used once, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path

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

from megatron_patches.refit.vllm import cpu

if not hasattr(torch.ops._C, "init_shm_manager"):
    pytest.skip("vLLM's kernels for CPUs without AVX-512 have no shared memory", allow_module_level=True)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, and one file of this test's own


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_port_of_an_earlier_engine_is_no_obstacle_and_nothing_is_left(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_custom_ops, "_supports_onednn", _custom_ops._supports_onednn)
    own = _CPUSHMDistributed._init_cpu_shm
    monkeypatch.setattr(_CPUSHMDistributed, "_init_cpu_shm", getattr(own, "__wrapped__", own))
    port = uuid.uuid4().hex  # what an interrupted run has left is no obstacle either
    monkeypatch.setenv("VLLM_DIST_IDENT", port)
    left = SHARED_MEMORY / f"{port}-tp:0-[0]-cpushm_0"
    left.touch(exist_ok=False)
    try:
        with pytest.raises(RuntimeError, match=r"create shm in SHMManager failed\. errno: 17"):
            CpuCommunicator(group, torch.device("cpu"), group, "tp:0")
        cpu.apply()
        cpu.apply()  # as often as vLLM loads its plugins in one process
        for _ in range(2):
            assert CpuCommunicator(group, torch.device("cpu"), group, "tp:0").supports_tensor_dict
        assert list(SHARED_MEMORY.glob(f"{port}*")) == [left]
    finally:
        left.unlink()
