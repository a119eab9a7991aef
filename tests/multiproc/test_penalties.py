"""Terms of the weights in a loss count as without sharding, whatever has been captured into a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tests.multiproc import bodies_penalties as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("mean", [False, True])
def test_a_penalty_counts_once_for_each_rank_whose_loss_has_it(mean: bool) -> None:
    for answers in run_distributed(bodies.penalties_beside_captures, 2, args=(mean,)):
        assert len(answers) == 2 * 15
        assert {name: value for name, value in answers.items() if abs(value) > 1e-5} == {}


def test_a_function_of_the_users_own_is_refused_where_its_gradient_cannot_be_told_apart() -> None:
    for answers in run_distributed(bodies.own_functions_beside_reduced_gradients, 2):
        right = ["layer", "penalty in a checkpoint", "layer, behind an error"]
        assert [name for name, error in answers.items() if not error] == right
        assert all("pass the function weight * 1" in error for error in answers.values() if error)
        assert len(answers) == 6


def test_a_function_of_the_users_own_counts_once_for_each_rank_if_its_weight_was_frozen() -> None:
    for counts in run_distributed(bodies.own_functions_of_thawed_experts, 2):
        assert counts == pytest.approx([1.0, 1.0])


def test_a_function_of_the_users_own_counts_once_for_each_rank_after_a_failed_backward_pass() -> None:
    assert run_distributed(bodies.own_function_behind_a_failure, 2) == pytest.approx([1.0, 1.0])


def test_a_function_of_the_users_own_in_a_failed_pass_is_named_as_such_and_the_pass_can_be_repeated() -> None:
    for error, count in run_distributed(bodies.penalty_behind_a_failed_forward, 2):
        assert "got the shard 0.weight itself, in this pass or in one that failed before it" in error
        assert count == pytest.approx(1.0)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_padding_counts_in_no_term(ranks: int, mean: bool) -> None:
    for answers in run_distributed(bodies.terms_of_padded_weights, ranks, args=(mean,)):
        assert len(answers) == 7
        wrong = {name: found for name, found in answers.items() if found[2] or max(found) > 1e-5}
        assert wrong == {}


@pytest.mark.parametrize("once", [False, True])
def test_hooks_run_with_penalties_as_without_sharding_even_before_a_layer_is_used(once: bool) -> None:
    for ran in run_distributed(bodies.penalties_without_a_layer, 2, args=(once,)):
        assert ran == {
            "penalties of 0.weight": ["0.weight"],
            "penalties of 1.weight": ["1.weight"],
            "penalties of 0.weight, 1.weight": ["0.weight", "1.weight"],
            "a layer": ["0.weight"],
            "used twice beside penalties": ["0.weight", "1.weight"],
            "recomputed beside a penalty": ["0.weight", "0.weight"],  # autograd adds to it twice
            "penalty behind a layer": ["0.weight"],
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_in_main_grad_count_and_run_hooks_as_in_stock_megatron(dtype: torch.dtype) -> None:
    for answers in run_distributed(bodies.penalties_in_main_grad, 2, args=(dtype,)):
        for description, (stock, ours, same) in answers.items():
            assert ours == stock != [], description
            # With a layer in bf16, autograd adds the penalty's gradient to the layer's before main_grad gets the sum.
            assert same or "layer" in description, description
        assert answers["penalties"][0] == ["0.weight", "1.weight"]
