"""Common parts of formats that quantize rows and columns separately: copies of both, slots, and tensors.

One reading of a weight ``[rows, columns]`` is a byte array of data and one of scales, a byte per block. Blocks lie
along the reading: along a row, or down a column. Both arrays are cut by rows, so that the arrays of the shards,
concatenated, are those of the weight. A slot holds the data, followed by the scales.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from etp.formats.base import Quantization, WeightFormat
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
    multiple: ClassVar[int]
    """The GEMMs need weights whose rows and columns are multiples of this."""
    capability: ClassVar[tuple[int, int]] = (10, 0)
    """The lowest compute capability of GPUs whose GEMMs read the format."""

    def parts(self, shape: Sequence[int], *, columns: bool) -> tuple[Matrix, Matrix]:
        """The shapes of data and scales, in bytes, of a matrix in one reading."""
        down, across = shape
        if columns:
            return (down // self.per_byte, across), (down // self.block, across)
        return (down, across // self.per_byte), (down, across // self.block)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a matrix in one reading."""
        return sum(math.prod(part) for part in self.parts(shape, columns=False))

    def gathered_shape(self, layout: ShardLayout) -> tuple[int, ...]:
        """See :class:`etp.formats.base.WeightFormat`."""
        return (self.nbytes(layout.padded_shape),)

    def copied(self, layout: ShardLayout) -> int:
        """See :class:`etp.formats.base.WeightFormat`."""
        return 2 * self.nbytes(layout.shard_shape)

    def obstacle(self, layout: ShardLayout) -> str:
        """See :class:`etp.formats.base.WeightFormat`."""
        found = super().obstacle(layout)
        if not found and any(size % self.multiple for size in layout.shape):
            return (
                f"{self.name}, but has the shape {layout.shape}: rows and columns must be multiples of "
                f"{self.multiple}. Choose such sizes, or run the layer outside of the recipe"
            )
        return found


