"""Clipping by norm and loss scaling look at whole gradients, through PyTorch's own functions and etp's."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.multiproc import bodies_clipping as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc

INF = float("inf")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 3.5, 0.0])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_way_to_clip_equals_the_unsharded_one(world_size: int, norm_type: float) -> None:
    """Tied and frozen weights, replicated norms and biases, and with 4 ranks shards that are all padding."""
    run_distributed(bodies.clip_equals_whole, world_size, args=("tied", norm_type, F32))


@pytest.mark.parametrize("norm_type", [2.0, INF, -INF, -2.0])
@pytest.mark.parametrize("world_size", [2, 4])
def test_padding_is_no_smallest_element(world_size: int, norm_type: float) -> None:
    run_distributed(bodies.clip_equals_whole, world_size, args=("linears", norm_type, F32))


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_other_dtypes_clip_alike(dtype: torch.dtype) -> None:
    run_distributed(bodies.clip_equals_whole, 3, args=("linears", 2.0, dtype))


def test_a_hook_sees_the_norm_of_the_whole_gradient() -> None:
    run_distributed(bodies.norms_inside_hooks, 2)


def test_experts_count_over_their_own_group() -> None:
    for messages in run_distributed(bodies.clip_with_experts, 4):
        assert len(messages) == 3
        for message in messages:
            assert message.startswith("clip_grad_norm_: ranks [0, 1, 2, 3] share first.weight but have total norms [")
            assert "clip_grads_with_norm_" in message


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", bodies.OPTIMIZERS)
def test_loss_scaling_equals_the_unsharded_one(name: str, unscale: bool) -> None:
    answers = run_distributed(bodies.scaler_equals_whole, 2, args=(name, unscale))
    scales = answers[0][0]
    assert any(later < earlier for earlier, later in itertools.pairwise(scales)), "nothing overflowed"
    assert any(later > earlier for earlier, later in itertools.pairwise(scales)), "all overflowed"
    assert answers[0][1] != answers[1][1], "each overflow was on both ranks"


@pytest.mark.parametrize("culprit", [0, 3])
def test_an_overflow_on_one_rank_is_one_on_all(culprit: int) -> None:
    run_distributed(bodies.overflow_on_one_rank, 4, args=(culprit,))


def test_norms_and_steps_that_would_be_wrong_are_refused() -> None:
    for messages in run_distributed(bodies.refusals, 2):
        for name in ("etp", "torch", "scaler", "step", "scaled", "scaled together", "masked", "replaced"):
            assert messages[name].startswith("EtpStateError: the gradient of "), name
            assert "wait_async_comms" in messages[name]
        assert messages["main_grad"].startswith("ValueError: head.weight has its gradient in main_grad")
        assert "non-finite" in messages["nonfinite"]


@pytest.mark.parametrize("how", ["module", "for", "foreach"])
def test_abandoned_sums_are_forgotten_with_gradients_zeroed_in_place(how: str) -> None:
    run_distributed(bodies.abandoned_sums, 2, args=(how,))


def test_abandoned_sums_do_not_come_back_with_the_gradient_of_a_penalty() -> None:
    run_distributed(bodies.abandoned_sums_of_a_penalised_weight, 2)
