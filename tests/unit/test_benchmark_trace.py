"""Exposed communication, from small traces that are drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trace_times import TraceTimes, trace_times

GEMM, GATHER, PEER, LOCAL = "nvjet_tst_192x192", "ncclDevKernel_AllGather_RING_LL", "Memcpy PtoP (Device -> Device)", (
    "Memcpy DtoD (Device -> Device)"
)  # fmt: skip


def work(name: str, stream: int, start: float, stop: float) -> dict[str, Any]:
    """One activity of the GPU, times in milliseconds."""
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return {
        "ph": "X", "cat": category, "name": name, "ts": start * 1000, "dur": (stop - start) * 1000,
        "pid": 0, "tid": stream, "args": {"device": 0, "stream": stream},
    }  # fmt: skip


def test_communication_alone_is_told_from_communication_beside_compute() -> None:
    trace = [
        work(GEMM, 7, 10, 20),
        work(GATHER, 20, 12, 24),  # 8 beside the GEMM, 4 alone
        work(GEMM, 7, 24, 30),
        work(PEER, 21, 30, 33),  # alone
        work(GEMM, 7, 35, 40),  # after 2 of nothing
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99000},
        {"ph": "f", "cat": "ac2g", "ts": 0},
    ]
    assert trace_times(trace, steps=1) == TraceTimes(span=30, compute=21, communication=15, exposed=7, idle=2)
    assert trace_times(trace, steps=2) == TraceTimes(15, 10.5, 7.5, 3.5, 1)


def test_overlapping_communication_counts_once() -> None:
    trace = [work(GEMM, 7, 0, 1), work(GATHER, 20, 1, 5), work(PEER, 21, 2, 6), work(GEMM, 7, 6, 7)]
    assert trace_times(trace, steps=1) == TraceTimes(span=7, compute=2, communication=5, exposed=5, idle=0)


def test_a_local_copy_is_compute_on_the_compute_stream_and_communication_elsewhere() -> None:
    trace = [work(GEMM, 7, 0, 4), work(LOCAL, 7, 4, 5), work(LOCAL, 30, 5, 7), work(GEMM, 7, 7, 8)]
    assert trace_times(trace, steps=1) == TraceTimes(span=8, compute=6, communication=2, exposed=2, idle=0)


def test_collectives_on_the_compute_stream_are_no_compute() -> None:
    trace = [work(GEMM, 7, 0, 4), work(GATHER, 7, 4, 9), work("_accumulate_parts", 7, 9, 10), work(GEMM, 7, 10, 11)]
    assert trace_times(trace, steps=1) == TraceTimes(span=11, compute=5, communication=6, exposed=6, idle=0)


def test_the_compute_stream_is_the_busiest_one_whatever_nccl_does() -> None:
    trace = [work(GATHER, 20, 0, 90), work(GEMM, 7, 0, 10), work("copy_kernel", 9, 10, 12)]
    assert trace_times(trace, steps=1).compute == 10


@pytest.mark.parametrize(("trace", "steps"), [([], 1), ([work(GEMM, 7, 0, 1)], 0)])
def test_nothing_to_measure_is_refused(trace: list[dict[str, Any]], steps: int) -> None:
    with pytest.raises(ValueError, match=rf"a trace of {steps} steps with {len(trace)} GPU activities"):
        trace_times(trace, steps)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12))
def test_times_agree_with_counting_every_tick(activities: Sequence[tuple[bool, int, int]]) -> None:
    trace = [work(GEMM, 7, 0, 1)]
    trace += [work(GATHER if talks else GEMM, 20 if talks else 7, at, at + long) for talks, at, long in activities]
    computing = {0}
    talking: set[int] = set()
    for talks, at, long in activities:
        (talking if talks else computing).update(range(at, at + long))
    span = max(computing | talking) + 1
    found = trace_times(trace, steps=1)
    assert (found.compute, found.communication) == pytest.approx((len(computing), len(talking)))
    assert found.exposed == pytest.approx(len(talking - computing))
    assert found.span == pytest.approx(span)
    assert found.idle == pytest.approx(span - len(computing | talking))
