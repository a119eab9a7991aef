"""Parts of boxes that move from a source to a destination, one by one or as grids, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.planning.grids import by_number, numbers_of, size_of
from megatron_patches.refit.planning.layouts import Region, Views


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
