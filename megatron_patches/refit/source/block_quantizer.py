"""Quantizes what a rank holds of a model to block FP8, in the grid of the Hugging Face tensors.

[Note: scales] A scale follows from its block's largest magnitude alone. So where a block of this grid is a block of
Transformer Engine's ``Float8BlockScaling`` too, an engine gets the very bytes and scales of the trainer's GEMMs. Where
Megatron's weight is cut or interleaved otherwise (a head dimension that is no multiple of 128, for example), the two
grids differ, and the weight is quantized again.

[Note: memory] The bytes of all weights lie in one piece of memory, and all scales in another, in the order in which
they are written. So neither a look-up nor waiting for a part takes longer for more weights.

[Note: straddling] A block that lies on several ranks needs the largest magnitude of all its parts. The ranks find out
once which blocks do. Then a push costs one all-reduce over these blocks. Each rank of a block holds its scale. On a
GPU, the scale of a block that is whole on a rank follows from that rank alone. So if another replica of the weight cuts
that block, all parts must be there, as they are with every mesh of Megatron's and PyTorch's.

[Note: groups] A GPU is given the first group of weights to quantize at once, and each later one when a reader asks for
what it writes. With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for, work of all streams waits in one queue:
if all groups were in it, even the digests of embeddings, which are not quantized, would begin after the last.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from etp.formats.fp8 import scale_of
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box, View, coalesce, row_major_strides, subtract
from megatron_patches.refit.layout.dtypes import FLOAT_DTYPES
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.layout.weight_format import (
    BLOCK,
    QUANTIZED,
    Shape,
    blocks_of,
    quantized_weights,
    scales_of,
)
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.source.block_parts import BlockPart, BlockParts, HostParts, KernelParts

if TYPE_CHECKING:
    from megatron_patches.refit.control.exchange import Exchange

_BYTES, _SCALES = "quantized weights", "scales of quantized weights"  # names of the storages


@dataclass(frozen=True)
class _Grid:
    """The blocks of one tensor that this rank has a part of, within the smallest rectangle around them.

    Attributes:
        tensor: name of the tensor.
        shape: its whole shape.
        boxes: the parts of it that the rank has.
        first: the rectangle's first block, by dimension.
        blocks: its number of blocks, by dimension.
        dtype: of the weights.
    """

    tensor: str
    shape: Shape
    boxes: tuple[Box, ...]
    first: Shape
    blocks: Shape
    dtype: str

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.blocks[0] * self.blocks[1]

    def placements(self, place: int) -> Iterator[Placement]:
        """The scales of blocks that the rank has a part of, given the place of the rectangle's first."""
        disjoint: list[Box] = []
        for box in self.boxes:
            disjoint += subtract(_blocks_in(box), disjoint)
        strides = row_major_strides(self.blocks)
        for box in coalesce(disjoint):
            moved = sum((low - first) * step for low, first, step in zip(box.start, self.first, strides, strict=True))
            yield Placement(box, View(_SCALES, place + moved, box.shape, strides))

    def part(self, one: Placement, place: int, start: int) -> BlockPart:
        """One of the boxes, given the place of the rectangle's first block among all of the rank, and its bytes."""
        down, right = (low // BLOCK - first for low, first in zip(one.box.start, self.first, strict=True))
        pitch = self.blocks[1]
        return BlockPart(one.box, one.view, start, self.shape, place + down * pitch + right, pitch)

    def incomplete(self) -> NDArray[np.int64]:
        """Places in the rectangle of the blocks of which the rank has a part but not all, ascending."""
        held = np.zeros(self.blocks, dtype=np.int64)
        for box in self.boxes:
            rows, columns = (_extents(box, dim, self.first[dim], self.blocks[dim]) for dim in (0, 1))
            held += np.outer(rows, columns)
        whole = Box(self.tensor, (0, 0), self.shape)
        full = np.outer(*(_extents(whole, dim, self.first[dim], self.blocks[dim]) for dim in (0, 1)))
        found: NDArray[np.int64] = np.flatnonzero((held > 0) & (held < full))
        return found

    def in_tensor(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the whole tensor's grid of places in the rectangle."""
        rows, columns = np.divmod(places, self.blocks[1])
        found: NDArray[np.int64] = (rows + self.first[0]) * blocks_of(self.shape)[1] + columns + self.first[1]
        return found

    def box_of(self, place: int) -> Box:
        """The elements of a block at a place in the rectangle."""
        at = divmod(place, self.blocks[1])
        start = tuple((first + index) * BLOCK for first, index in zip(self.first, at, strict=True))
        stop = tuple(min(low + BLOCK, extent) for low, extent in zip(start, self.shape, strict=True))
        return Box(self.tensor, start, stop)


class BlockQuantizer:
    """Quantizes what one rank holds of a model, into memory that it keeps; see [Note: scales].

    Each time, all ranks call :meth:`measure`, :meth:`agree` and :meth:`cast`, in this order. What was cast must not
    serve before :meth:`check`. The weights must not change before :meth:`complete`.

    Args:
        shapes: shape of every tensor of the model, by Hugging Face name.
        held: what the rank holds.
        power_of_two: whether scales are powers of two.
        device: of the weights.
        exchange: all ranks that hold parts of the model.

    Attributes:
        manifest: what the rank holds once it is quantized.
        quantized: flat memory of quantized weights and of scales, by storage of the manifest.
        kept: storages of what the rank holds that are not quantized.

    Raises:
        UnsupportedModelError: see :func:`megatron_patches.refit.layout.weight_format.quantized_weights`.
        RefitError: if weights to quantize and others share memory, or are no floating-point numbers to quantize.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        held: Manifest,
        *,
        power_of_two: bool,
        device: torch.device,
        exchange: Exchange,
    ) -> None:
        self._power_of_two, self._exchange = power_of_two, exchange
        self._straddling: _Straddling | None = None  # agreed on when it is first needed
        names = frozenset(quantized_weights(shapes))
        mine = [one for one in held.placements if one.box.tensor in names]
        for one in mine:
            if (dtype := held.storage[one.view.storage].dtype) not in FLOAT_DTYPES:
                raise RefitError(
                    f"{one.box.tensor} is {dtype} and has no {scales_of(one.box.tensor)}; only weights in "
                    f"{', '.join(FLOAT_DTYPES)} are quantized"
                )
        quantized = {one.view.storage for one in mine}
        for one in held.placements:
            if one.view.storage in quantized and one.box.tensor not in names:
                raise RefitError(
                    f"{one.box.tensor} keeps its type, but shares {one.view.storage} with a weight to quantize"
                )
        self._grids = _grids(mine, shapes, held)
        *self._places, blocks = accumulate((grid.size for grid in self._grids), initial=0)
        self._amax = torch.zeros(blocks, device=device)
        self._scale, self._inverse = torch.ones_like(self._amax), torch.ones_like(self._amax)
        self._memory: FlatMemory = {}  # what is being cast
        self._stream: torch.cuda.Stream | None = None  # on which a GPU casts
        self._events: list[torch.cuda.Event] = []  # of each group that was given to a GPU, when it is cast
        self._giving = threading.Lock()  # any thread may give a GPU the next group
        storages = [storage for storage in held.storages if storage.name in quantized]
        *starts, size = accumulate((storage.logical_numel for storage in storages), initial=0)
        start_of = dict(zip((storage.name for storage in storages), starts, strict=True))
        bytes_ = torch.zeros(size, dtype=torch.uint8, device=device)
        at = {grid.tensor: (grid, place) for grid, place in zip(self._grids, self._places, strict=True)}
        kind: type[BlockParts] = KernelParts if device.type == "cuda" else HostParts
        parts = [
            grid.part(one, place, start_of[one.view.storage]) for one in mine for grid, place in [at[one.box.tensor]]
        ]
        self._parts = kind(parts, bytes_, power_of_two=power_of_two)
        self._begins = {
            name: [begins[at] for begins in self._parts.begins] for at, name in enumerate((_BYTES, _SCALES))
        }
        self._of_dtypes = list(_of_each_dtype(self._grids))
        self.kept = frozenset(storage.name for storage in held.storages) - quantized
        self.quantized: Mapping[str, torch.Tensor] = {}
        self.manifest = held
        if mine:
            self.quantized = {_BYTES: bytes_.view(getattr(torch, QUANTIZED)), _SCALES: self._inverse}
            self.manifest = Manifest(
                held.rank,
                held.host,
                (
                    *(storage for storage in held.storages if storage.name in self.kept),
                    Storage(_BYTES, QUANTIZED, size, size),
                    Storage(_SCALES, "float32", blocks, blocks),
                ),
                (
                    *(_moved(one, start_of) for one in held.placements),
                    *(one for grid, place in at.values() for one in grid.placements(place)),
                ),
            )

    def measure(self, memory: FlatMemory) -> None:
        """Finds the largest magnitude of this rank's part of each block of which other ranks may have parts.

        Args:
            memory: what the rank holds, by storage.
        """
        self._amax.zero_()  # even if nothing is measured: agree() has filled in what other ranks have of a block
        self._parts.measure(memory, self._amax)
        if self._parts.measures:
            self._amax.masked_fill_(self._amax.isnan(), torch.inf)  # NCCL's maximum of NaN and a number is the number

    def agree(self) -> None:
        """Agrees with the other ranks on blocks that straddle them. Collective."""
        if self._straddling is None:
            self._straddling = _Straddling.among(self._grids, self._places, self._exchange, self._amax.device)
        self._straddling.agree(self._amax, self._exchange)

    def cast(self, memory: FlatMemory) -> None:
        """Computes scales, and quantizes: on a GPU, the first group, by work on the current stream; see [Note: groups].

        Args:
            memory: as for :meth:`measure`.
        """
        self._events.clear()
        if self._parts.measures:
            for dtype, part in self._of_dtypes:
                largest = torch.finfo(dtype).max
                self._scale[part] = scale_of(
                    self._amax[part], power_of_two=self._power_of_two, epsilon=0.0, largest=largest
                )
            torch.reciprocal(self._scale, out=self._inverse)
        if self._amax.is_cuda:
            self._memory, self._stream = memory, torch.cuda.current_stream(self._amax.device)
            self._give(1)
            return
        for group in range(len(self._parts.begins)):
            self._parts.quantize(group, memory, self._scale, self._inverse)

    def await_written(self, ends: Mapping[str, int]) -> None:
        """See :class:`megatron_patches.refit.memory.ports.Writing`."""
        count = max(
            (bisect_left(self._begins[name], end) for name, end in ends.items() if name in self._begins), default=0
        )
        if count and self._stream is not None:
            self._give(count)
            torch.cuda.current_stream(self._amax.device).wait_event(self._events[count - 1])

    def complete(self) -> None:
        """Gives a GPU all that is left to quantize, on the stream of :meth:`cast`. Any thread may call it."""
        if self._stream is not None:
            self._give(len(self._parts.begins))
            self._memory = {}  # which may be freed from now on

    def check(self) -> None:
        """Waits until everything is quantized. Any thread may call it.

        Raises:
            RefitError: if a weight is infinite or not a number.
        """
        self.complete()
        if self._events:
            self._events[-1].synchronize()
        usable = self._amax.isfinite() & self._inverse.isfinite() & (self._inverse > 0)
        if not usable.all():
            self._refuse(int(torch.nonzero(~usable)[0]))

    def _give(self, count: int) -> None:
        """Gives a GPU so many groups to quantize, those before included, or all."""
        with self._giving, torch.cuda.stream(self._stream):
            for group in range(len(self._events), min(count, len(self._parts.begins))):
                self._parts.quantize(group, self._memory, self._scale, self._inverse)
                self._events.append(torch.cuda.current_stream(self._amax.device).record_event())

    def _refuse(self, place: int) -> None:
        number = bisect_right(self._places, place) - 1
        box = self._grids[number].box_of(place - self._places[number])
        raise RefitError(f"{box} cannot be quantized: a weight in it is infinite or not a number")


@dataclass(frozen=True)
class _Straddling:
    """The blocks that are incomplete on some rank.

    Attributes:
        count: how many there are.
        mine: numbers of those of which this rank has a part.
        places: their places among this rank's blocks.
    """

    count: int
    mine: torch.Tensor
    places: torch.Tensor

    @classmethod
    def among(
        cls, grids: Sequence[_Grid], places: Sequence[int], exchange: Exchange, device: torch.device
    ) -> _Straddling:
        """Finds them. Collective."""
        incomplete = {grid.tensor: grid.in_tensor(grid.incomplete()) for grid in grids}
        found: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        for one in exchange.gather({tensor: blocks for tensor, blocks in incomplete.items() if blocks.size}):
            for tensor, blocks in one.items():
                found[tensor].append(blocks)
        own = {grid.tensor: (grid, place) for grid, place in zip(grids, places, strict=True)}
        count, mine, at = 0, [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for tensor in sorted(found):
            blocks = np.unique(np.concatenate(found[tensor]))
            if tensor in own:
                grid, place = own[tensor]
                held = grid.in_tensor(np.arange(grid.size))
                _, numbers, where = np.intersect1d(blocks, held, assume_unique=True, return_indices=True)
                mine.append(numbers + count)
                at.append(where + place)
            count += blocks.size
        indices = [torch.from_numpy(np.concatenate(parts)).to(device) for parts in (mine, at)]
        return cls(count, *indices)

    def agree(self, amax: torch.Tensor, exchange: Exchange) -> None:
        """Replaces the magnitudes of these blocks by the largest of any rank. Collective."""
        if not self.count:
            return
        packed = torch.zeros(self.count, device=amax.device)
        packed[self.mine] = amax[self.places]
        exchange.take_largest(packed)
        amax[self.places] = packed[self.mine]


def _grids(mine: Sequence[Placement], shapes: Mapping[str, Shape], held: Manifest) -> list[_Grid]:
    """The grids of all weights to quantize, those of one dtype together."""
    boxes: dict[tuple[str, str], dict[Box, None]] = defaultdict(dict)
    for one in mine:
        boxes[held.storage[one.view.storage].dtype, one.box.tensor][one.box] = None
    grids = []
    for (dtype, tensor), found in sorted(boxes.items(), key=lambda item: item[0][0]):
        touched = [_blocks_in(box) for box in found]
        first = tuple(min(box.start[dim] for box in touched) for dim in (0, 1))
        stop = tuple(max(box.stop[dim] for box in touched) for dim in (0, 1))
        blocks = tuple(high - low for low, high in zip(first, stop, strict=True))
        grids.append(_Grid(tensor, tuple(shapes[tensor]), tuple(found), first, blocks, dtype))
    return grids


def _of_each_dtype(grids: Sequence[_Grid]) -> Iterator[tuple[torch.dtype, slice]]:
    """For each dtype, the blocks of its weights, which lie together."""
    stop = 0
    for dtype, found in groupby(grids, key=lambda grid: grid.dtype):
        start, stop = stop, stop + sum(grid.size for grid in found)
        yield getattr(torch, dtype), slice(start, stop)


def _moved(one: Placement, start_of: Mapping[str, int]) -> Placement:
    """A box where its bytes lie, if it is quantized."""
    if one.view.storage not in start_of:
        return one
    offset = start_of[one.view.storage] + one.view.offset
    return replace(one, view=replace(one.view, storage=_BYTES, offset=offset))


def _blocks_in(box: Box) -> Box:
    """The blocks that a box of a weight has a part of, as a box of its scales."""
    return Box(scales_of(box.tensor), tuple(low // BLOCK for low in box.start), blocks_of(box.stop))


def _extents(box: Box, dim: int, first: int, count: int) -> NDArray[np.int64]:
    """How many rows or columns of a box lie in each of some blocks."""
    low = (first + np.arange(count, dtype=np.int64)) * BLOCK
    found: NDArray[np.int64] = np.clip(box.stop[dim], low, low + BLOCK) - np.clip(box.start[dim], low, low + BLOCK)
    return found
