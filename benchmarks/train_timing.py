"""Times and traces of a few steps in a row, for :mod:`benchmarks.train_measure`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_FEWEST_STEPS = 2
_HOST_STEPS = 3


@dataclass(frozen=True)
class StepTimes:
    """What one measurement found, of the slowest rank.

    Attributes:
        device_ms: milliseconds of a step on the device.
        host_ms: milliseconds until the host had enqueued a step that began on an idle GPU: no full queue made it wait.
        steps: how many in a row these average.
    """

    device_ms: float
    host_ms: float
    steps: int


def time_steps(step: Callable[[], None], steps: int, warm_up: int, longest: float) -> StepTimes:
    """Time some steps in a row. Collective.

    Args:
        step: enqueues a step.
        steps: how many to average.
        warm_up: steps before.
        longest: seconds that the steps may take: if the warm-up suggests that they would take longer, average fewer
            steps, but at least 2. Without a warm-up, no step is left out.
    """
    begun = time.perf_counter()
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    if warm_up:
        steps = steps_within(longest, steps, slowest((time.perf_counter() - begun) / warm_up)[0])
    dist.barrier()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    stop.record()
    torch.cuda.synchronize()
    device, host = slowest(start.elapsed_time(stop) / steps, host_ms(step, min(steps, _HOST_STEPS)))
    return StepTimes(device, host, steps)


def host_ms(step: Callable[[], None], steps: int = 3) -> float:
    """Milliseconds until a step that begins on an idle GPU is enqueued: the median of some. Collective."""
    times = []
    for _ in range(steps):
        dist.barrier()
        torch.cuda.synchronize()
        clock = time.perf_counter()
        step()
        times.append((time.perf_counter() - clock) * 1000)
    torch.cuda.synchronize()
    return statistics.median(times)


def steps_within(longest: float, steps: int, seconds: float) -> int:
    """How many steps of ``seconds`` each to time in a row: as many as ``longest`` allows, from 2 up to ``steps``."""
    affordable = max(_FEWEST_STEPS, round(min(longest / seconds, steps))) if seconds else steps
    return min(steps, affordable)


def slowest(*values: float) -> list[float]:
    """The largest of each value over all ranks."""
    largest = torch.tensor(values, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found


def trace_steps(step: Callable[[], None], steps: int, path: Path) -> None:
    """Run steps and write rank 0's trace of them. Only the GPU is traced: tracing the host would slow it down."""
    profile = None
    if dist.get_rank() == 0:
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    step()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if profile is not None:
        profile.start()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    if profile is not None:
        profile.stop()
        profile.export_chrome_trace(str(path))
