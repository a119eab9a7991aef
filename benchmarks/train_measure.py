"""Measures training systems side by side: time, memory, and what a trace shows, in random order and repeated.

Whatever happens to one system, the others are measured: its failure is noted with its reason. The report is written
after each stage, with what is being done, so that a run that is ended from outside leaves what it has found.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trace_times import trace_times
from benchmarks.train_profile import Profile, in_one_line, profile_step
from benchmarks.train_shapes import GIB, SHAPES, closed_form, obstacle, resized
from benchmarks.train_systems import BuildOptions, System, build
from benchmarks.train_timing import slowest, time_steps, trace_steps

# Before each capture. Without one: before the first number of microbatches, of which the first step is slow.
_WARM_UP_STEPS = 3
_EAGER_WARM_UP_STEPS = 2
_TRACED_STEPS = 2
# Share of the time for timing rounds; traces take the rest.
_ROUNDS_SHARE = 0.9


@dataclass(frozen=True)
class RunOptions:
    """What is measured, and how often.

    Attributes:
        systems: names of :data:`benchmarks.train_shapes.SYSTEMS`, in the order in which they are built.
        shape: a name of :data:`benchmarks.train_shapes.SHAPES`.
        layers: instead of the shape's.
        experts: instead of the shape's.
        microbatches: numbers of microbatches a step.
        rounds: how often everything is measured; the order is another one each time.
        steps: steps in a row that one measurement averages.
        longest: seconds that these should take: fewer steps where they would take longer, but at least 2.
        warm_up: steps before each measurement.
        seed: of the order.
        prefetch_depth: of ETP.
        precision: of the linear layers' GEMMs: one of :data:`benchmarks.train_shapes.PRECISIONS`.
        seconds: begin no further round that would end, as the longest one so far did, after 90 % of them, and no
            further trace once all are spent.
        json: where the report goes, if anywhere.
        traces: folder in which profiler traces stay; None deletes them once they are read.
        profile: where :func:`benchmarks.train_profile.profile_step` of each system goes, if anywhere.
    """

    systems: tuple[str, ...]
    shape: str
    layers: int | None = None
    experts: int | None = None
    microbatches: tuple[int, ...] = (1, 4)
    rounds: int = 3
    steps: int = 5
    longest: float = 1.0
    warm_up: int = 1
    seed: int = 0
    prefetch_depth: int = 1
    precision: str = "bf16"
    seconds: float = math.inf
    json: Path | None = None
    traces: Path | None = None
    profile: Path | None = None


@dataclass
class Result:
    """One system with one number of microbatches; sizes are of rank 0.

    Attributes:
        milliseconds: of a step, on the slowest rank; one entry a round.
        steps: in a row, that each of these averages.
        host_milliseconds: until the host had enqueued a step on an idle GPU, on the slowest rank; one entry a round.
        allocated_gib: held between two steps, by PyTorch's allocator.
        peak_gib: the most that PyTorch's allocator held in a step.
        other_gib: held outside of PyTorch's allocator, by purpose.
        closed_form_gib: what has to be held between two steps, by purpose.
        loss: of the last microbatch, as a hexadecimal float.
        bytes_per_element: moved for each element of a weight in each microbatch; None where nothing counts it.
        trace: :class:`benchmarks.trace_times.TraceTimes`.
    """

    system: str
    microbatches: int
    milliseconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    host_milliseconds: list[float] = field(default_factory=list)
    allocated_gib: float = 0.0
    peak_gib: float = 0.0
    other_gib: dict[str, float] = field(default_factory=dict)
    closed_form_gib: dict[str, float] = field(default_factory=dict)
    loss: str = ""
    bytes_per_element: float | None = None
    trace: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self) | {"median": _median(self.milliseconds), "host_ms": _median(self.host_milliseconds)}


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


class Stepper:
    """Runs a system's steps: as they are, or replayed from one CUDA graph for each number of microbatches."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if system.graphed else None
        self._warm = False

    def prepare(self, microbatches: int) -> None:
        """Warm up, and capture the graph if there is to be one. Collective.

        The capture, or the next step where there is none, is the first whose traffic is counted.
        """
        system, side = self.system, self.system.stream
        steps = _WARM_UP_STEPS if system.graphed else 0 if self._warm else _EAGER_WARM_UP_STEPS
        self._warm = True
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(steps):
                system.step(microbatches)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        system.reset_traffic()
        if not system.graphed:
            return
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        # What the collector would free in the middle of a capture may need calls that a capture forbids.
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                system.step(microbatches)
        finally:
            gc.enable()
        self._graphs[microbatches] = graph
        torch.cuda.synchronize()

    def step(self, microbatches: int) -> None:
        """One step, enqueued on the current stream."""
        if self.system.graphed:
            self._graphs[microbatches].replay()
        else:
            self.system.step(microbatches)


