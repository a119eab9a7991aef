"""Experts stacked in one parameter a projection are sharded, and train as the unsharded ones."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_stacked as bodies
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc]

LAYERS, WEIGHTS = 2, 2


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["index", "batch", "transposed"])
def test_they_train_as_unsharded_with_as_many_gathers_on_every_rank(way: str, ranks: int) -> None:
    found = run_distributed(bodies.train, ranks, args=(way, None, False))
    each = bodies.WIDTH * bodies.INNER * 4
    per_rank = -(-bodies.EXPERTS // ranks) * each * LAYERS * WEIGHTS
    for gathers, shards in found:
        assert gathers == found[0][0]
        assert max(gathers) <= 2 * LAYERS * WEIGHTS, "once for a forward and once for a backward pass"
        assert per_rank < shards < 2 * per_rank


@pytest.mark.parametrize("recompute", [False, True])
def test_they_train_with_recomputation(recompute: bool) -> None:
    first, second = run_distributed(bodies.train, 2, args=("index", recompute, False))
    assert first == second


@pytest.mark.parametrize("way", ["index", "batch"])
def test_frozen_ones_pass_gradients_on(way: str) -> None:
    first, second = run_distributed(bodies.train, 2, args=(way, None, True))
    assert first == second


@pytest.mark.parametrize("way", ["index", "transposed"])
def test_no_full_weight_waits_for_the_backward_pass(way: str) -> None:
    for freed in run_distributed(bodies.kept, 2, args=(way,)):
        assert freed == [True] * LAYERS * WEIGHTS


def test_hooks_on_saved_tensors_around_them_get_what_they_save() -> None:
    """Checkpointing and offloading are such hooks."""
    for unsharded, sharded in run_distributed(bodies.seen_by_hooks_around, 2):
        assert unsharded
        assert sharded == unsharded


def test_a_module_of_experts_is_sharded_by_itself() -> None:
    for same in run_distributed(bodies.alone, 2):
        assert same


def test_wrong_uses_are_refused_and_leave_the_shards_in_place() -> None:
    for answers in run_distributed(bodies.told, 2):
        assert answers.keys() == {"fails inside", "outside of forward", "changed before backward", "create_graph"}
        assert answers["fails inside"].startswith("IndexError")
        assert "experts.0.up" in answers["outside of forward"]
        assert "replicated_modules" in answers["outside of forward"]
        assert "experts.0.up was modified by an inplace operation" in answers["changed before backward"]
        assert "create_graph=True with the sharded weight experts.0." in answers["create_graph"]


def test_they_can_stay_whole() -> None:
    for kinds in run_distributed(bodies.left_whole, 2):
        assert kinds == ["Parameter", "ETPShardedParam"]
