"""Measures and casts what a rank holds of quantized weights: with PyTorch on the host, with Triton on a GPU.

On a GPU, blocks that are whole on this rank are read once: one kernel finds their scales and casts them. The others are
measured first, because their scales depend on other parts. Weights are quantized in some groups, in the order of their
bytes, so that the first ones can be sent before the last are quantized. The number of launches does not depend on that
of weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import torch

from etp.formats.fp8 import to_e4m3
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.weight_format import BLOCK, blocks_of
from megatron_patches.refit.memory.ports import FlatMemory

if TYPE_CHECKING:
    from etp.formats.kernels import TileTable

_GROUPS = 8  # of Qwen3-8B, each takes an H100 1.2 ms; with 16, nothing was sent sooner, and the host took longer
_CHUNK = 1 << 24  # elements that PyTorch quantizes at a time, because they take several times their size meanwhile


@dataclass(frozen=True)
class BlockPart:
    """One box of a weight, with two dimensions.

    Attributes:
        box: where it lies in the weight.
        view: where it lies in the trainer's memory.
        start: place, among all bytes of the rank, of those of the view's storage, which lie as its elements do.
        extents: the weight's shape.
        place: place of the box's first block among all blocks of the rank.
        pitch: distance from there to the block below. The block to the right is next.
    """

    box: Box
    view: View
    start: int
    extents: tuple[int, ...]
    place: int
    pitch: int

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks it has a part of, from top to bottom and from left to right."""
        down, across = blocks_of(self.box.stop)
        return down - self.box.start[0] // BLOCK, across - self.box.start[1] // BLOCK

    @property
    def has_whole_blocks(self) -> bool:
        """Whether all elements of its blocks are in it."""
        return all(
            low % BLOCK == 0 and (high % BLOCK == 0 or high == extent)
            for low, high, extent in zip(self.box.start, self.box.stop, self.extents, strict=True)
        )

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> BlockPart:
        """A part of it: a range of rows and a range of columns of the weight."""
        box = self.box.with_range(0, *rows).with_range(1, *columns)
        down, right = (low // BLOCK - first // BLOCK for low, first in zip(box.start, self.box.start, strict=True))
        return replace(self, box=box, view=self.view.cut(self.box, box), place=self.place + down * self.pitch + right)

    @property
    def first_byte(self) -> int:
        """Place of its first byte among all bytes of the rank."""
        return self.start + self.view.offset

    def bytes_in(self, quantized: torch.Tensor) -> torch.Tensor:
        """Its bytes, given those of the rank, in its shape."""
        return quantized.as_strided(self.view.shape, self.view.strides, self.first_byte)

    def numbers(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """Its blocks' numbers among those of all blocks of the rank, ``[down, across]``."""
        return of_blocks.as_strided(self.blocks, (self.pitch, 1), of_blocks.storage_offset() + self.place)


class BlockParts(ABC):
    """The parts of quantized weights that a rank holds.

    Attributes:
        begins: of each group in which they are quantized, the first byte, and the first scale, that it or a later group
            writes. Both ascend.

    Args:
        parts: the parts.
        quantized: flat memory for their bytes, uint8.
        power_of_two: whether scales are powers of two.
    """

    begins: Sequence[tuple[int, int]]

    @abstractmethod
    def __init__(self, parts: Sequence[BlockPart], quantized: torch.Tensor, *, power_of_two: bool) -> None: ...

    @property
    @abstractmethod
    def measures(self) -> bool:
        """Whether there are blocks that :meth:`measure` does not leave out."""

    @abstractmethod
    def measure(self, weights: FlatMemory, amax: torch.Tensor) -> None:
        """Raises the magnitudes of blocks to those of this rank's weights. NaN is the largest.

        Leaves out blocks whose scales :meth:`quantize` computes.

        Args:
            weights: flat memory, by storage.
            amax: the largest magnitude of each of the rank's blocks, fp32.
        """

    @abstractmethod
    def quantize(self, group: int, weights: FlatMemory, scales: torch.Tensor, inverse: torch.Tensor) -> None:
        """Casts the weights of a group to E4M3: on a GPU, by work on the current stream.

        Args:
            group: its number.
            weights: flat memory, by storage; those that :meth:`measure` was last called with.
            scales: what to multiply the weights of each of the rank's blocks with, fp32.
            inverse: their inverses, fp32. Overwritten for blocks that :meth:`measure` left out, with NaN for a block
                that has an element which is infinite or not a number.
        """


class HostParts(BlockParts):
    """With PyTorch, in one group; see :class:`BlockParts`."""

    def __init__(self, parts: Sequence[BlockPart], quantized: torch.Tensor, *, power_of_two: bool) -> None:
        self.begins = [(0, 0)]
        self._parts = [chunk for part in parts for chunk in _chunks(part)]
        self._quantized, self._power_of_two = quantized, power_of_two

    @property
    def measures(self) -> bool:
        """See :class:`BlockParts`."""
        return bool(self._parts)

    def measure(self, weights: FlatMemory, amax: torch.Tensor) -> None:
        """See :class:`BlockParts`."""
        for part in self._parts:
            blocks = _blocks(part, weights)
            largest = torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3))).float()
            known = part.numbers(amax)  # of other parts of the same blocks
            torch.maximum(known, largest, out=known)

    def quantize(self, group: int, weights: FlatMemory, scales: torch.Tensor, inverse: torch.Tensor) -> None:
        """See :class:`BlockParts`. All is written when it returns."""
        del group, inverse
        for part in self._parts:
            blocks, scale = _blocks(part, weights), part.numbers(scales)[:, None, :, None]
            if self._power_of_two and blocks.dtype is torch.bfloat16:
                # Exact, because only the exponent changes, whose range is that of fp32; moves a third of the bytes.
                bytes_ = (blocks * scale.bfloat16()).to(torch.float8_e4m3fn).view(torch.uint8)
            else:
                bytes_ = to_e4m3(blocks, scale)
            above, left = (low % BLOCK for low in part.box.start)
            rows, columns = part.box.shape
            found = bytes_.flatten(2).flatten(0, 1)[above : above + rows, left : left + columns]
            part.bytes_in(self._quantized).copy_(found)


