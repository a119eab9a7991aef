"""What a profile of a training step says of Python calls, of the GPU's work and of CUDA's calls."""

from __future__ import annotations

import cProfile
import threading
from typing import Any

import pytest

from benchmarks import train_profile
from benchmarks.train_profile import cuda_calls, gpu_work, in_one_line, python_calls
from etp.layout import ShardLayout
from tests.unit.test_benchmark_trace import GEMM, LOCAL, PEER, work


def call(name: str, milliseconds: float, category: str = "cuda_runtime") -> dict[str, Any]:
    """A call of CUDA that the host made."""
    return {"ph": "X", "cat": category, "name": name, "ts": 0.0, "dur": milliseconds * 1000}


def _hook() -> int:
    return sum((1, 2))


def _hooks(times: int) -> None:
    for _ in range(times):
        _hook()


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/home/torch/etp/etp/core/param.py", "etp"),
        ("/home/torch/etp/megatron_patches/seam.py", "megatron_patches"),
        ("/home/torch/etp/benchmarks/train_systems.py", "other"),
        ("/home/torch/etp/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py", "torch"),
        ("/home/torch/etp/.venv/lib/python3.12/site-packages/numpy/core/numeric.py", "other"),
        ("/opt/etp/lib/python3.12/site-packages/megatron/core/optimizer.py", "megatron"),
    ],
)
def test_folders_above_a_package_own_nothing(path: str, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_profile, "_ROOT", "/home/torch/etp", raising=False)
    assert train_profile._owner(path) == owner


def test_calls_of_all_threads_are_counted() -> None:
    """Autograd runs the hooks of CUDA tensors in a thread of its own, while the profiled one waits."""
    _hooks(1)
    with cProfile.Profile() as profile:
        _hooks(3)
        thread = threading.Thread(target=_hooks, args=(5,))
        thread.start()
        thread.join()
    found = python_calls(profile)
    (row,) = [row for row in found["by_calls"] if row["function"].endswith("(_hook)")]
    assert row["calls"] == 8
    assert 0 < row["own_ms"] <= row["total_ms"]
    assert found["builtin_calls"] >= 8
    assert found["calls"] == sum(found["by_owner"].values()) >= 8 + 2


def test_calls_are_counted_by_their_package() -> None:
    with cProfile.Profile() as profile:
        for _ in range(4):
            ShardLayout((8, 3), 2)
    found = python_calls(profile)
    assert found["by_owner"]["etp"] >= 4
    assert found["by_own_ms"][0]["own_ms"] >= found["by_own_ms"][-1]["own_ms"]
    assert any(row["function"].startswith("etp/layout.py:") for row in found["by_calls"])


def test_the_gpus_work_is_summed_by_name_and_kind() -> None:
    memset = work("Memset (Device)", 7, 8, 9) | {"cat": "gpu_memset"}
    trace = [work(GEMM, 7, 0, 4), work(GEMM, 7, 6, 8), memset, work(PEER, 8, 1, 2), work(LOCAL, 7, 4, 5)]
    found = gpu_work([*trace, call("cudaLaunchKernel", 1.0)])
    assert (found["kernels"], found["copies"], found["sets"]) == (2, 2, 1)
    assert (found["busy_ms"], found["span_ms"], found["idle_ms"]) == (8.0, 9.0, 1.0)
    assert found["by_name"][0] == {"name": GEMM, "count": 2, "ms": 6.0}
    assert {row["name"]: row["count"] for row in found["by_kind"]}["GEMMs"] == 2


def test_a_trace_without_work_of_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="0 GPU activities"):
        gpu_work([call("cudaLaunchKernel", 1.0)])


def test_calls_of_cuda_are_summed_the_longest_first() -> None:
    calls = [call("cudaLaunchKernel", 0.5), call("cuMemcpyAsync", 0.25, "cuda_driver"), call("cudaLaunchKernel", 0.5)]
    wait = call("cudaStreamSynchronize", 30.0)
    assert cuda_calls([*calls, wait, work(GEMM, 7, 0, 4)]) == [
        {"name": "cudaStreamSynchronize", "count": 1, "ms": 30.0},
        {"name": "cudaLaunchKernel", "count": 2, "ms": 1.0},
        {"name": "cuMemcpyAsync", "count": 1, "ms": 0.25},
    ]


def test_a_profile_fits_in_one_line() -> None:
    python = {"calls": 7, "by_owner": {"etp": 5, "torch": 2}}
    gpu = gpu_work([work(GEMM, 7, 0, 4), work(PEER, 8, 3, 6)])
    line = in_one_line("etp_c10d", {"host_ms": 3.26, "step_ms": 9.0, "python": python, "gpu": gpu})
    assert line == (
        "etp_c10d: a step takes 9.0 ms, the host 3.3, the GPU is busy for 6.0; 7 calls of Python functions (etp 5, "
        "torch 2); 1 kernels, 1 copies, 0 sets"
    )
