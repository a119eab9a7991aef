"""The training benchmark's systems compute what they are compared for: the same loss and the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import benchmark_steps as bodies
from tests.support.launch import WorkerPool
from tests.support.prepared import patched_megatron

pytestmark = [pytest.mark.integration, pytest.mark.multiproc, pytest.mark.cpu_only("its models have no CUDA layers")]

NAMES = ("none", "dp", "tp", "etp_c10d")


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[dict[str, dict[str, Any]]]]:
    # Processes of its own: the body leaves Megatron patched for models that other tests do not build.
    pool = WorkerPool(patched_megatron)
    yield pool.run(bodies.gradients_of_steps, 2, "gloo", 120.0, (NAMES,))
    pool.close()


def test_sharding_changes_no_loss(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for found in ranks:
        assert found["none"]["loss"] == found["dp"]["loss"] == found["etp_c10d"]["loss"]
    assert ranks[0]["none"]["loss"] != ranks[1]["none"]["loss"]


def test_a_step_leaves_the_mean_gradient_of_all_ranks(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for found in ranks:
        expected = found["dp"]["squares"][0]
        assert found["etp_c10d"]["squares"][0] == pytest.approx(expected, rel=0.01)
        # Unreduced: the mean of the ranks' squares is larger than the square of their mean.
        assert found["none"]["squares"][0] > 1.2 * expected


def test_steps_add_to_the_gradient(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for found in ranks:
        for name in ("none", "etp_c10d"):
            first, second = found[name]["squares"]
            assert second == pytest.approx(4 * first, rel=0.01)


def test_tensor_parallel_ranks_see_the_same_data(ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert [found["tp"]["ranks"] for found in ranks] == [2, 2]
    assert ranks[0]["tp"]["loss"] == ranks[1]["tp"]["loss"]
    assert 0 < ranks[0]["tp"]["squares"][0] < 100 * ranks[0]["dp"]["squares"][0]
