"""Which rank of a shard group computes on which whole matrix, and when."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from etp import ShardLayout
from etp.matrices import MatrixPlan

SHAPES = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=24)


def planned(shapes: list[tuple[int, int]], size: int, round_numel: int) -> MatrixPlan:
    return MatrixPlan.balanced([ShardLayout(shape, size, 4) for shape in shapes], round_numel)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 9), st.integers(1, 100_000))
def test_each_matrix_has_one_owner_and_rounds_are_small(
    shapes: list[tuple[int, int]], size: int, round_numel: int
) -> None:
    plan = planned(shapes, size, round_numel)
    assert sorted(itertools.chain(*itertools.chain(*plan.rounds))) == list(range(len(shapes)))
    for owned in plan.rounds:
        assert len(owned) == size
        assert any(owned)
        for each in owned:
            numel = sum(shapes[index][0] * shapes[index][1] for index in each)
            assert numel <= round_numel or len(each) == 1
    for index, (rows, columns) in enumerate(shapes):
        assert sum(plan.numel(index, rank) for rank in range(size)) == rows * columns


def test_work_is_spread_by_its_cost_not_by_number() -> None:
    # The large one costs 64 of the small ones, which its owner would not get one by one.
    plan = planned([(8, 8), (32, 32), *[(8, 8)] * 7], 2, 1 << 20)
    ((first, second),) = plan.rounds
    assert first == (1,)
    assert second == (0, 2, 3, 4, 5, 6, 7, 8)


def test_equal_matrices_go_to_all_ranks_alike() -> None:
    plan = planned([(64, 16)] * 12, 4, 2 * 64 * 16)
    assert plan.rounds == (((0, 4), (1, 5), (2, 6), (3, 7)), ((8,), (9,), (10,), (11,)))
