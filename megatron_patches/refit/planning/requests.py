"""What a destination requests of one source, in compact form. Both ends expand it into the same transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import PlanMismatchError
from megatron_patches.refit.planning.grids import (
    Axes,
    Linear,
    fits,
    is_within,
    join_name,
    numbers_of,
    restrict,
    size_of,
    values_over,
)
from megatron_patches.refit.planning.layouts import Layout, Template
from megatron_patches.refit.planning.transfers import Transfer, canonical

MOST_COPIES = 16
"""Limit of one destination's requests, in multiples of what the source holds. Few want a weight more than once."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One box of each tensor of a grid, all of which lie in one template of the source.

    Attributes:
        held: number of the template in the source's layout.
        axes: the tensors, by the numbers in the pattern of their names.
        start: of the box, in each tensor.
        stop: likewise.
        storage: pattern of the names of the destination's storages.
        numbers: for each hole of that pattern, its number as a function of the place in the grid.
        offset: of the box's view there, also as a function of the place.
        strides: of the box's view there.
        dtype: dtype in which the elements must arrive.
    """

    held: int
    axes: Axes
    start: tuple[int, ...]
    stop: tuple[int, ...]
    storage: str
    numbers: tuple[Linear, ...]
    offset: Linear
    strides: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that arrive."""
        return size_of(self.axes) * Box("", self.start, self.stop).volume * itemsize(self.dtype)


def check_requests(requests: Iterable[Request], layout: Layout, source: int, destination: int) -> None:
    """Checks a destination's requests against what the source holds.

    Raises:
        PlanMismatchError: if the source does not hold a box in this dtype, or a template is requested too often; names
            both ranks and the box.
    """
    asked: dict[int, int] = defaultdict(int)
    for request in requests:
        what = f"destination rank {destination} asks source rank {source} for "
        template = layout.by_number.get(request.held)
        if template is None:
            raise PlanMismatchError(f"{what}boxes of its template {request.held}; it has {len(layout.templates)}")
        box = _check_request(request, template, layout.kind(template).dtype, what)
        region = template.region
        asked[request.held] += size_of(request.axes) * box.volume
        if asked[request.held] > MOST_COPIES * size_of(region.axes) * region.box.volume:
            raise PlanMismatchError(
                f"{what}{box} and others of {region.box}: more than {MOST_COPIES} times as many elements as there are"
            )


def _check_request(request: Request, template: Template, dtype: str, what: str) -> Box:
    """Checks one request against its template. Returns the requested box."""
    region = template.region
    try:
        box = Box(region.tensor, request.start, request.stop)
    except ValueError as error:
        raise PlanMismatchError(f"{what}what is no box: {error}") from error
    if not region.box.contains(box) or not is_within(request.axes, region.axes):
        raise PlanMismatchError(f"{what}{box} of {request.axes}; it holds {region.box} of {region.axes}")
    if request.dtype != dtype:
        raise PlanMismatchError(f"{what}{box} as {request.dtype}; it holds {dtype}")
    functions = all(len(one) == len(request.axes) + 1 for one in (request.offset, *request.numbers))
    strided = len(request.strides) == len(request.start)
    if not (functions and strided and fits(request.storage, len(request.numbers))):
        raise PlanMismatchError(f"{what}{box}, and does not say where in {request.storage} it is to go")
    return box


def transfers_of(requests: Iterable[Request], layout: Layout, source: int, destination: int) -> list[Transfer]:
    """The transfers over one link, in canonical order. ``requests`` must have passed :func:`check_requests`."""
    found = [item for request in requests for item in _expand(request, layout, source, destination)]
    found.sort(key=canonical)
    return found


def _expand(request: Request, layout: Layout, source: int, destination: int) -> Iterator[Transfer]:
    template = layout.by_number[request.held]
    region, kind = template.region, layout.kind(template)
    axes, shape = request.axes, Box(region.tensor, request.start, request.stop).shape
    ahead = sum(
        (low - base) * step for low, base, step in zip(request.start, region.start, template.strides, strict=True)
    )
    reads = _names(template.storage, [restrict(one, region.axes, axes) for one in template.numbers], axes)
    writes = _names(request.storage, request.numbers, axes)
    begins = values_over(restrict(template.offset, region.axes, axes), axes)
    for numbers, read, begin, write, offset in zip(
        numbers_of(axes), reads, begins, writes, values_over(request.offset, axes), strict=True
    ):
        yield Transfer(
            source=source,
            destination=destination,
            box=Box(join_name(region.tensor, numbers), request.start, request.stop),
            read=View(read, begin + ahead, shape, template.strides),
            write=View(write, offset, shape, request.strides),
            source_dtype=kind.dtype,
            dtype=request.dtype,
        )


def _names(pattern: str, functions: Sequence[Linear], axes: Axes) -> list[str]:
    """Names of the storages at every place of a grid."""
    if not functions:
        return [pattern] * size_of(axes)
    columns = [values_over(one, axes) for one in functions]
    return [join_name(pattern, row) for row in zip(*columns, strict=True)]