@dataclass(frozen=True)
class _Group:
    """Pieces that are quantized together.

    Attributes:
        whole: those of whole blocks.
        others: all others.
        begins: the first byte, and the first scale, that this group or a later one writes.
    """

    whole: Sequence[BlockPart]
    others: Sequence[BlockPart]
    begins: tuple[int, int]


class KernelParts(BlockParts):
    """With the engine's Triton kernels; see :class:`BlockParts`.

    Raises:
        RefitError: if the elements of a row are not adjacent.
    """

    def __init__(self, parts: Sequence[BlockPart], quantized: torch.Tensor, *, power_of_two: bool) -> None:
        for part in parts:
            if part.view.shape[1] > 1 and part.view.strides[1] != 1:
                raise RefitError(f"{part.box} lies transposed in the trainer's memory, where it cannot be quantized")
        self._groups = _grouped(sorted(parts, key=lambda part: part.first_byte))
        self.begins = [group.begins for group in self._groups]
        self._storages = tuple(dict.fromkeys(part.view.storage for part in parts))
        self._quantized, self._power_of_two = quantized, power_of_two
        self._addresses: tuple[int, ...] = ()
        self._tables: list[tuple[list[TileTable], list[TileTable]]] = []

    @property
    def measures(self) -> bool:
        """See :class:`BlockParts`."""
        return any(group.others for group in self._groups)

    def measure(self, weights: FlatMemory, amax: torch.Tensor) -> None:
        """See :class:`BlockParts`."""
        from etp.formats import kernels

        addresses = tuple(weights[name].data_ptr() for name in self._storages)
        if addresses != self._addresses:  # the optimizer may have moved the weights
            self._tables = [
                (self._tables_of(group.whole, weights), self._tables_of(group.others, weights))
                for group in self._groups
            ]
            self._addresses = addresses
        for _, others in self._tables:
            for table in others:
                kernels.largest_magnitudes(table, amax, checked=True)

    def quantize(self, group: int, weights: FlatMemory, scales: torch.Tensor, inverse: torch.Tensor) -> None:
        """See :class:`BlockParts`."""
        from etp.formats import kernels

        del weights
        whole, others = self._tables[group]
        for table in whole:
            kernels.quantize_blocks(table, inverse, power_of_two=self._power_of_two, epsilon=0.0, checked=True)
        for table in others:
            kernels.cast(table, scales)

    def _tables_of(self, pieces: Sequence[BlockPart], weights: FlatMemory) -> list[TileTable]:
        from etp.formats.kernels import Tiled, tables_of

        return tables_of(
            Tiled(
                piece.view.tensor(weights[piece.view.storage]),
                piece.bytes_in(self._quantized),
                piece.place,
                (piece.pitch, 1),
            )
            for piece in pieces
        )


def _grouped(parts: Sequence[BlockPart]) -> list[_Group]:
    """Groups of about equal size, in order."""
    size = sum(part.box.volume for part in parts) / _GROUPS
    groups: list[list[BlockPart]] = []
    filled = 0
    for part in parts:
        if filled >= size * len(groups):
            groups.append([])
        groups[-1].append(part)
        filled += part.box.volume
    found: list[_Group] = []
    later: list[tuple[int, int]] = []
    for group in reversed(groups):
        pieces = [piece for part in group for piece in _at_block_borders(part)]
        whole = [piece for piece in pieces if piece.has_whole_blocks]
        others = [piece for piece in pieces if not piece.has_whole_blocks]
        firsts = [(part.first_byte, part.place) for part in group] + later
        later = [(min(byte for byte, _ in firsts), min(scale for _, scale in firsts))]
        found.append(_Group(whole, others, later[0]))
    return found[::-1]


def _at_block_borders(part: BlockPart) -> Iterator[BlockPart]:
    """Cuts off the blocks that begin or end within the part, so that the first block of each piece is its own."""
    bands = []
    for low, high in zip(part.box.start, part.box.stop, strict=True):
        inner = -(-low // BLOCK) * BLOCK, high // BLOCK * BLOCK
        cuts = sorted({low, high, *(cut for cut in inner if low < cut < high)})
        bands.append(list(pairwise(cuts)))
    for rows, columns in product(*bands):
        yield part.cut(rows, columns)


def _chunks(part: BlockPart) -> Iterator[BlockPart]:
    """Some rows of blocks at a time."""
    low, high = part.box.start[0], part.box.stop[0]
    step = max(1, _CHUNK // (part.blocks[1] * BLOCK * BLOCK)) * BLOCK
    for rows in pairwise((low, *range(low // BLOCK * BLOCK + step, high, step), high)):
        yield part.cut(rows, (part.box.start[1], part.box.stop[1]))


def _blocks(part: BlockPart, weights: FlatMemory) -> torch.Tensor:
    """The elements of a part's blocks, ``[down, 128, across, 128]``; 0 where a block is not the part's."""
    down, across = part.blocks
    (above, left), (rows, columns) = (low % BLOCK for low in part.box.start), part.box.shape
    box = part.view.tensor(weights[part.view.storage])
    if (rows, columns) != (down * BLOCK, across * BLOCK):
        whole = box.new_zeros(down * BLOCK, across * BLOCK)
        whole[above : above + rows, left : left + columns] = box
        box = whole
    return box.reshape(down, BLOCK, across, BLOCK)
