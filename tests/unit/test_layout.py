"""ShardLayout: every row in exactly one shard, padding at the tail only, shapes that Megatron computes too."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etp.layout import ShardLayout

rows = st.integers(1, 700)
shards = st.integers(1, 64)
alignments = st.integers(1, 48)
tails = st.lists(st.integers(1, 9), max_size=3)


@given(rows, shards, alignments, tails)
@example(1, 64, 16, [])
@example(129, 8, 16, [7])
def test_every_logical_row_lies_in_exactly_one_shard(rows: int, shards: int, align: int, tail: list[int]) -> None:
    layout = ShardLayout((rows, *tail), shards, align)
    covered = [row for rank in range(shards) for row in range(*layout.logical_range(rank))]
    assert covered == list(range(rows))


@given(rows, shards, alignments)
def test_padding_comes_after_the_last_logical_row_of_each_shard(rows: int, shards: int, align: int) -> None:
    layout = ShardLayout((rows, 3), shards, align)
    for rank in range(shards):
        start, stop = layout.padded_range(rank)
        first, last = layout.logical_range(rank)
        assert stop - start == layout.shard_rows
        assert layout.logical_rows(rank) == last - first
        # A shard with logical rows starts with them; padding below it means that no later shard has any.
        assert first == min(start, rows)
        if layout.logical_rows(rank) < layout.shard_rows:
            assert all(layout.logical_rows(later) == 0 for later in range(rank + 1, shards))


@given(rows, shards, alignments)
def test_padding_is_the_least_that_aligns_every_shard(rows: int, shards: int, align: int) -> None:
    layout = ShardLayout((rows, 5), shards, align)
    assert layout.shard_rows % align == 0
    assert layout.padded_rows == layout.shard_rows * shards
    assert 0 <= layout.pad_rows < align * shards
    assert layout.rows + layout.pad_rows == layout.padded_rows


@given(rows, shards, st.integers(0, 48), tails)
def test_agrees_with_megatrons_rule(rows: int, shards: int, align: int, tail: list[int]) -> None:
    """Megatron-core (generalized_tensor_parallelism.py) pads dim 0 to a multiple of ``align x shards`` if align > 0."""
    if align == 0 and rows % shards:
        with pytest.raises(ValueError, match="do not divide"):
            ShardLayout((rows, *tail), shards, align)
        return
    layout = ShardLayout((rows, *tail), shards, align)
    alignment = align * shards
    pad_length = (alignment - rows % alignment) % alignment if align > 0 else 0
    assert layout.pad_rows == pad_length
    assert layout.shard_shape == ((rows + pad_length) // shards, *tail)


@given(rows, shards, st.integers(0, 48), tails)
def test_a_row_has_the_elements_of_the_other_dimensions(rows: int, shards: int, align: int, tail: list[int]) -> None:
    if align == 0:
        rows *= shards
    layout = ShardLayout((rows, *tail), shards, align)
    assert layout.row_numel == math.prod(tail)
    assert math.prod(layout.padded_shape) == shards * math.prod(layout.shard_shape)


def test_a_shard_can_be_padding_from_its_first_row_on() -> None:
    layout = ShardLayout((20, 4), 4, 16)
    assert layout.shard_shape == (16, 4)
    assert [layout.logical_range(rank) for rank in range(4)] == [(0, 16), (16, 20), (20, 20), (20, 20)]
    assert [layout.logical_rows(rank) for rank in range(4)] == [16, 4, 0, 0]


def test_without_padding_shards_are_equal_parts() -> None:
    layout = ShardLayout((12, 2), 3, 0)
    assert layout.pad_rows == 0
    assert [layout.padded_range(rank) for rank in range(3)] == [(0, 4), (4, 8), (8, 12)]


@pytest.mark.parametrize(
    ("shape", "num_shards", "align", "message"),
    [
        ((10, 4), 4, 0, "10 rows do not divide over 4 shards and pad_for_alignment is 0"),
        ((), 2, 16, r"cannot shard a weight of shape \(\)"),
        ((0, 4), 2, 16, r"shape \(0, 4\): every dimension must be positive"),
        ((4, -1), 2, 16, r"shape \(4, -1\)"),
        ((4, 4), 0, 16, "num_shards is 0"),
        ((4, 4), -2, 16, "num_shards is -2"),
        ((4, 4), 2, -1, "pad_for_alignment is -1; use 0 to forbid padding"),
    ],
)
def test_impossible_cuts_are_refused(shape: tuple[int, ...], num_shards: int, align: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout(shape, num_shards, align)


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_shard_that_does_not_exist_has_no_range(rank: int) -> None:
    layout = ShardLayout((8, 8), 4, 1)
    for query in (layout.padded_range, layout.logical_range, layout.logical_rows):
        with pytest.raises(IndexError, match=f"shard {rank} of a weight with 4 shards"):
            query(rank)


def test_layouts_are_values() -> None:
    assert ShardLayout((6, 2), 2) == ShardLayout([6, 2], 2, 16)  # type: ignore[arg-type]
    assert len({ShardLayout((6, 2), 2), ShardLayout((6, 2), 2), ShardLayout((6, 2), 3)}) == 2