class ApartQuantization(Quantization):
    """Quantized copies of shards, by rows and by columns.

    Args:
        format_: the format.
        shards: this rank's shards of each group, all on one device.
        layouts: how the weights of each group are cut.
        memory: see :meth:`etp.formats.base.WeightFormat.quantization`.
    """

    def __init__(
        self,
        format_: ApartFormat,
        shards: Sequence[Stack],
        layouts: Sequence[ShardLayout],
        memory: torch.Tensor | None,
    ) -> None:
        self.format, self.layouts = format_, layouts
        self.device = shards[0].device
        sizes = [len(stack) * format_.copied(layout) for stack, layout in zip(shards, layouts, strict=True)]
        if memory is None:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._shards = shards
        self.firsts = [0, *accumulate(map(len, shards))]
        """For each group, the number of its first weight among those of all groups."""
        self._parts = [
            self._placed(part, len(stack), layout)
            for part, stack, layout in zip(memory.split(sizes), shards, layouts, strict=True)
        ]
        """For each group, the data and the scales of its rows, and those of its columns."""
        self.copies = [parts[0] for parts in self._parts]

    def _placed(self, memory: torch.Tensor, count: int, layout: ShardLayout) -> list[Stack]:
        shapes = [
            shape for columns in (False, True) for shape in self.format.parts(layout.shard_shape, columns=columns)
        ]
        parts = memory.split([count * math.prod(shape) for shape in shapes])
        return [Stack.within(part, count, shape) for part, shape in zip(parts, shapes, strict=True)]

    def weights(self) -> list[tuple[torch.Tensor, ...]]:
        """Each shard, with the data and scales of its rows and of its columns."""
        return [
            each
            for stack, parts in zip(self._shards, self._parts, strict=True)
            for each in zip(stack, *parts, strict=True)
        ]

    @cached_property
    def tables(self) -> list[ApartTable]:
        """The tiles of all shards, a table for each dtype; see [Note: tiles] in ``etp/formats/kernels.py``."""
        from etp.formats.kernels_apart import ApartTable

        weights = list(enumerate(self.weights()))
        dtypes = dict.fromkeys(tensors[0].dtype for _, tensors in weights)
        return [ApartTable([row for row in weights if row[1][0].dtype is dtype]) for dtype in dtypes]

    def published(self, index: int) -> Sequence[Stack]:
        """See :class:`etp.formats.base.Quantization`."""
        return self._parts[index]

    def moved(self, index: int, gathered: Stack, *, columns: bool) -> Sequence[tuple[Stack, Stack]]:
        """See :class:`etp.formats.base.Quantization`."""
        own = self._parts[index][2:] if columns else self._parts[index][:2]
        return list(zip(self.within(index, gathered, columns=columns), own, strict=True))

    def within(self, index: int, gathered: Stack, *, columns: bool) -> tuple[Stack, Stack]:
        """Data and scales of whole weights, padding included, in the buffers that a gather fills."""
        made = gathered.notes_of(self)
        key = "parts", index, columns
        if key not in made:
            data, scales = self.format.parts(self.layouts[index].padded_shape, columns=columns)
            size = math.prod(data)
            made[key] = (
                Stack([buffer[:size].view(data) for buffer in gathered]),
                Stack([buffer[size:].view(scales) for buffer in gathered]),
            )
        found: tuple[Stack, Stack] = made[key]
        return found

    def assemble(
        self, index: int, gathered: Stack, dtype: torch.dtype, trained: Sequence[bool], *, transposed: bool
    ) -> list[torch.Tensor]:
        """See :class:`etp.formats.base.Quantization`."""
        made = gathered.notes_of(self)
        key = "tensors", index, transposed, dtype, tuple(trained)
        found = made.get(key)
        if found is None:
            shape = self.layouts[index].shape
            parts = self.within(index, gathered, columns=transposed)
            data, scales = self.finished(parts, self.format.parts(shape, columns=transposed), columns=transposed)
            found = [self.tensor(shape, dtype, each, columns=transposed) for each in trained], data, scales
            # Kept with the slot, because making many takes a millisecond; not if that would hold memory besides the
            # slot's.
            if all(_shares(part[0], gathered[0]) for part in (data, scales)):
                made[key] = found
        for number, each in enumerate(zip(*found, strict=True), self.firsts[index]):
            # At each visit, because Transformer Engine drops the data that it has used.
            self.fill(each[0], number, *each[1:], columns=transposed)
        return list(found[0])

    def finished(
        self, parts: tuple[Stack, Stack], logical: tuple[Matrix, Matrix], *, columns: bool
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Data and scales as the GEMMs read them, from gathered ones whose rows may be padded.

        Args:
            parts: data and scales of each weight.
            logical: their shapes without padding.
            columns: whether they are of columns.
        """
        tile = tuple(reversed(_SCALE_TILE)) if columns else _SCALE_TILE
        data = [each[: logical[0][0]] for each in parts[0]]
        return data, [padded_scales(each, logical[1], tile) for each in parts[1]]

    @abstractmethod
    def tensor(self, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool, *, columns: bool) -> torch.Tensor:
        """One of Transformer Engine's tensors, of the logical ``shape``; :meth:`fill` sets its data at each visit."""

    @abstractmethod
    def fill(self, tensor: Any, number: int, data: torch.Tensor, scales: torch.Tensor, *, columns: bool) -> None:
        """Set the data and scales of a tensor; ``number`` is the weight's index among those of all groups."""


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def padded_scales(scales: torch.Tensor, logical: Matrix, tile: Sequence[int]) -> torch.Tensor:
    """``scales`` with rows and columns that are multiples of ``tile``, as Transformer Engine holds them.

    What is beyond ``logical`` is not read. Returns a view if ``scales``, which may have rows of padding, are large
    enough.
    """
    down, across = (-(-size // edge) * edge for size, edge in zip(logical, tile, strict=True))
    if scales.shape[0] >= down and scales.shape[1] == across:
        return scales[:down]
    padded = scales.new_zeros(down, across)
    padded[: logical[0], : logical[1]] = scales[: logical[0], : logical[1]]
    return padded
