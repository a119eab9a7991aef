"""What a destination requests of one source, in compact form. Both ends make the same moves of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from megatron_patches.refit.errors import PlanMismatchError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.planning.grids import Axes, is_within, size_of
from megatron_patches.refit.planning.layouts import Layout, Region, Template, Views
from megatron_patches.refit.planning.transfers import Moves

MOST_COPIES = 16
"""Limit of one destination's requests, in multiples of what the source holds. Few want a weight more than once."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One box of each tensor of a grid, all of which lie in one template of the source.

    Attributes:
        held: number of the template in the source's layout.
        axes: the tensors, by the numbers in the pattern of their names.
        start: first index of the box in each dimension, equal in all tensors.
        stop: end of the box in each dimension, equal in all tensors.
        write: where the boxes go at the destination.
        dtype: dtype in which the elements must arrive.
    """

    held: int
    axes: Axes
    start: tuple[int, ...]
    stop: tuple[int, ...]
    write: Views
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that arrive."""
        return self.region("").volume * itemsize(self.dtype)

    def region(self, tensor: str) -> Region:
        """The requested boxes; the template has the pattern of the tensors' names."""
        return Region(tensor, self.axes, self.start, self.stop)


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
        if asked[request.held] > MOST_COPIES * region.volume:
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
    if not request.write.is_sound(request.region(region.tensor)):
        raise PlanMismatchError(f"{what}{box}, and does not say where in {request.write.storage} it is to go")
    return box


def moves_of(requests: Iterable[Request], layout: Layout, source: int, destination: int) -> Iterator[Moves]:
    """What moves over one link. ``requests`` must have passed :func:`check_requests`."""
    for request in requests:
        template = layout.by_number[request.held]
        region = request.region(template.region.tensor)
        read, dtype = template.views.part(template.region, region), layout.kind(template).dtype
        yield Moves(source, destination, region, read, request.write, dtype, request.dtype)
