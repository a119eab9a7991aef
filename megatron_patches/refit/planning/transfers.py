"""Parts of boxes that move from a source to a destination, one by one or as grids, and requests for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from megatron_patches.refit.errors import PlanMismatchError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.planning.grids import Axes, by_number, is_within, numbers_of, size_of
from megatron_patches.refit.planning.layouts import Layout, Region, Template, Views


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part of one box that moves over a link.

    Attributes:
        source: rank that sends it.
        destination: rank, on the other side, that receives it.
        box: the part.
        read: its place at the source.
        write: its place at the destination.
        source_dtype: element type at the source.
        dtype: element type in which it arrives at the destination.
    """

    source: int
    destination: int
    box: Box
    read: View
    write: View
    source_dtype: str
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.box.volume * itemsize(self.dtype)


class Moves(msgspec.Struct, frozen=True, array_like=True):
    """Transfers of one box of each tensor of a grid; the attributes are those of :class:`Transfer`."""

    source: int
    destination: int
    region: Region
    read: Views
    write: Views
    source_dtype: str
    dtype: str

    @property
    def count(self) -> int:
        """Number of transfers."""
        return size_of(self.region.axes)

    @property
    def nbytes(self) -> int:
        """Bytes written by all of them."""
        return self.region.volume * itemsize(self.dtype)

    def part(self, region: Region) -> Moves:
        """Those of a part of the grid."""
        read, write = self.read.part(self.region, region), self.write.part(self.region, region)
        return msgspec.structs.replace(self, region=region, read=read, write=write)

    def transfers(self) -> Iterator[Transfer]:
        """The transfers one by one."""
        region = self.region
        for numbers, read, write in zip(
            numbers_of(region.axes), self.read.over(region), self.write.over(region), strict=True
        ):
            yield Transfer(
                source=self.source,
                destination=self.destination,
                box=region.box_of(numbers),
                read=read,
                write=write,
                source_dtype=self.source_dtype,
                dtype=self.dtype,
            )


def canonical(item: Transfer) -> tuple[object, ...]:
    """Sorts transfers by tensor, box, destination and place.

    Numbers in names count as such: layers come in their own order, in which a trainer quantizes them meanwhile.
    """
    box, write = item.box, item.write
    return by_number(box.tensor), box.start, box.stop, item.destination, write.storage, write.offset, item.source


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
