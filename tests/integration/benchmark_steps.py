"""Bodies that build the training benchmark's systems on CPUs and look at what their steps leave."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_patches
from tests.unit.test_benchmark_trace import work


def gradients_of_steps(
    rank: int, world_size: int, names: tuple[str, ...], shape: str = "test"
) -> dict[str, dict[str, Any]]:
    """Loss, and the sum of squares of all gradients over all ranks, after one step and after another, by system."""
    megatron_patches.apply()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs

    from benchmarks.train_shapes import SHAPES
    from benchmarks.train_systems import BuildOptions, build

    # There is no Transformer Engine on a CPU; the benchmark looks this up when it builds a model.
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = _local_spec
    systems = {name: build(name, SHAPES[shape], BuildOptions()) for name in names}
    found: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        system.activate()
        squares = []
        for _ in range(2):
            system.step(2)
            squares.append(_squares(name, system.model))
        found[name] = {"loss": float(system.loss), "squares": squares, "ranks": system.tensor_ranks}
    parallel_state.destroy_model_parallel()
    return found


def _local_spec(**options: Any) -> Any:
    """Megatron's own layers, which have experts one by one, not grouped."""
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_local_spec(**options | {"moe_grouped_gemm": False})


def _squares(name: str, model: Any) -> float:
    """Every element of the gradient counts once, though norms' scales are on all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    if name == "dp":
        for bucket in (bucket for group in model.bucket_groups for bucket in group.buckets):
            # After the reduction each rank has the sum in its own part only.
            total += bucket.grad_data.chunk(dist.get_world_size())[dist.get_rank()].double().square().sum()
    else:
        for param in model.parameters():
            cut = hasattr(param, "driver") or getattr(param, "tensor_model_parallel", False)
            copies = 1 if cut else dist.get_world_size()
            total += param.main_grad.double().square().sum() / copies
    dist.all_reduce(total)
    return float(total)


def report_of_run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the benchmark's whole run reports, with stand-ins for the GPU's clock, allocator and traces."""
    megatron_patches.apply()
    from megatron.core.models.gpt import gpt_layer_specs

    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = _local_spec
    with contextlib.ExitStack() as stack:
        _stand_in_for_a_gpu(stack)
        from benchmarks.train_measure import Run, RunOptions

        run = Run(
            RunOptions(
                systems=("none", "ep", "none_graph", "etp_c10d", "etp_c10d_ep2"),
                shape="test-moe",
                layers=1,
                experts=4,
                microbatches=(1,),
                rounds=2,
                steps=2,
                profile=Path(folder) / "profile.json",
            )
        )
        return run.measure()


def _stand_in_for_a_gpu(stack: contextlib.ExitStack) -> None:
    from benchmarks import train_measure, train_profile, train_timing

    def slowest(*values: float) -> list[float]:
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def trace_steps(step: Callable[[], None], steps: int, path: Path) -> None:
        for _ in range(steps):
            step()
        path.write_text(json.dumps({"traceEvents": [work("nvjet", 7, 0, 4), work("ncclDevKernel", 8, 3, 5)]}))

    for module in (train_measure, train_profile, train_timing):
        stack.enter_context(mock.patch.multiple(module, trace_steps=trace_steps))
    stack.enter_context(mock.patch.multiple(train_timing, slowest=slowest))
    stack.enter_context(mock.patch.multiple(train_measure, slowest=slowest))
    counters = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache")
    instead: dict[str, Any] = {name: lambda *_: 0 for name in counters}
    instead |= {"Event": _Clock, "get_device_name": lambda: "CPU", "stream": lambda _: contextlib.nullcontext()}
    stack.enter_context(mock.patch.multiple(torch.cuda, **instead))


class _Clock:
    """In place of a CUDA event."""

    def __init__(self, **_: object) -> None:
        self._seconds = 0.0

    def record(self, *_: object) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, later: _Clock) -> float:
        return (later._seconds - self._seconds) * 1e3
