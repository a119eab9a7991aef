"""Says what one training step costs the host and the GPU: Python calls, launches, copies and waits, by name.

``--profile FILE`` of :mod:`benchmarks.train_step` writes it for each system, so that one run shows where the time of a
step goes. Numbers are of rank 0. Profilers take time of their own; ``host_ms`` and ``step_ms`` are measured without.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trace_kinds import kind_of
from benchmarks.trace_times import trace_times
from benchmarks.train_timing import host_ms, trace_steps

_LISTED = 40
_LONGEST_NAME = 120
_GPU_WORK = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "sets"}
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
# Parts of a file's path that tell whose function it is; the first that fits.
_OWNERS = (
    ("megatron_patches", "/megatron_patches/"),
    ("megatron", "/megatron/"),
    ("transformer_engine", "/transformer_engine/"),
    ("torch", "/torch/"),
    ("triton", "/triton/"),
    ("etp", "/etp/"),
)
_ROOT = str(Path(__file__).resolve().parents[1])

type Profile = dict[str, Any]


def profile_step(step: Callable[[], None], *, microbatches: int) -> Profile:
    """Run some steps and describe one of them; nothing on ranks other than 0. Collective.

    Args:
        step: enqueues a step; it must have run before.
        microbatches: of the step, to be noted.
    """
    found: Profile = {"microbatches": microbatches, "host_ms": host_ms(step), "step_ms": _step_ms(step)}
    calls = cProfile.Profile() if dist.get_rank() == 0 else None
    _begin()
    if calls is not None:
        calls.enable()
    step()
    if calls is not None:
        calls.disable()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace_steps(step, 1, path)
        if calls is None:
            return {}
        events = json.loads(path.read_text())["traceEvents"]
    return found | {"python": python_calls(calls), "gpu": gpu_work(events), "cuda_calls": cuda_calls(events)}


def _begin() -> None:
    dist.barrier()
    torch.cuda.synchronize()


def _step_ms(step: Callable[[], None]) -> float:
    _begin()
    clock = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - clock) * 1000


def python_calls(profile: cProfile.Profile) -> Profile:
    """Calls of Python functions, of all threads: autograd calls hooks of CUDA tensors in one of its own.

    Returns:
        ``calls`` of Python functions, ``builtin_calls`` of those written in C, ``by_owner``: Python calls by package,
        and lists ``by_calls`` and ``by_own_ms`` of the functions that lead.
    """
    # The type checker does not know this attribute of statistics.
    rows = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    owners: Counter[str] = Counter()
    builtin = 0
    functions = []
    for (path, line, name), (_, calls, own, total, _) in rows:
        if path == "~":
            builtin += calls
        else:
            owners[_owner(path)] += calls
        where = name if path == "~" else f"{_short(path)}:{line}({name})"
        functions.append(
            {"function": where, "calls": calls, "own_ms": round(own * 1e3, 3), "total_ms": round(total * 1e3, 3)}
        )
    return {
        "calls": sum(owners.values()),
        "builtin_calls": builtin,
        "by_owner": dict(owners.most_common()),
        "by_calls": _leading(functions, "calls"),
        "by_own_ms": _leading(functions, "own_ms"),
    }


def _owner(path: str) -> str:
    path = _below(path)
    return next((name for name, part in _OWNERS if part in path), "other")


def _short(path: str) -> str:
    """A path from the package on."""
    path = _below(path)
    start = next((path.index(part) + 1 for _, part in _OWNERS if part in path), 0)
    return path[start:]


def _below(path: str) -> str:
    """A path below the repository, or where packages are installed: folders above may have the name of any owner."""
    return path.removeprefix(_ROOT).rpartition("site-packages")[2]


def gpu_work(events: Iterable[Mapping[str, Any]]) -> Profile:
    """What the GPU did in a trace of one step.

    Returns:
        numbers of ``kernels``, ``copies`` and ``sets``; ``busy_ms`` while anything ran; all of
        :class:`benchmarks.trace_times.TraceTimes`; lists ``by_kind`` and ``by_name`` with counts and milliseconds,
        the longest first.
    """
    work = [event for event in events if event.get("ph") == "X" and event.get("cat") in _GPU_WORK]
    times = trace_times(work, 1)
    counts = Counter(_GPU_WORK[event["cat"]] for event in work)
    return {
        **{what: counts[what] for what in _GPU_WORK.values()},
        "busy_ms": times.compute + times.exposed,
        **{f"{what}_ms": value for what, value in asdict(times).items()},
        "by_kind": _summed(work, kind_of),
        "by_name": _summed(work, lambda name: name[:_LONGEST_NAME]),
    }


def cuda_calls(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls of CUDA's runtime and driver in a trace, with the milliseconds that the host spent in them.

    Long ones of ``cudaStreamSynchronize`` and ``cudaMemcpyAsync`` are waits for the GPU.
    """
    calls = [event for event in events if event.get("ph") == "X" and event.get("cat") in _CALLS]
    return _summed(calls, str)


def _summed(events: Iterable[Mapping[str, Any]], label: Callable[[str], str]) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        name = label(str(event["name"]))
        counts[name] += 1
        spent[name] += float(event["dur"]) / 1e3
    return _leading([{"name": name, "count": counts[name], "ms": round(ms, 3)} for name, ms in spent.items()], "ms")


def _leading(rows: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row[key])[:_LISTED]


def in_one_line(system: str, profile: Profile) -> str:
    """A profile in short."""
    python, gpu = profile["python"], profile["gpu"]
    owners = ", ".join(f"{name} {calls}" for name, calls in python["by_owner"].items())
    return (
        f"{system}: a step takes {profile['step_ms']:.1f} ms, the host {profile['host_ms']:.1f}, the GPU is busy for "
        f"{gpu['busy_ms']:.1f}; {python['calls']} calls of Python functions ({owners}); {gpu['kernels']} kernels, "
        f"{gpu['copies']} copies, {gpu['sets']} sets"
    )
