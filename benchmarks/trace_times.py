"""Splits the GPU time of a traced step into compute, communication beside it, exposed communication, and idle time.

Input are the events of a Chrome trace as `torch.profiler` writes them; times are in microseconds.

The *compute stream* is the one on which most kernel time is spent, NCCL's kernels apart. Communication is what NCCL's
kernels and copies between devices do, the engine's sums of received gradients, and everything on other streams:
copies into and out of communication buffers. Waits for a peer are no activity of the GPU; they show as idle time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_COMMUNICATION = ("nccl", "ptop", "_accumulate_parts", "symm_mem")

type Interval = tuple[float, float]


@dataclass(frozen=True)
class TraceTimes:
    """Milliseconds a step. ``span`` is the sum of ``compute``, ``exposed`` and ``idle``.

    Attributes:
        span: from the first activity to the last one.
        compute: while at least one compute kernel ran.
        communication: while communication ran, beside compute or not.
        exposed: while communication ran and no compute kernel did.
        idle: while nothing ran: the stream waited for a peer or for the host.
    """

    span: float
    compute: float
    communication: float
    exposed: float
    idle: float


def trace_times(events: Iterable[Mapping[str, Any]], steps: int) -> TraceTimes:
    """Times of one rank's GPU, averaged over the traced steps.

    Args:
        events: ``traceEvents`` of a Chrome trace; those that are no work of a GPU are ignored.
        steps: how many steps the trace spans.

    Raises:
        ValueError: if the trace has no work of a GPU, or ``steps`` is not positive.
    """
    work = [event for event in events if event.get("ph") == "X" and event.get("cat") in _GPU_WORK]
    if not work or steps < 1:
        raise ValueError(f"a trace of {steps} steps with {len(work)} GPU activities; nothing can be said about it")
    main = _compute_stream(work)
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in work:
        start = float(event["ts"])
        interval = (start, start + float(event["dur"]))
        beside = _communicates(event) or _stream(event) != main
        (communication if beside else compute).append(interval)
    busy, talking, either = _union(compute), _union(communication), _union([*compute, *communication])
    span = either[-1][1] - either[0][0]
    scale = 1000.0 * steps
    return TraceTimes(
        span=span / scale,
        compute=_length(busy) / scale,
        communication=_length(talking) / scale,
        exposed=(_length(either) - _length(busy)) / scale,
        idle=(span - _length(either)) / scale,
    )


def _communicates(event: Mapping[str, Any]) -> bool:
    name = str(event.get("name", "")).lower()
    return any(word in name for word in _COMMUNICATION)


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _compute_stream(work: Iterable[Mapping[str, Any]]) -> Any:
    busy: dict[Any, float] = defaultdict(float)
    for event in work:
        if event["cat"] == "kernel" and not _communicates(event):
            busy[_stream(event)] += float(event["dur"])
    return max(busy, key=lambda stream: busy[stream], default=None)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)
