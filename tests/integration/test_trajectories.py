"""Real Megatron trainings with sharded weights follow the same trainings without, step by step."""

from __future__ import annotations

import pytest

from tests.integration.cases import CASES, Case
from tests.integration.megatron_run import MegatronPool, Trajectory

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

STEPS = 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sharded_training_follows_stock(megatron: MegatronPool, case: Case) -> None:
    stock = megatron.train(case.ranks, case.stock_arguments, case.script)
    sharded = megatron.train(case.ranks, case.sharded_arguments, case.script)
    assert any(trajectory.losses for trajectory in stock)
    for rank, (expected, found) in enumerate(zip(stock, sharded, strict=True)):
        _check_lengths(expected)
        _check(f"loss on rank {rank}", found.losses, expected.losses, case.tolerance)
        _check(f"evaluation on rank {rank}", found.evaluations, expected.evaluations, case.tolerance)
        _check(f"gradient norm on rank {rank}", found.grad_norms, expected.grad_norms, case.norm_tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_learns(megatron: MegatronPool, case: Case) -> None:
    """Two runs that do nothing would be equal too."""
    for trajectory in megatron.train(case.ranks, case.sharded_arguments, case.script):
        if trajectory.losses:
            assert trajectory.losses[-1] < case.falls_to * trajectory.losses[0]
            assert max(trajectory.evaluations) < case.falls_to * trajectory.losses[0]


def _check_lengths(trajectory: Trajectory) -> None:
    assert len(trajectory.grad_norms) == STEPS
    if trajectory.losses:
        assert len(trajectory.losses) == STEPS
        assert len(trajectory.evaluations) == 2  # validation and test set


def _check(what: str, found: list[float], expected: list[float], tolerance: float) -> None:
    assert len(found) == len(expected), what
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if tolerance == 0.0:
            assert one == other, f"{what} differs at step {step}"
        else:
            assert one == pytest.approx(other, rel=tolerance, abs=0.0), f"{what} differs at step {step}"
