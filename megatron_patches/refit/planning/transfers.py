"""Parts of boxes that move from a source to a destination, and their order."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.dtypes import itemsize


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


def canonical(item: Transfer) -> tuple[object, ...]:
    """Sorts transfers by tensor, box, destination and place."""
    box, write = item.box, item.write
    return box.tensor, box.start, box.stop, item.destination, write.storage, write.offset, item.source
