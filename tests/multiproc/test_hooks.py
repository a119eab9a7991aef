"""Hooks of sharded weights run as often as those of plain ones, and see whole gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc import bodies_hooks as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


def test_an_optimizer_inside_backward_matches() -> None:
    run_distributed(bodies.optimizer_in_backward, 2)


def test_a_hook_that_raises_leaves_a_clean_next_step() -> None:
    assert run_distributed(bodies.a_hook_that_raises, 2) == [2, 2]


def test_hooks_run_once_a_backward_even_for_weights_used_twice() -> None:
    for counts in run_distributed(bodies.hook_counts, 2):
        assert set(counts.values()) == {1}


def test_hooks_of_a_microbatch_do_not_run_in_the_next() -> None:
    for iterations in run_distributed(bodies.hooks_of_microbatches, 2):
        for counts in iterations:
            assert len(counts) == 5
            assert set(counts.values()) == {1}


@pytest.mark.parametrize("ways", [{}, {"tied": True}], ids=str)
def test_hooks_run_once_a_backward_through_two_forwards(ways: dict[str, Any]) -> None:
    run_distributed(bodies.hooks_of_two_forwards, 2, args=(ways,))


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensor_hooks_on_replicated_parameters_see_gradients(world_size: int) -> None:
    run_distributed(bodies.hooks_on_replicated, world_size)
