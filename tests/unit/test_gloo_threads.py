"""Gloo's process groups have one thread each in a Megatron run on CPUs, and behave as ever otherwise."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, _coalescing_manager

from tests.support.launch import run_distributed, run_megatron

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, gloo's process groups stay as they are"),
]


def threads_of_a_group(rank: int, world_size: int) -> int:
    """How many threads torch starts for one more group: one that listens to its sockets, and those that run it."""
    del rank, world_size
    before = set(Path("/proc/self/task").iterdir())  # of which one may end meanwhile
    group = dist.new_group()
    started = set(Path("/proc/self/task").iterdir()) - before
    dist.barrier(group)  # the other rank may still connect to this one
    dist.destroy_process_group(group)
    return len(started)


def settings_of_a_group(rank: int, world_size: int) -> list[object]:
    """Time-outs of groups, given or not, and the ranks that torch notes in one."""
    del rank
    store = dist.distributed_c10d._get_default_store()
    made = [
        ProcessGroupGloo(dist.PrefixStore("0", store), dist.get_rank(), world_size),  # type: ignore[call-arg]
        ProcessGroupGloo(dist.PrefixStore("1", store), dist.get_rank(), world_size, timedelta(seconds=7)),
        ProcessGroupGloo(dist.PrefixStore("2", store), dist.get_rank(), world_size, timeout=timedelta(seconds=8)),
    ]
    group = dist.new_group([0, 1], timeout=timedelta(seconds=9))
    backend = group._get_backend(torch.device("cpu"))
    dist.barrier(group)  # the other rank may still connect to this one
    return [
        *(one.options._timeout.total_seconds() for one in made),
        backend.options._timeout.total_seconds(),
        list(backend.options.global_ranks_in_group),
        type(backend) is ProcessGroupGloo,
    ]


def gathers_under_way_together(rank: int, world_size: int) -> list[float]:
    """What many coalesced gathers brought whose ends coincide; they free a string twice if threads share it."""
    total = torch.zeros(world_size)
    for step in range(150):
        gathered = [torch.full((world_size,), -1.0) for _ in range(8)]
        works = []
        for number, out in enumerate(gathered):
            with _coalescing_manager(None, async_ops=True) as work:
                dist.all_gather_into_tensor(out, torch.tensor([float(rank + number + step)]))
            works.append(work)
        for work in works:
            work.wait()
        total += torch.stack(gathered).sum(dim=0)
    return [value.item() for value in total]


def test_a_group_has_one_thread_in_megatron_and_two_otherwise() -> None:
    assert run_megatron(threads_of_a_group, 2) == [1 + 1] * 2
    assert run_distributed(threads_of_a_group, 2, backend="gloo") == [1 + 2] * 2


def test_settings_are_those_that_torch_would_have() -> None:
    stock = run_distributed(settings_of_a_group, 2, backend="gloo")
    assert stock[0][:4] == [1800.0, 7.0, 8.0, 9.0]
    assert run_megatron(settings_of_a_group, 2) == stock


def test_coalesced_gathers_may_end_together() -> None:
    expected = [sum(rank + number + step for step in range(150) for number in range(8)) for rank in range(2)]
    assert run_megatron(gathers_under_way_together, 2) == [expected, expected]
