"""The training benchmark's systems compute what they are compared for: the same loss and the same gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import benchmark_steps as bodies
from tests.support.launch import WorkerPool
from tests.support.prepared import patched_megatron

pytestmark = [pytest.mark.integration, pytest.mark.multiproc, pytest.mark.cpu_only("its models have no CUDA layers")]

NAMES = ("none", "dp", "tp", "etp_c10d")

type Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    # Processes of its own: the body leaves Megatron patched for models that other tests do not build.
    pool = WorkerPool(patched_megatron)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool) -> list[Found]:
    return pool.run(bodies.gradients_of_steps, 2, "gloo", 120.0, (NAMES,))


def test_sharding_changes_no_loss(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["none"]["loss"] == found["dp"]["loss"] == found["etp_c10d"]["loss"]
    assert ranks[0]["none"]["loss"] != ranks[1]["none"]["loss"]


def test_a_step_leaves_the_mean_gradient_of_all_ranks(ranks: list[Found]) -> None:
    for found in ranks:
        expected = found["dp"]["squares"][0]
        assert found["etp_c10d"]["squares"][0] == pytest.approx(expected, rel=0.01)
        # Unreduced: the mean of the ranks' squares is larger than the square of their mean.
        assert found["none"]["squares"][0] > 1.2 * expected


def test_steps_add_to_the_gradient(ranks: list[Found]) -> None:
    for found in ranks:
        for name in ("none", "etp_c10d"):
            first, second = found[name]["squares"]
            assert second == pytest.approx(4 * first, rel=0.01)


def test_tensor_parallel_ranks_see_the_same_data(ranks: list[Found]) -> None:
    assert [found["tp"]["ranks"] for found in ranks] == [2, 2]
    assert ranks[0]["tp"]["loss"] == ranks[1]["tp"]["loss"]
    assert 0 < ranks[0]["tp"]["squares"][0] < 100 * ranks[0]["dp"]["squares"][0]


def test_experts_are_sharded_without_another_loss_or_gradient(pool: WorkerPool) -> None:
    names = ("none", "dp", "ep", "etp_c10d")
    for found in pool.run(bodies.gradients_of_steps, 2, "gloo", 120.0, (names, "test-moe")):
        assert found["none"]["loss"] == found["dp"]["loss"] == found["etp_c10d"]["loss"]
        # Its experts begin with other values on each rank.
        assert found["none"]["loss"] != found["ep"]["loss"] == pytest.approx(found["none"]["loss"], rel=0.01)
        assert found["etp_c10d"]["squares"][0] == pytest.approx(found["dp"]["squares"][0], rel=1e-4)


def test_whole_experts_may_be_distributed_and_then_cut(pool: WorkerPool) -> None:
    for found in pool.run(bodies.gradients_of_steps, 4, "gloo", 120.0, (("dp", "ep", "etp_c10d_ep2"), "test-moe")):
        for name in ("ep", "etp_c10d_ep2"):
            assert found[name]["loss"] == pytest.approx(found["dp"]["loss"], rel=0.01)
        first, second = found["etp_c10d_ep2"]["squares"]
        assert 0.1 * found["dp"]["squares"][0] < first < second < 10 * found["dp"]["squares"][0]


def test_a_whole_run_measures_profiles_and_says_what_cannot_run(pool: WorkerPool, tmp_path: Path) -> None:
    report = pool.run(bodies.report_of_run, 2, "gloo", 120.0, (str(tmp_path),))[0]
    assert report["failures"] == {
        "none_graph": "rank 0, building: RuntimeError: the host reads how many tokens each expert gets in each pass, "
        "which a CUDA graph forbids",
        "etp_c10d_ep2": "rank 0, building: RuntimeError: it needs 4 GPUs and there are 2",
    }
    assert report["shape_name"] == "test-moe, 1 layers, 4 experts"
    experts = 4 * (2 * 96 * 128 + 128 * 96)
    elements = 2 * 512 * 128 + (4 + 2 * 2) * 48 * 128 + 128 * 4 * 48 + experts
    # In bf16, a gather and a reduction. The backward pass finds all weights in their slots but for two experts of four.
    moved = 2 + 2 + 2 * (experts / 2) / elements
    measured = {result["system"]: result for result in report["results"]}
    assert list(measured) == ["none", "ep", "etp_c10d"]
    for name, result in measured.items():
        assert len(result["milliseconds"]) == len(result["host_milliseconds"]) == 2
        assert min(result["milliseconds"]) <= result["median"] <= max(result["milliseconds"])
        assert result["host_ms"] > 0
        assert result["trace"]["exposed"] == 0.5
        assert report["seconds"][name] > 0
        assert result["bytes_per_element"] == (pytest.approx(moved) if name == "etp_c10d" else None)
    assert report["doing"] == ""
    profiles = json.loads((tmp_path / "profile.json").read_text())
    assert set(profiles) == set(measured)
    assert "etp" not in profiles["ep"]["python"]["by_owner"]
    calls = profiles["etp_c10d"]["python"]["by_owner"]
    assert calls["etp"] > 1000
    assert calls["megatron"] > 100
    assert profiles["etp_c10d"]["gpu"]["kernels"] == 2
