"""Real Megatron trainings with sharded weights follow the same trainings without, step by step."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cases import CASES, COUNT_ZEROS, LOG_NORM, Case
from tests.integration.megatron_run import MegatronPool, Trajectory
from tests.support.launch import on_gpus

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

STEPS = 20
TRANSPORTS = ("copy_engine", "c10d") if on_gpus() else ("auto",)


def _parameters() -> list[Any]:
    """Cases and transports of the session's devices. Those that share a stock run go to one worker of pytest-xdist."""
    found = []
    for case in CASES:
        reason = case.cpu_only if on_gpus() else case.gpu_only
        for transport in () if reason else TRANSPORTS:
            name = f"{case.ranks}ranks-{case.name}-{transport}"
            marks = [pytest.mark.xdist_group(case.name)]
            marks += [pytest.mark.quick] if case.quick else []
            marks += [pytest.mark.variant] if case.variant else []
            if case.needs and importlib.util.find_spec(case.needs) is None:
                marks.append(pytest.mark.skip(reason=f"needs {case.needs}"))
            found.append(pytest.param(case, transport, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("case", "transport"), _parameters())
def test_sharded_training_follows_stock(megatron: MegatronPool, case: Case, transport: str) -> None:
    stock = megatron.train(case.ranks, case.stock_arguments, case.script)
    sharded = megatron.train(case.ranks, case.sharded_arguments(transport), case.script)
    assert any(trajectory.losses for trajectory in stock)
    for rank, (expected, found) in enumerate(zip(stock, sharded, strict=True)):
        _check_lengths(expected)
        _check(f"loss on rank {rank}", found.losses, expected.losses, case.loss_tolerance)
        _check(f"evaluation on rank {rank}", found.evaluations, expected.evaluations, case.loss_tolerance)
        _check(f"gradient norm on rank {rank}", found.grad_norms, expected.grad_norms, case.norm_tolerance)
        _check(f"norm of weights on rank {rank}", found.parameter_norms, expected.parameter_norms, case.loss_tolerance)
        assert bool(expected.parameter_norms) == (LOG_NORM in case.common)
        _check_zeros(case, found.zeros, expected.zeros)


@pytest.mark.parametrize(("case", "transport"), _parameters())
def test_training_learns(megatron: MegatronPool, case: Case, transport: str) -> None:
    """Two runs that do nothing would be equal too."""
    for trajectory in megatron.train(case.ranks, case.sharded_arguments(transport), case.script):
        if trajectory.losses:
            assert trajectory.losses[-1] < case.falls_to * trajectory.losses[0]
            assert max(trajectory.evaluations) < case.falls_to * trajectory.losses[0]


def test_evaluation_alone(megatron: MegatronPool) -> None:
    """``--skip-train`` wraps no model for training."""
    (case,) = [case for case in CASES if case.name == "etp2_four_microbatches"]
    stock = megatron.train(case.ranks, (*case.stock_arguments, "--skip-train"))
    sharded = megatron.train(case.ranks, (*case.sharded_arguments(TRANSPORTS[0]), "--skip-train"))
    for expected, found in zip(stock, sharded, strict=True):
        assert not found.grad_norms
        assert len(expected.evaluations) == 2
        _check("evaluation", found.evaluations, expected.evaluations, case.loss_tolerance)


@pytest.mark.cpu_only("Megatron's own layers mark the biases")
@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer", "--expert-model-parallel-size 2"])
def test_experts_with_biases_train_alike_where_attention_is_cut(
    megatron: MegatronPool, tmp_path: Path, flags: str
) -> None:
    (case,) = [case for case in CASES if case.name == "moe_etp2_expert_etp2_biases"]
    model = [*case.stock_arguments, "--vocab-size", "252", *flags.split()]  # padded to 252 whether cut or not
    # With another cut, ranks would draw other initial weights.
    megatron.train(2, [*model, "--save", str(tmp_path), "--save-interval", "20", "--no-save-optim"])
    model += ["--load", str(tmp_path), "--finetune", "--no-load-optim"]
    cut = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1"]
    expected, found = (megatron.train(2, arguments)[-1] for arguments in (model, [*model, *cut]))
    _check("loss", found.losses, expected.losses, case.loss_tolerance)
    _check("gradient norm", found.grad_norms, expected.grad_norms, case.norm_tolerance)


def _check_lengths(trajectory: Trajectory) -> None:
    assert len(trajectory.grad_norms) == STEPS
    if trajectory.losses:
        assert len(trajectory.losses) == STEPS
        assert len(trajectory.evaluations) == 2  # validation and test set


def _check(what: str, found: list[float], expected: list[float], tolerance: float) -> None:
    assert len(found) == len(expected), what
    differences = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    if not differences:
        return
    assert all(map(math.isfinite, differences)), f"{what}: {found} instead of {expected}"
    first = next((step for step, difference in enumerate(differences) if difference > tolerance), None)
    assert first is None, (
        f"{what} differs first at step {first}: {found[first]} instead of {expected[first]}; "
        f"by at most {max(differences):.2g} over all steps, and may by {tolerance:.2g}"
    )


def _check_zeros(case: Case, found: list[float], expected: list[float]) -> None:
    """A sum that is rounded otherwise may be zero or not; the padding of these small models is a fifth of them."""
    assert any(expected) == (COUNT_ZEROS in case.common)
    assert found == pytest.approx(expected, rel=0.05, abs=2)
