"""Weights of models that are never announced: what other models some ranks have does not matter."""

from __future__ import annotations

import math

import pytest

from tests.multiproc import bodies_unannounced as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


# torch counts exchanges of symmetric memory in each process: ranks without any past would wait for number 0.
NO_PAST_ON_GPUS = pytest.mark.cpu_only(
    "copy_engine is for ranks that have made as much symmetric memory as their peers"
)


@pytest.mark.parametrize("others", [pytest.param((), marks=NO_PAST_ON_GPUS), bodies.SMALL], ids=["none", "small"])
def test_ranks_with_another_past_gather_alike(others: tuple[tuple[int, int], ...]) -> None:
    for losses in run_distributed(bodies.ranks_with_another_past, 4, args=(others,)):
        assert len(losses) == 4
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] != losses[0]


def test_a_model_that_is_gone_on_one_rank_is_gone_on_all() -> None:
    assert run_distributed(bodies.a_model_that_only_one_rank_has_let_go, 2, fresh=True) == [True, True]