class Run:
    """One process's part in measuring all systems. Every method is collective.

    Args:
        options: what to measure.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.shape_name, self.shape = resized(options.shape, options.layers, options.experts)
        self.steppers: dict[str, Stepper] = {}
        self.results: dict[tuple[str, int], Result] = {}
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = dict.fromkeys(options.systems, 0.0)
        self._profiles: dict[str, Profile] = {}
        self._doing = ""
        self._begun = time.monotonic()

    def measure(self) -> dict[str, Any]:
        """Build every system, measure all of them, and return the report."""
        self._note("start")
        _allocate_workspaces()
        for name in self.options.systems:
            self._try(name, "building", lambda n=name: self._build(n))  # type: ignore[misc]
        order = random.Random(self.options.seed)  # noqa: S311 - the same order on all ranks is what is wanted
        longest = 0.0
        for number in range(self.options.rounds):
            begun = self._spent()
            if number and begun + longest > _ROUNDS_SHARE:
                break
            measurable = self._measurable()
            for name, microbatches in order.sample(measurable, len(measurable)):
                self._try(name, f"timing x{microbatches}", lambda n=name, m=microbatches: self._time(n, m))  # type: ignore[misc]
            longest = max(longest, self._spent() - begun)
        fewest = min(self.options.microbatches)
        for name, microbatches in self._measurable():
            if microbatches == fewest and self._spent() < 1.0:
                self._try(name, f"tracing x{microbatches}", lambda n=name, m=microbatches: self._trace(n, m))  # type: ignore[misc]
                if self.options.profile is not None:
                    self._try(name, f"profiling x{microbatches}", lambda n=name, m=microbatches: self._profile(n, m))  # type: ignore[misc]
        self._note("")
        return self.report()

    def release(self) -> None:
        """Drop all systems. NCCL would wait at its end for graphs that have captured it."""
        self.steppers.clear()
        gc.collect()
        torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        """What is known so far."""
        return {
            "shape": asdict(self.shape),
            "shape_name": self.shape_name,
            "flops_per_microbatch": self.shape.flops(),
            "gpus": dist.get_world_size(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "options": {key: str(value) for key, value in asdict(self.options).items()},
            "doing": self._doing,
            "failures": self.failures,
            "seconds": self.seconds,
            "results": [result.as_json() for result in self.results.values()],
        }

    def _spent(self) -> float:
        """The fraction of the time that is spent; equal on all ranks."""
        return slowest((time.monotonic() - self._begun) / self.options.seconds)[0]

    def _measurable(self) -> list[tuple[str, int]]:
        """Systems and microbatches that no rank has failed at, in an order that is equal on all ranks."""
        return sorted(key for key in self.results if key[0] not in self.failures)

    # One system ----------------------------------------------------------------------------------------------

    def _build(self, name: str) -> None:
        reason = obstacle(name, self.shape, dist.get_world_size())
        if reason:
            raise RuntimeError(reason)
        options = BuildOptions(prefetch_depth=self.options.prefetch_depth, precision=self.options.precision)
        system = build(name, self.shape, options)
        self.steppers[name] = stepper = Stepper(system)
        expected = closed_form(
            self.shape,
            name,
            dist.get_world_size(),
            prefetch_depth=self.options.prefetch_depth,
            precision=self.options.precision,
        )
        for microbatches in self.options.microbatches:
            torch.cuda.reset_peak_memory_stats()
            stepper.prepare(microbatches)
            # A replay takes what the capture reserved, which the statistics do not see.
            peak = system.peak()
            torch.cuda.reset_peak_memory_stats()
            stepper.step(microbatches)
            torch.cuda.synchronize()
            gc.collect()
            self.results[name, microbatches] = Result(
                name,
                microbatches,
                allocated_gib=system.allocated() / GIB,
                peak_gib=(peak if system.graphed else system.peak()) / GIB,
                other_gib={what: nbytes / GIB for what, nbytes in system.other_memory().items()},
                closed_form_gib={what: nbytes / GIB for what, nbytes in expected.items()},
                loss=float(system.loss).hex(),
                bytes_per_element=system.bytes_per_element(microbatches),
            )

    def _time(self, name: str, microbatches: int) -> None:
        stepper = self.steppers[name]
        stepper.system.activate()
        options, result = self.options, self.results[name, microbatches]
        times = time_steps(lambda: stepper.step(microbatches), options.steps, options.warm_up, options.longest)
        result.milliseconds.append(times.device_ms)
        result.steps.append(times.steps)
        result.host_milliseconds.append(times.host_ms)

    def _trace(self, name: str, microbatches: int) -> None:
        stepper = self.steppers[name]
        stepper.system.activate()
        with tempfile.TemporaryDirectory() as folder:
            path = (self.options.traces or Path(folder)) / f"trace_{name}_x{microbatches}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            trace_steps(lambda: stepper.step(microbatches), _TRACED_STEPS, path)
            if dist.get_rank() == 0:
                events = json.loads(path.read_text())["traceEvents"]
                self.results[name, microbatches].trace = asdict(trace_times(events, _TRACED_STEPS))

    def _profile(self, name: str, microbatches: int) -> None:
        stepper = self.steppers[name]
        stepper.system.activate()
        found = profile_step(lambda: stepper.step(microbatches), microbatches=microbatches)
        if found and self.options.profile is not None:
            self._profiles[name] = found
            write_json(self.options.profile, self._profiles)
            _say(in_one_line(name, found))

    # Failures ------------------------------------------------------------------------------------------------

    def _try(self, name: str, doing: str, work: Callable[[], None]) -> None:
        """Do some work on a system that has not failed yet; a failure on any rank is one on all of them."""
        if name in self.failures:
            return
        self._note(f"{name}: {doing}")
        begun, reason = time.monotonic(), ""
        try:
            work()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever ails one system must not lose the others
            reason = f"{doing}: {_explain(error)}"
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        self.seconds[name] += time.monotonic() - begun
        first = next(((rank, text) for rank, text in enumerate(reasons) if text), None)
        if first is None:
            return
        self.failures[name] = f"rank {first[0]}, {first[1]}"
        if not doing.startswith(("tracing", "profiling")):
            # What was built is freed; what was measured stays in the report.
            self.steppers.pop(name, None)
        _say(f"{name} failed: {self.failures[name]}")
        gc.collect()
        torch.cuda.empty_cache()

    def _note(self, doing: str) -> None:
        self._doing = doing
        _say(f"{time.monotonic() - self._begun:.0f} s: {doing or 'done'}")
        if self.options.json is not None and dist.get_rank() == 0:
            write_json(self.options.json, self.report())


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Replace a file, so that whoever reads it finds the former report or this one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(report, indent=1))
    fresh.replace(path)


def initialize() -> None:
    """Join the process group that torchrun describes."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # With `device_id` each of Megatron's many groups would get a communicator at once; few of them are ever used.
    dist.init_process_group("nccl", timeout=timedelta(minutes=3))


def _allocate_workspaces() -> None:
    """Step a tiny model and drop it: libraries' workspaces then belong to no system."""
    system = build("none", SHAPES["test"], BuildOptions())
    system.step(1)
    torch.cuda.synchronize()
    del system
    gc.collect()
    torch.cuda.empty_cache()


def _explain(error: BaseException) -> str:
    """An error in one line, and the one that it hides: a capture that is broken off raises one of its own."""
    hidden = error.__cause__ or error.__context__
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"{line} (after {_explain(hidden)})" if hidden is not None else line


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
