"""Names that differ only in numbers, such as those of a layer's experts, as one pattern and a grid of numbers.

A model with thousands of tensors (layers times experts) has a few dozen *patterns*, such as
``model.layers.{}.mlp.experts.{}.up_proj.weight``. The numbers in the holes form a *grid*: the product of one *axis*
per hole. A value that belongs to a name, such as an offset, is usually an affine function of the name's place in the
grid. So the cost of a layout grows with the number of grids, not of names. Where every name of a grid counts, arrays of
its values are computed at once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,17})(?!\d)", re.ASCII)
_HOLE = "{}"

Axis = tuple[int, int, int]
"""The numbers of one hole: the first, the step (at least 1), and the count."""
Axes = tuple[Axis, ...]
Numbers = tuple[int, ...]
Affine = tuple[int, ...]
"""An affine function of the place in a grid: its value at the first place, then its increment along each axis."""


def split_name(name: str) -> tuple[str, Numbers]:
    """The pattern of a name and the numbers in its holes. :func:`join_name` is the inverse."""
    if "{" in name:
        return name, ()
    parts = _NUMBER.split(name)  # text and numbers in turn
    return _HOLE.join(parts[::2]), tuple(map(int, parts[1::2]))


def by_number(name: str) -> tuple[str | int, ...]:
    """Sorts names as people do: text as text, numbers by value, so that layer 2 comes before layer 10."""
    parts: list[str | int] = list(_NUMBER.split(name))  # text and numbers in turn
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)


def join_name(pattern: str, numbers: Sequence[int]) -> str:
    """Fills the holes of ``pattern`` with numbers. Patterns come from other parties, so nothing else is interpreted."""
    if not numbers:
        return pattern
    return pattern.replace("%", "%%").replace(_HOLE, "%d") % tuple(numbers)


def fits(pattern: str, holes: int) -> bool:
    """Whether a pattern has this number of holes, or ``holes`` is 0."""
    return holes in (0, pattern.count(_HOLE))


def size_of(axes: Axes) -> int:
    """How many names a grid has."""
    return math.prod(count for _, _, count in axes)


def numbers_of(axes: Axes) -> Iterator[Numbers]:
    """The numbers of every name of a grid, the last axis fastest."""
    return itertools.product(*map(values_of, axes))


def values_of(axis: Axis) -> range:
    """The numbers of an axis."""
    first, step, count = axis
    return range(first, first + step * count, step)


def single(numbers: Numbers) -> Axes:
    """The grid of one name."""
    return tuple([(number, 1, 1) for number in numbers])


def progressions(values: Sequence[int]) -> Iterator[Axis]:
    """Rising numbers as few axes."""
    begin = 0
    while begin < len(values):
        end, step = begin + 1, 1
        if end < len(values):
            step = values[end] - values[begin]
            while end < len(values) and values[end] - values[end - 1] == step:
                end += 1
        yield values[begin], step, end - begin
        begin = end


def is_within(inner: Axes, outer: Axes) -> bool:
    """Whether every name of ``inner`` is in ``outer``."""
    if len(inner) != len(outer):
        return False
    for axis, (begin, stride, most) in zip(inner, outer, strict=True):
        first, step, count = axis
        if step < 1 or count < 1:
            return False
        ahead = first - begin
        if ahead < 0 or ahead % stride or ahead + step * (count - 1) > stride * (most - 1):
            return False
        if count > 1 and step % stride:
            return False
    return True


def meet(left: Axes, right: Axes) -> bool:
    """Whether two grids of one pattern have a name in common."""
    return len(left) == len(right) and all(map(_meet_in, left, right))


def _meet_in(left: Axis, right: Axis) -> bool:
    few, many = (left, right) if left[2] < right[2] else (right, left)
    if few[0] > many[0] + many[1] * (many[2] - 1) or many[0] > few[0] + few[1] * (few[2] - 1):
        return False
    return any(value in values_of(many) for value in values_of(few))


def restrict(function: Affine, axes: Axes, part: Axes) -> Affine:
    """The same function on a part of its grid. ``part`` must be within ``axes``."""
    base, steps = function[0], []
    for slope, (first, step, _), (begin, stride, count) in zip(function[1:], axes, part, strict=True):
        base += slope * ((begin - first) // step)
        steps.append(slope * (stride // step) if count > 1 else 0)
    return (base, *steps)


def value_at(function: Affine, axes: Axes, numbers: Numbers) -> int:
    """The value of a function at one name of its grid."""
    value = function[0]
    for slope, (first, step, _), number in zip(function[1:], axes, numbers, strict=True):
        value += slope * ((number - first) // step)
    return value


def values_over(function: Affine, axes: Axes) -> Iterator[int]:
    """The values of a function over its grid, in the order of :func:`numbers_of`."""
    ranges = [
        [slope * place for place in range(count)] for slope, (_, _, count) in zip(function[1:], axes, strict=True)
    ]
    base = function[0]
    return (base + sum(parts) for parts in itertools.product(*ranges))


def array_over(function: Affine, axes: Axes) -> NDArray[np.int64]:
    """:func:`values_over` as an array of one dimension."""
    found = np.array([function[0]], dtype=np.int64)
    for slope, (_, _, count) in zip(function[1:], axes, strict=True):
        found = (found[:, None] + slope * np.arange(count, dtype=np.int64)).reshape(-1)
    return found


def places_in(part: Axes, axes: Axes) -> NDArray[np.int64]:
    """Where the names of ``part`` are in ``axes``, within which it must be: their indices in :func:`numbers_of`."""
    strides, step = [], 1
    for _, _, count in reversed(axes):
        strides.append(step)
        step *= count
    return array_over(restrict((0, *reversed(strides)), axes, part), part)


def extremes(function: Affine, axes: Axes) -> tuple[int, int]:
    """The least and the largest value of a function on its grid."""
    ends = [slope * (count - 1) for slope, (_, _, count) in zip(function[1:], axes, strict=True)]
    return function[0] + sum(min(0, end) for end in ends), function[0] + sum(max(0, end) for end in ends)


def corner(function: Affine, axes: Axes, largest: bool) -> Numbers:
    """A name of the grid at which the function has its least or its largest value."""
    return tuple(
        first + step * (count - 1) if (slope > 0) is largest else first
        for slope, (first, step, count) in zip(function[1:], axes, strict=True)
    )


def fold(rows: Iterable[tuple[Numbers, Numbers]]) -> list[tuple[Axes, tuple[Affine, ...]]]:
    """Folds rows into few grids.

    Args:
        rows: for each name, its numbers, unique, and the values that belong to it. All rows have equal lengths.

    Returns:
        Grids with an affine function for each value. Together they contain every row once.
    """
    # An entry: numbers of the holes still to fold; axes, values at the first place, and slopes of the folded ones.
    entries: list[_Entry] = [(numbers, (), values, tuple(() for _ in values)) for numbers, values in sorted(rows)]
    for hole in reversed(range(len(entries[0][0]) if entries else 0)):
        lines: dict[tuple[object, ...], list[_Entry]] = defaultdict(list)
        for entry in entries:
            lines[entry[0][:hole], entry[1], entry[3]].append(entry)
        entries = [folded for line in lines.values() for folded in _fold_line(line, hole)]
    return [
        (axes, tuple((base, *steps) for base, steps in zip(values, slopes, strict=True)))
        for _, axes, values, slopes in entries
    ]


_Entry = tuple[Numbers, Axes, Numbers, tuple[Numbers, ...]]


def _fold_line(line: Sequence[_Entry], hole: int) -> Iterator[_Entry]:
    """Arithmetic progressions of entries that differ only in the number of ``hole`` and in values, in rising order."""
    begin = 0
    while begin < len(line):
        numbers, axes, values, slopes = line[begin]
        end, step, rise = begin + 1, 1, tuple(0 for _ in values)
        if end < len(line):
            step, rise = _difference(line[begin], line[end], hole)
            while end < len(line) and _difference(line[end - 1], line[end], hole) == (step, rise):
                end += 1
        grown = tuple((more, *known) for more, known in zip(rise, slopes, strict=True))
        yield numbers[:hole], ((numbers[hole], step, end - begin), *axes), values, grown
        begin = end


def _difference(left: _Entry, right: _Entry, hole: int) -> tuple[int, Numbers]:
    return right[0][hole] - left[0][hole], tuple(b - a for a, b in zip(left[2], right[2], strict=True))
