"""CUDA graphs: what is replayed equals what is not, on both transports."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.gpu import bodies_graphs as bodies
from tests.gpu.devices import needs_gpus, needs_te
from tests.gpu.launch import run_on_gpus

WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4)]
TRANSPORTS = {"c10d": "C10dTransport", "copy_engine": "CopyEngineTransport"}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("transport", "dtype", "recompute", "once", "reuse"),
    [
        *itertools.product(TRANSPORTS, (torch.float32, torch.bfloat16), (False, True), (False,), (False,)),
        *itertools.product(TRANSPORTS, (torch.float32,), (False,), (True,), (False,)),
        *itertools.product(TRANSPORTS, (torch.float32,), (False, True), (False,), (True,)),
    ],
)
def test_a_whole_step_replayed_equals_eager(
    world_size: int, transport: str, dtype: torch.dtype, recompute: bool, once: bool, reuse: bool
) -> None:
    arguments = (transport, dtype, recompute, once, reuse)
    for result in run_on_gpus(bodies.whole_step_equals_eager, world_size, args=arguments, timeout_s=120.0):
        assert result["transports"] == {TRANSPORTS[transport]}
        assert all(math.isfinite(loss) for loss in result["losses"])
        # The capture took the slots over that were there, and made none.
        assert result["captured"] == result["eager"]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_penalty_replayed_equals_eager(world_size: int, transport: str) -> None:
    for difference in run_on_gpus(bodies.penalty_is_replayed, world_size, args=(transport,), timeout_s=120.0):
        assert difference > 0.01


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_evaluation_replayed_between_steps_equals_eager(world_size: int, transport: str) -> None:
    arguments = (transport, True)
    for result in run_on_gpus(bodies.captured_evaluation_equals_eager, world_size, args=arguments, timeout_s=120.0):
        assert result["transports"] == {TRANSPORTS[transport]}
        assert result["worst"] <= (0.0 if world_size == 2 else 1e-6)
        assert result["compared"] == 6 * 2


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("maker", ["torch", pytest.param("te", marks=needs_te())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphed_callables_equal_eager(world_size: int, transport: str, maker: str, dtype: torch.dtype) -> None:
    for losses in run_on_gpus(bodies.parts_equal_eager, world_size, args=(transport, maker, dtype), timeout_s=120.0):
        assert len(losses) == (40 if dtype == torch.float32 else 20)
        assert all(math.isfinite(loss) for loss in losses)


@needs_gpus(4, shared=False)
def test_a_whole_step_over_hosts_replayed_equals_c10d() -> None:
    for transports in run_on_gpus(bodies.whole_step_over_hosts_equals_c10d, 4, timeout_s=120.0):
        assert transports == ["C10dTransport", "HierarchicalTransport"]


@pytest.mark.parametrize("world_size", WORLDS)
def test_transports_agree_in_graphs(world_size: int) -> None:
    counts = run_on_gpus(bodies.transports_agree_in_graphs, world_size, timeout_s=120.0)
    assert counts == [30 * (6 + 3)] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_capture_between_microbatches_is_refused(world_size: int) -> None:
    for message in run_on_gpus(bodies.capture_with_work_under_way_is_refused, world_size):
        assert "etp.wait_async_comms" in message


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_part_that_nobody_publishes_is_refused(world_size: int) -> None:
    for message in run_on_gpus(bodies.part_outside_of_any_forward_is_refused, world_size):
        assert "etp.shard_module" in message
