"""The copy-engine transport against the c10d one."""

from __future__ import annotations

import re
import socket

import pytest
import torch

from tests.gpu import bodies_transports as bodies
from tests.gpu.devices import needs_gpus
from tests.gpu.launch import run_on_gpus
from tests.multiproc import bodies_order
from tests.support.launch import RanksFailedError, run_distributed

WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("dtype", "sink_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_copy_engine_equals_c10d(world_size: int, dtype: torch.dtype, sink_dtype: torch.dtype) -> None:
    counts = run_on_gpus(bodies.transports_agree, world_size, args=(dtype, sink_dtype))
    assert counts == [12 * 12] * world_size


@needs_gpus(2)
def test_processes_that_see_one_gpu_each_copy_from_each_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    body = bodies.agree_though_each_sees_one_gpu
    assert run_distributed(body, 2, None, args=(port,), fresh=True) == [(12 * 12, "CopyEngineTransport")] * 2


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_shard_that_was_not_published_is_refused(world_size: int) -> None:
    for message in run_on_gpus(bodies.unpublished_is_refused, world_size):
        assert "all-gather of w" in message
        assert "never published" in message


@needs_gpus(2)
def test_ranks_that_reduce_different_weights_end_with_the_weights_name(capfd: pytest.CaptureFixture[str]) -> None:
    """Added up, they would be wrong gradients of the right shape."""
    with pytest.raises(RanksFailedError) as error:
        run_distributed(bodies.reductions_of_different_weights, 2, "nccl", fresh=True)
    assert "were added up" not in str(error.value)
    assert re.search(
        r"reduce-scatter of only_on_\d's gradient on rank \d .* did not finish within 3 s", capfd.readouterr().err
    )


@needs_gpus(2)
@pytest.mark.parametrize("depth", [0, 1])
def test_ranks_that_gather_different_weights_are_told_even_if_some_gather_more(depth: int) -> None:
    """With look-ahead, the rank that leaves the predicted order has gathered once more than its peer."""
    body = bodies_order.orders_that_differ
    if depth == 0:
        answers = run_distributed(body, 2, "nccl", args=(((0, 1, 2, 3), (0, 2, 1, 3)), True, {"prefetch_depth": 0}))
        assert all(right for _, right in answers)
    else:
        answers = run_distributed(bodies_order.uneven_numbers, 2, "nccl", fresh=True)
    for raised, _ in answers:
        assert re.search(r"number \d+ was the .*layers\.\d.* on rank 0 and the .*layers\.\d.* on rank 1", raised)
