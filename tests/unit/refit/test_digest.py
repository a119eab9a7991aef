"""Digests: parts compose, and every kind of mistake shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.layout.digest import MASK, combine, digest_array

SHAPE = (37, 29)
WHOLE = Box("w", (0, 0), SHAPE)


def odd_hash(index: int) -> int:
    x = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def reference(values: np.ndarray, box: Box, shape: tuple[int, ...]) -> int:
    """The definition, one element at a time, in Python's integers."""
    total = 0
    for place, bits in zip(np.ndindex(*box.shape), values.ravel().tolist(), strict=True):
        index = [p + low for p, low in zip(place, box.start, strict=True)]
        row = int(np.ravel_multi_index(index[:-1], shape[:-1])) if len(shape) > 1 else 0
        column = index[-1] if shape else 0
        total += ((bits ^ bits >> 32) + 1) * odd_hash(row) * odd_hash(column ^ 0x5851F42D4C957F2D)
    return total & MASK


def random_bits(width: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 8 * width, shape, dtype=f"u{width}")


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_digest_follows_the_definition(width: int) -> None:
    values = random_bits(width)
    box = Box("w", (3, 5), (30, 29))
    part = values[3:30, 5:29]
    assert digest_array(np.ascontiguousarray(part), box, SHAPE) == reference(part, box, SHAPE)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (300, 5000), (65, 1 << 16), (64, 63), (63, 64)])
@pytest.mark.parametrize("width", [1, 2])
def test_matrices_of_narrow_elements_are_summed_exactly(width: int, rows: int, columns: int) -> None:
    """Parts of several rows and columns, with many elements whose bits are all equal, against products of integers."""
    box, shape = Box("w", (5, 9), (5 + rows, 9 + columns)), (10_000, 100_000)
    values = random_bits(width, 3, (rows, columns))
    values[::4], values[1::4] = np.iinfo(values.dtype).max, 0
    row = np.array([odd_hash(5 + at) for at in range(rows)], dtype=np.uint64)
    column = np.array([odd_hash((9 + at) ^ 0x5851F42D4C957F2D) for at in range(columns)], dtype=np.uint64)
    sums = (values.astype(np.uint64) + np.uint64(1)) @ column
    assert digest_array(values, box, shape) == int(np.dot(sums, row))


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (2, 1, 3, 2)])
def test_tensors_of_any_number_of_dimensions_follow_the_definition(shape: tuple[int, ...]) -> None:
    values = random_bits(2, 5, shape)
    box = Box("w", tuple(int(extent > 2) for extent in shape), shape)
    part = np.ascontiguousarray(values[tuple(slice(low, None) for low in box.start)])
    assert digest_array(part, box, shape) == reference(part, box, shape)


@given(st.integers(0, 36), st.integers(0, 28), st.integers(0, 2**32))
def test_parts_compose_in_any_order(row: int, column: int, seed: int) -> None:
    values = random_bits(2, seed)
    parts = [
        Box("w", (top, left), (bottom, right))
        for top, bottom in ((0, row), (row, 37))
        for left, right in ((0, column), (column, 29))
        if top < bottom and left < right
    ]
    digests = [
        digest_array(values[box.start[0] : box.stop[0], box.start[1] : box.stop[1]], box, SHAPE) for box in parts
    ]
    assert combine(reversed(digests)) == digest_array(values, WHOLE, SHAPE)


@pytest.mark.parametrize("shape", [(1600, 701), (2, (1 << 20) + 701)])
def test_tensors_and_rows_longer_than_a_chunk_compose(shape: tuple[int, int]) -> None:
    values = random_bits(2, 3, shape)
    whole = Box("w", (0, 0), shape)
    parts = list(whole.chunks(100_000))
    pieces = np.split(values.ravel(), np.cumsum([part.volume for part in parts])[:-1])
    digests = [digest_array(piece, part, shape) for piece, part in zip(pieces, parts, strict=True)]
    assert combine(digests) == digest_array(values, whole, shape)


@given(st.integers(0, 37 * 29 - 1), st.integers(0, 63))
def test_a_flipped_bit_shows(place: int, bit: int) -> None:
    values = random_bits(8)
    flipped = values.copy()
    flipped.ravel()[place] ^= np.uint64(1 << bit)
    assert digest_array(flipped, WHOLE, SHAPE) != digest_array(values, WHOLE, SHAPE)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [2, 4, 37 * 29])
def test_flipped_signs_do_not_cancel(width: int, count: int) -> None:
    values = random_bits(width)
    flipped = values.copy()
    flipped.ravel()[:count] ^= values.dtype.type(1 << 8 * width - 1)
    assert digest_array(flipped, WHOLE, SHAPE) != digest_array(values, WHOLE, SHAPE)


def test_swapped_shifted_and_missing_parts_show() -> None:
    values = random_bits(2)
    expected = digest_array(values, WHOLE, SHAPE)
    swapped = values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert digest_array(swapped, WHOLE, SHAPE) != expected
    assert digest_array(np.roll(values, 1), WHOLE, SHAPE) != expected
    assert digest_array(np.ascontiguousarray(values[:, ::-1]), WHOLE, SHAPE) != expected
    crossed = values.copy()  # the same elements in each row and in each column
    crossed[:2, :2] = [[1, 2], [2, 1]]
    mirrored = crossed.copy()
    mirrored[:2, :2] = [[2, 1], [1, 2]]
    assert digest_array(crossed, WHOLE, SHAPE) != digest_array(mirrored, WHOLE, SHAPE)
    zeros = np.zeros((1, 29), dtype=np.uint16)
    assert digest_array(zeros, Box("w", (0, 0), (1, 29)), SHAPE) != 0


def test_a_wrong_number_of_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="1073 elements, not 4"):
        digest_array(np.zeros(4, dtype=np.uint8), WHOLE, SHAPE)


class Recorder(TorchDispatchMode):
    """Notes the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.called.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_no_operation_of_torch_is_used(width: int) -> None:
    """Some leave oneDNN's primitives in a cache of the thread, which has crashed engines when the thread ended."""
    shape = (128, 256)
    with Recorder() as recorder:
        digest_array(random_bits(width, 1, shape), Box("w", (0, 0), shape), shape)
    assert recorder.called == []
