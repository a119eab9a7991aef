"""Grouped layers of 1 to 128 experts equal unsharded ones, with uneven and no tokens, and spread over ranks."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_experts as bodies
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("a GPU's GEMMs of few rows round otherwise in other batches")]


@pytest.mark.parametrize("experts", [1, 3, 16, 128])
def test_any_number_of_experts_equals_the_unsharded_layer(experts: int) -> None:
    first, second = run_distributed(bodies.any_number, 2, args=(experts,))
    assert first[1] == 0
    assert sum(second) > 0


@pytest.mark.parametrize("experts", [2, 6, 128])
def test_experts_spread_over_ranks_equal_the_unsharded_layer(experts: int) -> None:
    counts = run_distributed(bodies.spread_over_ranks, 4, args=(experts,))
    assert counts[0][1] == 0
    assert all(sum(of_rank) > 0 for of_rank in counts)
