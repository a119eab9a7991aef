"""All tensors of a model in compact form, and the agreement of their holders on shapes and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import gt, le

import msgspec

from megatron_patches.refit.errors import RefitError, first_of
from megatron_patches.refit.layout.boxes import Box, TensorSpec
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.planning.grids import (
    Axes,
    Numbers,
    fold,
    is_within,
    join_name,
    numbers_of,
    size_of,
    split_name,
)
from megatron_patches.refit.planning.layouts import Holder, Region, Template, layout_of


class TensorGrid(msgspec.Struct, frozen=True, array_like=True):
    """Tensors of one shape and dtype whose names form a grid."""

    tensor: str
    axes: Axes
    shape: tuple[int, ...]
    dtype: str


def fold_tensors(tensors: Iterable[TensorSpec]) -> tuple[TensorGrid, ...]:
    """All tensors of a model in compact form."""
    return _fold((*split_name(spec.name), spec.shape, spec.dtype) for spec in tensors)


def _fold(specs: Iterable[tuple[str, Numbers, tuple[int, ...], str]]) -> tuple[TensorGrid, ...]:
    rows: dict[tuple[str, tuple[int, ...], str], list[tuple[Numbers, Numbers]]] = defaultdict(list)
    for pattern, numbers, shape, dtype in specs:
        rows[pattern, shape, dtype].append((numbers, ()))
    return tuple(
        TensorGrid(pattern, axes, shape, dtype)
        for (pattern, shape, dtype), same in rows.items()
        for axes, _ in fold(same)
    )


def outside(region: Region, tensors: Mapping[str, Sequence[TensorGrid]]) -> tuple[Box, tuple[int, ...] | None] | None:
    """The first box of a region that is not inside its tensor, and the tensor's shape; None if all boxes are inside.

    Args:
        region: the boxes.
        tensors: the tensors of the model, by pattern.
    """
    for grid in tensors.get(region.tensor, ()):
        if is_within(region.axes, grid.axes):
            inside = len(region.stop) == len(grid.shape) and all(map(le, region.stop, grid.shape))
            return None if inside else (region.first, grid.shape)
    if size_of(region.axes) == 1:
        return region.first, None
    return next((found for one in region.of_each() if (found := outside(one, tensors)) is not None), None)


def unfold_tensors(grids: Iterable[TensorGrid]) -> list[TensorSpec]:
    """The inverse of :func:`fold_tensors`, except for the order."""
    return [
        TensorSpec(join_name(grid.tensor, numbers), grid.shape, grid.dtype)
        for grid in grids
        for numbers in numbers_of(grid.axes)
    ]


def agree_on_tensors(shapes: Mapping[str, tuple[int, ...]], sources: Sequence[Manifest]) -> list[TensorSpec]:
    """Gives every tensor the dtype of its holders.

    Args:
        shapes: global shape of every tensor of the model, by name.
        sources: manifests of all ranks that hold weights.

    Returns:
        One spec per tensor, in the order of ``shapes``.

    Raises:
        RefitError: if a held box is not in the model, no rank holds a tensor, or its holders differ in dtype.
    """
    tensors = fold_tensors(TensorSpec(name, tuple(shape), "") for name, shape in shapes.items())
    holders = [Holder(manifest.rank, manifest.host, layout_of(manifest)) for manifest in sources]
    found = {spec.name: spec for spec in unfold_tensors(agree(tensors, holders))}
    return [found[name] for name in shapes]


def agree(tensors: Iterable[TensorGrid], holders: Sequence[Holder], *, partial: bool = False) -> tuple[TensorGrid, ...]:
    """:func:`agree_on_tensors` in compact form. A region that several sources hold alike is checked once.

    With ``partial``, tensors that no rank holds are left out.
    """
    shapes: dict[str, dict[Numbers, tuple[int, ...]]] = defaultdict(dict)
    for grid in tensors:
        shapes[grid.tensor].update(dict.fromkeys(numbers_of(grid.axes), grid.shape))
    known: dict[str, dict[Numbers, tuple[str, int]]] = defaultdict(dict)
    for holder, template, dtype in _distinct(holders):
        region = template.region
        named, mine, held = shapes.get(region.tensor, {}), known[region.tensor], (dtype, holder.rank)
        for numbers in numbers_of(region.axes):
            shape = named.get(numbers)
            if shape is None or len(shape) != len(region.stop) or any(map(gt, region.stop, shape)):
                name = join_name(region.tensor, numbers)
                raise RefitError(
                    f"rank {holder.rank} holds {Box(name, region.start, region.stop)} in "
                    f"{template.views.at(region, numbers).storage}, but the model's {name} has shape {shape}"
                )
            other, first = mine.setdefault(numbers, held)
            if other != dtype:
                raise RefitError(
                    f"{join_name(region.tensor, numbers)} is {other} on rank {first} and {dtype} on rank {holder.rank}"
                )
    missing = [
        join_name(pattern, numbers) for pattern, named in shapes.items() for numbers in named.keys() - known[pattern]
    ]
    if missing and not partial:
        raise RefitError(f"no rank holds {first_of(sorted(missing))}; the model and its configuration disagree")
    return _fold(
        (pattern, numbers, shape, known[pattern][numbers][0])
        for pattern, named in shapes.items()
        for numbers, shape in named.items()
        if numbers in known[pattern]
    )


def _distinct(holders: Sequence[Holder]) -> Iterator[tuple[Holder, Template, str]]:
    """The distinct pairs of region and dtype that sources hold, each with one source that holds it."""
    seen: set[tuple[Region, str]] = set()
    for holder in holders:
        for template in holder.layout.templates:
            dtype = holder.layout.kind(template).dtype
            if (template.region, dtype) not in seen:
                seen.add((template.region, dtype))
                yield holder, template, dtype
