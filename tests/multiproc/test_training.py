"""Sharded training equals unsharded training, in every way a model can be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiproc import bodies_training as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc

F32, BF16, F64, F16 = torch.float32, torch.bfloat16, torch.float64, torch.float16


@pytest.mark.parametrize("scenario", bodies.SCENARIOS)
def test_two_ranks_match_the_unsharded_model(scenario: str) -> None:
    for counts in run_distributed(bodies.matches_oracle, 2, args=("tiny", scenario, 3, F32, {})):
        assert counts["claims"] >= 10, "the poison was not there"
        assert counts["leases"] >= 3, "the poison was not there"


@pytest.mark.parametrize("scenario", ["plain", "several_backwards", "repeats_blocks", "plain_checkpoint"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_match_in_rank_order(world_size: int, scenario: str) -> None:
    run_distributed(bodies.matches_oracle, world_size, args=("tied", scenario, 2, F32, {}))


@pytest.mark.parametrize("model", ["tied", "no_bias", "attention", "tied_by_hand", "long_sum", "transposed"])
def test_other_models_match(model: str) -> None:
    run_distributed(bodies.matches_oracle, 2, args=(model, "several_backwards", 2, F32, {}))


@pytest.mark.parametrize("options", [{}, {"prefetch_depth": 3}], ids=str)
def test_weights_written_inside_of_a_forward_pass_match(options: dict[str, Any]) -> None:
    arguments = ("constrained", "several_backwards", 3, F32, {"transport": "c10d", **options})
    run_distributed(bodies.matches_oracle, 2, args=arguments)


def test_weights_written_between_evaluations_of_a_method_match() -> None:
    """More of them than visits that one pass may have."""
    run_distributed(bodies.written_between_calls, 2, args=(80,))


@pytest.mark.parametrize("dtype", [BF16, F64, F16], ids=str)
def test_other_dtypes_match(dtype: torch.dtype) -> None:
    run_distributed(bodies.matches_oracle, 2, args=("tiny", "several_backwards", 2, dtype, {}))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny", {"prefetch_depth": 0}),
        ("tiny", {"prefetch_depth": 3}),
        ("tied", {"resident_bytes": 4000}),
        ("tied", {"resident_bytes": 1 << 30, "prefetch_depth": 0}),
        ("tiny", {"grad_reduction": "sum"}),
        ("tiny", {"pad_for_alignment": 1}),
        ("tiny", {"pad_for_alignment": 5}),
        ("tied", {"fp32_accumulation": False}),
        ("tiny", {"reuse_across_forwards": True, "resident_bytes": 1 << 30}),
        ("tied", {"reuse_across_forwards": True}),
        ("tiny", {"timeout_s": 30.0}),
    ],
    ids=str,
)
def test_every_option_matches(model: str, options: dict[str, Any]) -> None:
    run_distributed(bodies.matches_oracle, 2, args=(model, "several_backwards", 2, F32, options))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_penalties_count_as_often_as_without_sharding(reduction: str) -> None:
    run_distributed(bodies.matches_oracle, 2, args=("tied", "penalises_weights", 2, F32, {"grad_reduction": reduction}))


def test_even_sizes_need_no_padding() -> None:
    run_distributed(bodies.even_sizes_without_padding, 2)


@pytest.mark.parametrize("scenario", ["several_backwards", "fails_between_backwards", "siamese", "repeats_blocks"])
def test_one_reduction_per_iteration_matches(scenario: str) -> None:
    run_distributed(bodies.one_reduction_per_iteration, 2, args=(scenario,))


@pytest.mark.parametrize("name", bodies.OPTIMIZERS)
def test_every_optimizer_matches_bitwise(name: str) -> None:
    run_distributed(bodies.matches_with_optimizer, 2, args=(name,))


def test_a_group_of_one_matches() -> None:
    run_distributed(bodies.matches_with_optimizer, 1, args=("sgd",))


def test_frozen_and_thawed_weights_match() -> None:
    run_distributed(bodies.frozen_weights, 2)


def test_weights_frozen_before_their_backward_pass_match() -> None:
    run_distributed(bodies.frozen_before_backward, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_a_failed_backward_pass_adds_nothing_to_main_grad_behind_zeros(size: int) -> None:
    assert run_distributed(bodies.zeros_in_main_grad, size) == [[True] * 3] * size


@pytest.mark.parametrize("once", [False, True])
def test_gradients_of_another_dtype_match(once: bool) -> None:
    run_distributed(bodies.gradients_of_another_dtype, 2, args=({"reduce_once_per_iteration": once},))


def test_two_models_can_be_interleaved() -> None:
    run_distributed(bodies.two_models_interleaved, 2)


def test_autocast_matches() -> None:
    run_distributed(bodies.autocast, 2)
    run_distributed(bodies.float64_under_autocast, 2)


def test_mixed_dtypes_are_refused_as_torch_refuses_them() -> None:
    plain, sharded = run_distributed(bodies.mixed_dtypes_are_an_error, 2)[0]
    assert plain == sharded
    assert "same dtype" in plain


@pytest.mark.slow
def test_compiled_models_and_optimizer_steps_match() -> None:
    # Fresh, because dynamo remembers what it has traced.
    run_distributed(bodies.compiled, 2, fresh=True)


@pytest.mark.slow
def test_models_compiled_into_graphs_match() -> None:
    run_distributed(bodies.compiled_into_graphs, 2, fresh=True)
