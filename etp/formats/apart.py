"""Common parts of formats that quantize rows and columns separately: where their data and scales lie.

One reading of a weight ``[rows, columns]`` is a byte array of data and one of scales, a byte per block. Blocks lie
along the reading: along a row, or down a column. Both arrays are cut by rows, so that the arrays of the shards,
concatenated, are those of the weight. A slot holds the data, followed by the scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from etp.formats.base import WeightFormat
from etp.formats.quantized import QuantizedShards, transpose
from etp.layout import ShardLayout
from etp.stack import Stack

if TYPE_CHECKING:
    from etp.formats.kernels_apart import ApartTable

# The GEMMs read scales in tiles of this shape.
_SCALE_TILE = (128, 4)

type Matrix = tuple[int, int]


class ApartFormat(WeightFormat):
    """A format in which a block of consecutive elements of a row, or of a column, has a scale of one byte."""

    apart = True
    block: ClassVar[int]
    """Elements that share a scale."""
    per_byte: ClassVar[int]
    """Elements in a byte of data, neighbours in the reading."""
    multiple: ClassVar[int] = 32
    """The GEMMs need weights whose rows and columns are multiples of this: whole blocks of FP8, 16 bytes of FP4."""
    transposes_columns: ClassVar[bool] = False
    """Whether the GEMMs read columns as rows of the transpose."""
    capability: ClassVar[tuple[int, int]] = (10, 0)
    """The lowest compute capability of GPUs whose GEMMs read the format."""

    def parts(self, shape: Sequence[int], *, columns: bool) -> tuple[Matrix, Matrix]:
        """The shapes of data and scales, in bytes, of a matrix in one reading."""
        down, across = shape
        if columns:
            return (down // self.per_byte, across), (down // self.block, across)
        return (down, across // self.per_byte), (down, across // self.block)

    def gathered_shape(self, layout: ShardLayout) -> tuple[int, ...]:
        """See :class:`etp.formats.base.WeightFormat`."""
        return (sum(map(math.prod, self.parts(layout.padded_shape, columns=False))),)

    def copied_parts(self, layout: ShardLayout) -> Sequence[tuple[int, ...]]:
        """Data and scales of the rows, and those of the columns."""
        return (*self.parts(layout.shard_shape, columns=False), *self.parts(layout.shard_shape, columns=True))

    def obstacle(self, layout: ShardLayout) -> str:
        """See :class:`etp.formats.base.WeightFormat`."""
        found = super().obstacle(layout)
        if not found and any(size % self.multiple for size in layout.shape):
            return (
                f"{self.name}, but has the shape {layout.shape}: rows and columns must be multiples of "
                f"{self.multiple}. Choose such sizes, or run the layer outside of the recipe"
            )
        return found


class ApartQuantization[F: ApartFormat](QuantizedShards[F]):
    """Quantized copies of shards, by rows and by columns."""

    @cached_property
    def apart_tables(self) -> list[ApartTable]:
        """The tiles of all shards, a table for each dtype; see [Note: tiles] in ``etp/formats/kernels.py``."""
        from etp.formats.kernels_apart import ApartTable

        weights = list(enumerate(self.weights()))
        dtypes = dict.fromkeys(tensors[0].dtype for _, tensors in weights)
        return [ApartTable([row for row in weights if row[1][0].dtype is dtype]) for dtype in dtypes]

    def moved(self, index: int, gathered: Stack, *, columns: bool) -> Sequence[tuple[Stack, Stack]]:
        """See :class:`etp.formats.base.Quantization`."""
        own = self._parts[index][2:] if columns else self._parts[index][:2]
        return list(zip(self.within(index, gathered, columns=columns), own, strict=True))

    def within(self, index: int, gathered: Stack, *, columns: bool) -> tuple[Stack, Stack]:
        """Data and scales of whole weights, padding included, in the buffers that a gather fills."""

        def parts() -> tuple[Stack, Stack]:
            data, scales = self.format.parts(self.layouts[index].padded_shape, columns=columns)
            size = math.prod(data)
            return (
                Stack([buffer[:size].view(data) for buffer in gathered]),
                Stack([buffer[size:].view(scales) for buffer in gathered]),
            )

        return gathered.derived(self, ("parts", index, columns), parts)

    def arrays(self, index: int, gathered: Stack, *, columns: bool) -> tuple[list[Sequence[torch.Tensor]], bool]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        data, scales = (part.block() for part in self.within(index, gathered, columns=columns))
        shapes = self.format.parts(self.layouts[index].shape, columns=columns)
        if columns and self.format.transposes_columns:
            data, scales = (transpose(part[:, :down]) for part, (down, _) in zip((data, scales), shapes, strict=True))
            shapes, columns = (shapes[0][::-1], shapes[1][::-1]), False
        found = data[:, : shapes[0][0]], padded_scales(scales, shapes[1], _SCALE_TILE[::-1] if columns else _SCALE_TILE)
        slot = gathered[0].untyped_storage().data_ptr()
        is_new = any(part.untyped_storage().data_ptr() != slot for part in found)
        return [part.unbind(0) for part in found], is_new


def padded_scales(scales: torch.Tensor, logical: Matrix, tile: Sequence[int]) -> torch.Tensor:
    """``scales`` with rows and columns that are multiples of ``tile``, as Transformer Engine holds them.

    Args:
        scales: ``[weights, rows, columns]``, which may have rows of padding.
        logical: rows and columns that are read.
        tile: the multiples.

    Returns:
        a view if there are enough rows and columns.
    """
    down, across = (-(-size // edge) * edge for size, edge in zip(logical, tile, strict=True))
    if scales.shape[1] >= down and scales.shape[2] == across:
        return scales[:, :down]
    padded = scales.new_zeros(len(scales), down, across)
    padded[:, : logical[0], : logical[1]] = scales[:, : logical[0], : logical[1]]
    return padded
