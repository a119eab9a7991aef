"""Boxes, views and runs against numpy's own indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patches.refit.layout.boxes import (
    Box,
    TensorSpec,
    View,
    coalesce,
    contiguous_runs,
    overlapping_pair,
    row_major_strides,
    subtract,
)


@st.composite
def boxes(draw: st.DrawFn, dims: int, limit: int = 7) -> Box:
    ranges = [sorted(draw(st.lists(st.integers(0, limit), min_size=2, max_size=2, unique=True))) for _ in range(dims)]
    return Box("t", tuple(low for low, _ in ranges), tuple(high for _, high in ranges))


def mask(box: Box, limit: int = 7) -> np.ndarray:
    grid = np.zeros((limit,) * len(box.start), dtype=np.int64)
    grid[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))] = 1
    return grid


def flat_indices(view: View) -> np.ndarray:
    index = np.full(view.shape, view.offset, dtype=np.int64)
    for dim, step in enumerate(view.strides):
        index += (np.arange(view.shape[dim]) * step).reshape([-1 if d == dim else 1 for d in range(len(view.shape))])
    return index


def test_a_box_knows_its_shape_and_volume() -> None:
    box = Box("w", (2, 0), (5, 4))
    assert box.shape == (3, 4)
    assert box.volume == 12
    assert str(box) == "w[2:5, 0:4]"


@pytest.mark.parametrize("corners", [((0,), (0,)), ((3,), (2,)), ((-1,), (2,)), ((0, 0), (1,))])
def test_an_empty_or_crooked_box_is_refused(corners: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="box of w"):
        Box("w", *corners)


def test_a_scalar_is_a_box_of_one_element() -> None:
    box = TensorSpec("bias", (), "float32").box
    assert box.volume == 1
    assert list(box.chunks(1)) == [box]
    assert contiguous_runs(View("s", 3, (), ()))[1].tolist() == [3]


@given(st.integers(1, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims))))
def test_intersection_and_containment_agree_with_masks(pair: tuple[Box, Box]) -> None:
    first, second = pair
    common = first.intersect(second)
    expected = mask(first) * mask(second)
    assert np.array_equal(expected, mask(common) if common is not None else np.zeros_like(expected))
    assert first.contains(second) == bool(np.all(mask(first) >= mask(second)))


def test_boxes_of_two_tensors_have_nothing_in_common() -> None:
    assert Box("a", (0,), (4,)).intersect(Box("b", (0,), (4,))) is None
    assert not Box("a", (0,), (4,)).contains(Box("b", (1,), (2,)))


@given(st.integers(1, 3).flatmap(lambda dims: st.tuples(boxes(dims), st.lists(boxes(dims), max_size=5))))
def test_subtraction_leaves_disjoint_boxes_that_are_the_rest(case: tuple[Box, list[Box]]) -> None:
    whole, holes = case
    rest = subtract(whole, holes)
    expected = mask(whole)
    for hole in holes:
        expected *= 1 - mask(hole)
    assert np.array_equal(expected, sum((mask(box) for box in rest), np.zeros_like(expected)))


@given(st.integers(1, 3).flatmap(lambda dims: st.lists(boxes(dims), min_size=1, max_size=8)))
def test_an_overlap_is_found_exactly_when_there_is_one(found: list[Box]) -> None:
    pair = overlapping_pair(found)
    overlaps = [(i, j) for i, j in itertools.combinations(range(len(found)), 2) if found[i].intersect(found[j])]
    assert (pair is None) == (not overlaps)
    assert pair is None or pair in overlaps


@given(boxes(3), st.integers(1, 4), st.integers(1, 4))
def test_pieces_of_a_grid_coalesce_to_the_box(box: Box, parts: int, more: int) -> None:
    pieces = [small for piece in box.split(parts, 0) for small in piece.split(more, 2)]
    assert coalesce(pieces) == [box]
    assert sum(piece.volume for piece in pieces) == box.volume


@given(boxes(3), st.integers(1, 60))
def test_chunks_are_small_in_order_and_complete(box: Box, limit: int) -> None:
    chunks = list(box.chunks(limit))
    assert max(chunk.volume for chunk in chunks) <= limit
    indices = np.arange(7**3).reshape(7, 7, 7)
    order = [
        value
        for chunk in chunks
        for value in indices[tuple(slice(a, b) for a, b in zip(chunk.start, chunk.stop, strict=True))].ravel()
    ]
    assert order == indices[mask(box).astype(bool)].tolist()


@settings(max_examples=300)
@given(st.integers(1, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims), st.permutations(range(dims)))))
def test_a_cut_view_shows_the_same_elements(case: tuple[Box, Box, list[int]]) -> None:
    whole, other, order = case
    part = whole.intersect(other) or whole
    outer = [whole.shape[dim] for dim in order]
    strides = [0] * len(order)
    for dim, step in zip(order, row_major_strides(outer), strict=True):
        strides[dim] = step
    view = View("s", 5, whole.shape, tuple(strides))
    cut = view.cut(whole, part)
    inside = tuple(slice(a - o, b - o) for a, b, o in zip(part.start, part.stop, whole.start, strict=True))
    assert np.array_equal(flat_indices(cut), flat_indices(view)[inside])
    memory = torch.arange(5 + whole.volume)
    assert np.array_equal(cut.tensor(memory).numpy(), flat_indices(cut))
    low, high = cut.span
    assert (low, high) == (flat_indices(cut).min(), flat_indices(cut).max() + 1)


def test_a_cut_outside_the_whole_is_refused() -> None:
    whole = Box("w", (0, 0), (4, 4))
    view = View("s", 0, (4, 4), (4, 1))
    with pytest.raises(ValueError, match="cannot cut"):
        view.cut(whole, Box("w", (3, 0), (5, 4)))


@given(boxes(3), boxes(3), boxes(3))
def test_runs_cover_the_view_in_order(first: Box, second: Box, part: Box) -> None:
    holder = Box("t", (0, 0, 0), (7, 7, 7))
    part = part.intersect(first) or first
    small = View("a", 0, first.shape, row_major_strides(first.shape)).cut(first, part)
    large = View("b", 2, holder.shape, row_major_strides(holder.shape)).cut(holder, part)
    for view in (small, large):
        length, starts = contiguous_runs(view)
        assert np.array_equal((starts[:, None] + np.arange(length)).ravel(), flat_indices(view).ravel())


def test_runs_merge_as_far_as_the_view_allows() -> None:
    whole_rows = View("a", 0, (4, 6), (6, 1))
    length, starts = contiguous_runs(whole_rows)
    assert (length, starts.tolist()) == (24, [0])
    some_columns = View("b", 2, (4, 6), (10, 1))
    length, starts = contiguous_runs(some_columns)
    assert (length, starts.tolist()) == (6, [2, 12, 22, 32])
    assert whole_rows.contiguous
    assert not some_columns.contiguous
