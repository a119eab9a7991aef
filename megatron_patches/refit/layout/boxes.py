"""Regions of tensors and their layout in memory. Integers only; torch is needed only to turn a view into a tensor.

A :class:`Box` is a region of one Hugging Face tensor in that tensor's global coordinates. It does not depend on who
holds it. A :class:`View` says where the elements of a box lie in one flat storage: offset and strides, counted in
elements. Box and view have the same dimensions, so cutting a box cuts its view (:meth:`View.cut`), and two parties that
agree on boxes need to know nothing about each other's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import ge, le, sub
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.layout.dtypes import itemsize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """One whole tensor of the model.

    Attributes:
        name: Hugging Face name, such as ``model.layers.3.self_attn.q_proj.weight``.
        shape: global shape, unsharded and unpadded.
        dtype: torch's name of the dtype, such as ``bfloat16``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * itemsize(self.dtype)

    @property
    def box(self) -> Box:
        """The whole tensor as a box."""
        return Box(self.name, (0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region ``start[d] <= index[d] < stop[d]`` of the tensor ``tensor``. Never empty.

    Raises:
        ValueError: if the two corners differ in length, or the region is empty or starts below zero.
    """

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box of {self.tensor}: corners {self.start} and {self.stop} differ in length")
        for low, high in zip(self.start, self.stop, strict=True):
            if not 0 <= low < high:
                raise ValueError(f"box of {self.tensor}: {self.start} to {self.stop} is empty or out of range")

    def __str__(self) -> str:
        ranges = ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True))
        return f"{self.tensor}[{ranges}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(map(sub, self.stop, self.start))

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        return (
            self.tensor == other.tensor
            and len(self.start) == len(other.start)
            and all(map(le, self.start, other.start))
            and all(map(ge, self.stop, other.stop))
        )

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None if there is none."""
        if self.tensor != other.tensor:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(self.tensor, start, stop)

    def with_range(self, dim: int, start: int, stop: int) -> Box:
        """The same box with another range, in global coordinates, in dimension ``dim``."""
        return Box(
            self.tensor,
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def split(self, parts: int, dim: int) -> list[Box]:
        """Cuts the box in dimension ``dim`` into at most ``parts`` boxes whose extents differ by one at most."""
        extent = self.stop[dim] - self.start[dim]
        parts = max(1, min(parts, extent))
        cuts = [self.start[dim] + extent * part // parts for part in range(parts + 1)]
        return [self.with_range(dim, low, high) for low, high in pairwise(cuts)]

    def chunks(self, max_volume: int) -> Iterator[Box]:
        """Cuts the box, outermost dimensions first, into boxes of at most ``max_volume`` elements, in row-major order.

        Raises:
            ValueError: if ``max_volume`` is not positive.
        """
        if max_volume < 1:
            raise ValueError(f"cannot cut {self} into chunks of {max_volume} elements")
        if self.volume <= max_volume:
            yield self
            return
        dim = next(index for index, extent in enumerate(self.shape) if extent > 1)
        inner = math.prod(self.shape[dim + 1 :])
        step = max(1, max_volume // inner)
        for low in range(self.start[dim], self.stop[dim], step):
            yield from self.with_range(dim, low, min(low + step, self.stop[dim])).chunks(max_volume)


@dataclass(frozen=True, slots=True, order=True)
class View:
    """Where the elements of a box lie in one flat storage.

    Attributes:
        storage: name of the storage within its party.
        offset: index of the first element in the storage.
        shape: extents, equal to those of the box.
        strides: distance in elements from one index to the next, by dimension.
    """

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def cut(self, whole: Box, part: Box) -> View:
        """The view of ``part``, if this is the view of ``whole``.

        Raises:
            ValueError: if ``part`` is not inside ``whole``, or ``whole`` does not have this view's shape.
        """
        if whole.shape != self.shape or not whole.contains(part):
            raise ValueError(f"cannot cut {part} out of a view of shape {self.shape} of {whole}")
        moved = sum((low - base) * step for low, base, step in zip(part.start, whole.start, self.strides, strict=True))
        return View(self.storage, self.offset + moved, part.shape, self.strides)

    @property
    def span(self) -> tuple[int, int]:
        """First element, and one past the last, that the view touches in its storage."""
        reach = [(extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True)]
        low = self.offset + sum(step for step in reach if step < 0)
        high = self.offset + sum(step for step in reach if step > 0)
        return low, high + 1

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another, in row-major order."""
        merged = _merge_dims((self,))
        return not merged or (len(merged) == 1 and merged[0][1] == (1,))

    def tensor(self, storage: torch.Tensor) -> torch.Tensor:
        """The view as a tensor that shares memory with ``storage``, a tensor of one dimension."""
        return storage.as_strided(self.shape, self.strides, storage.storage_offset() + self.offset)


def contiguous_runs(view: View) -> tuple[int, NDArray[np.int64]]:
    """The longest contiguous stretches of a view: neighbouring dimensions are merged where its strides allow it.

    Returns:
        Elements in each stretch; the storage index at which each begins, int64, in row-major order of the box.
    """
    merged = _merge_dims((view,))
    length = merged.pop()[0] if merged and merged[-1][1] == (1,) else 1
    begin = np.full(1, view.offset, dtype=np.int64)
    for extent, (step,) in merged:
        begin = (begin[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
    return length, begin


@dataclass(frozen=True, slots=True)
class Pitch:
    """Rows of equal length at equal distances in each of two views.

    Attributes:
        rows: number of rows.
        length: elements in a row.
        steps: elements from one row to the next, in each view.
    """

    rows: int
    length: int
    steps: tuple[int, int]


def pitch_of(first: View, second: View) -> Pitch | None:
    """The rows that two views of one box consist of; one row if both are contiguous, None if they are not rows."""
    merged = _merge_dims((first, second))
    length = merged.pop()[0] if merged and merged[-1][1] == (1, 1) else 1
    if len(merged) > 1:
        return None
    rows, steps = merged[0] if merged else (1, (length, length))
    return Pitch(rows, length, (steps[0], steps[1])) if min(steps) >= length else None


def _merge_dims(views: Sequence[View]) -> list[tuple[int, tuple[int, ...]]]:
    """(extent, stride in each view) by dimension. Skips extents of 1; merges neighbours where all views allow it."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim, extent in enumerate(views[0].shape):
        if extent == 1:
            continue
        steps = tuple(view.strides[dim] for view in views)
        if merged and all(outer == extent * inner for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * extent, steps)
        else:
            merged.append((extent, steps))
    return merged


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def overlapping_pair(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes of one tensor that share an element, or None if all are disjoint.

    Sweeps along the dimension that separates the boxes best: a box is compared only with those whose ranges in that
    dimension are still open. No element is visited.
    """
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0].start))
    if not dims:
        return 0, 1
    axis = max(dims, key=lambda dim: len({box.start[dim] for box in boxes}))
    active: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda i: boxes[i].start[axis]):
        box = boxes[index]
        active = [other for other in active if boxes[other].stop[axis] > box.start[axis]]
        for other in active:
            if all(
                a < d and c < b
                for a, b, c, d in zip(box.start, box.stop, boxes[other].start, boxes[other].stop, strict=True)
            ):
                return min(index, other), max(index, other)
        active.append(index)
    return None


def subtract(whole: Box, holes: Iterable[Box]) -> list[Box]:
    """The part of ``whole`` outside ``holes``, as disjoint boxes."""
    rest = [whole]
    for hole in holes:
        remaining: list[Box] = []
        for box in rest:
            common = box.intersect(hole)
            if common is None:
                remaining.append(box)
                continue
            core = box  # shrinks to the common region, dimension by dimension; what is cut off remains
            for dim in range(len(box.start)):
                if core.start[dim] < common.start[dim]:
                    remaining.append(core.with_range(dim, core.start[dim], common.start[dim]))
                if common.stop[dim] < core.stop[dim]:
                    remaining.append(core.with_range(dim, common.stop[dim], core.stop[dim]))
                core = core.with_range(dim, common.start[dim], common.stop[dim])
        rest = remaining
    return rest


def coalesce(boxes: Iterable[Box]) -> list[Box]:
    """Joins disjoint boxes of one tensor that together form larger boxes, dimension by dimension from the last."""
    joined = sorted(boxes)
    for dim in reversed(range(len(joined[0].start) if joined else 0)):
        lines: dict[tuple[tuple[int, int], ...], list[Box]] = {}
        for box in joined:
            ranges = list(zip(box.start, box.stop, strict=True))
            lines.setdefault((*ranges[:dim], *ranges[dim + 1 :]), []).append(box)
        joined = [box for line in lines.values() for box in _join_line(line, dim)]
    return sorted(joined)


def _join_line(line: list[Box], dim: int) -> Iterator[Box]:
    """Joins boxes that differ only in dimension ``dim``, where one ends as the next begins."""
    line = sorted(line, key=lambda box: box.start[dim])
    current = line[0]
    for box in line[1:]:
        if current.stop[dim] == box.start[dim]:
            current = current.with_range(dim, current.start[dim], box.stop[dim])
        else:
            yield current
            current = box
    yield current
