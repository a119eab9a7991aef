"""The launcher itself: values come back, failures carry the rank's traceback, a hang ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import RanksFailedError, RanksHungError, device, run_distributed

pytestmark = pytest.mark.multiproc


@dataclass(frozen=True)
class Point:
    """A value whose class only this test module defines."""

    x: int
    y: torch.Tensor


def add_over_ranks(rank: int, world_size: int, point: Point) -> Point:
    total = torch.full((2,), float(point.x + rank), device=device())
    dist.all_reduce(total)
    return Point(world_size, total + point.y)


def raise_on_rank(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} of {world_size} has had enough")
    dist.all_reduce(torch.ones(1))


def raise_after_imports(rank: int, world_size: int, culprit: int) -> None:
    import torch.distributed.nn  # noqa: F401 - the default group becomes a default argument, and lives on

    raise_on_rank(rank, world_size, culprit)


def exit_on_rank(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(7)


def abort_on_rank(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os.abort()


def sleep_on_rank(rank: int, world_size: int, culprit: int) -> int:
    if rank == culprit:
        time.sleep(600)
    return rank


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def start_a_process(rank: int, world_size: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def group_is_initialized(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def test_values_come_back_in_rank_order_with_classes_of_the_test_module() -> None:
    results = run_distributed(add_over_ranks, 2, args=(Point(10, torch.tensor([0.5, -0.25])),))
    assert [r.x for r in results] == [2, 2]
    for result in results:
        assert result.y.tolist() == [21.5, 20.75]


def test_processes_are_kept_between_calls_and_fresh_ones_are_not() -> None:
    first = run_distributed(process_id, 2)
    assert run_distributed(process_id, 2) == first
    assert run_distributed(process_id, 1) == first[:1]
    assert not set(run_distributed(process_id, 1, fresh=True)) & set(first)


def test_without_a_backend_there_is_no_process_group() -> None:
    assert run_distributed(group_is_initialized, 2, backend=None) == [False, False]
    assert run_distributed(group_is_initialized, 2) == [True, True]


def test_an_exception_carries_the_rank_and_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match="first on rank 1") as caught:
        run_distributed(raise_on_rank, 2, args=(1,))
    first = caught.value.failures[0]
    assert (first.rank, first.kind) == (1, "ValueError")
    assert "rank 1 of 2 has had enough" in first.report
    assert "in raise_on_rank" in first.report
    assert run_distributed(process_id, 2), "the pool must work again after a failure"


def test_ranks_that_wait_for_one_that_failed_end_whatever_its_body_has_imported() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_distributed(raise_after_imports, 2, args=(1,), fresh=True)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(1, "ValueError"), (0, "RuntimeError")]


def test_a_process_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RanksFailedError, match="exit code 7") as caught:
        # Without a process group: a rank that still joins one would fail as well.
        run_distributed(exit_on_rank, 2, backend=None, args=(0,))
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(0, "exit")]


def test_a_process_that_aborts_says_where() -> None:
    with pytest.raises(RanksFailedError, match=r"exit code -6(?s:.)*Fatal Python error: Aborted(?s:.)*abort_on_rank"):
        run_distributed(abort_on_rank, 1, backend=None, args=(0,))


@pytest.mark.slow
def test_a_hang_ends_at_the_timeout_and_shows_where_it_stands() -> None:
    run_distributed(process_id, 2)  # so that starting workers does not count
    started = time.monotonic()
    with pytest.raises(RanksHungError, match="sleep_on_rank") as caught:
        run_distributed(sleep_on_rank, 2, timeout_s=5.0, args=(1,))
    assert time.monotonic() - started < 60.0  # the body itself sleeps for 600 s
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(1, "hang")]
    assert run_distributed(sleep_on_rank, 2, args=(5,)) == [0, 1]


def test_a_function_that_workers_cannot_find_is_refused() -> None:
    def body(rank: int, world_size: int) -> int:
        return rank

    with pytest.raises(ValueError, match="no function at a module's level"):
        run_distributed(body, 2)


def test_what_a_body_has_started_ends_with_its_process() -> None:
    started = run_distributed(start_a_process, 2, fresh=True)
    deadline = time.monotonic() + 30.0
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended; one whose end nobody has asked for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
