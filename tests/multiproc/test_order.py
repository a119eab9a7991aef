"""Ranks that do not use the same sharded layers in the same order are told, with the layers' names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.multiproc import bodies_order as bodies
from tests.multiproc.bodies_order import SIDE
from tests.support.launch import on_gpus, run_distributed

pytestmark = pytest.mark.multiproc

ALIKE = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("world_size", "orders", "at", "first", "other", "where", "training"),
    [
        (2, (ALIKE, (0, 2, 1, 3)), 2, 1, 2, 1, True),
        (2, (ALIKE, (0, 2, 1, 3)), 2, 1, 2, 1, False),
        (2, (ALIKE, (0, 1, 3, 3)), 3, 2, 3, 1, False),
        (3, (ALIKE, ALIKE, (3, 1, 2, 0)), 1, 0, 3, 2, True),
    ],
)
def test_another_order_raises_on_all_ranks_with_names(
    world_size: int, orders: Sequence[Sequence[int]], at: int, first: int, other: int, where: int, training: bool
) -> None:
    # Without look-ahead a pass gathers its layers one by one, so that the places are known.
    arguments = (orders, training, {"prefetch_depth": 0})
    for raised, right in run_distributed(bodies.orders_that_differ, world_size, args=arguments):
        assert re.search(rf"ranks \[{', '.join(map(str, range(world_size)))}\] share their weights", raised), raised
        assert (
            f"number {at} was the all-gather of layers.{first}.weight on rank 0 "
            f"and the all-gather of layers.{other}.weight on rank {where}" in raised
        )
        assert right


def test_gathers_ahead_of_visits_are_compared_too() -> None:
    """Both ranks leave the predicted order, for different layers, but start equally many collectives.

    gloo ends the process where the numbers differ. On GPUs they differ one pass later, before the answer is read,
    because the ranks have learned different orders: see tests/gpu/test_transports.py.
    """
    if on_gpus():
        pytest.skip("with streams one rank gathers more before the answer is read: tests/gpu/test_transports.py")
    arguments = (((0, 2, 1, 3), (0, 3, 1, 2)), False, {"prefetch_depth": 3})
    for raised, right in run_distributed(bodies.orders_that_differ, 2, args=arguments):
        assert re.search(r"number \d+ was the .*layers\.\d.* on rank 0 and the .*layers\.\d.* on rank 1", raised)
        assert right


def test_ranks_that_differ_from_the_start_go_on_together() -> None:
    """Their gather slots were given out in different orders."""
    if on_gpus():
        pytest.skip("the host goes on to the next pass before it knows")
    for raised, right in run_distributed(bodies.orders_that_differ_from_the_start, 2):
        assert "number 2 was the all-gather of layers.1.weight on rank 0 and the all-gather of layers.2" in raised
        assert right == [True] * 3


def test_microbatches_whose_gradients_are_added_up_are_compared() -> None:
    for raised in run_distributed(bodies.orders_of_microbatches, 2):
        assert "have not used the same ones in the same order" in raised


def test_a_pass_takes_one_exchange_and_a_forward_pass_that_may_have_a_backward_none() -> None:
    for counts in run_distributed(bodies.exchanges_of_a_run, 2):
        assert counts == [1, 1, 0]


@pytest.mark.parametrize("sizes", [(SIDE, SIDE), (SIDE, 1)], ids=str)
def test_ranks_that_train_other_replicated_parameters_are_told(sizes: tuple[int, int]) -> None:
    """One that was added up with another of its size would have a wrong gradient; gloo ends the process at another."""
    if on_gpus():
        pytest.skip("the host reads the answer when the next pass ends: tests/gpu/test_transports.py")
    for raised, right in run_distributed(bodies.replicated_that_differ, 2, args=(sizes,)):
        assert "the all-reduce of own.0.weight's gradient on rank 0 and the all-reduce of own.1.weight's" in raised
        assert right
