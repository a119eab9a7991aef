"""Reads slices of safetensors files into a model's memory, and compares the two afterwards.

The weights are read through the safetensors library. The comparison maps the files by their headers instead, and
weights every element by its position in the whole tensor, so a slice that was cut in the wrong place shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from megatron_patches.refit.checkpoints.hf_blocks import dequantize, dequantize_by_block, scales_box
from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles, StoredTensor
from megatron_patches.refit.errors import DigestError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.layout.conversion import check_none_overflowed
from megatron_patches.refit.layout.digest import combine, digest_array
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Placement
from megatron_patches.refit.layout.weight_format import QUANTIZED, scales_of
from megatron_patches.refit.memory.loads import fill
from megatron_patches.refit.planning.transfers import Transfer

_Advance = Callable[[int], None]


def read_slices(
    transfers: Sequence[Transfer],
    files: HuggingFaceFiles,
    memory: Mapping[str, torch.Tensor],
    staging_bytes: int,
    progress: _Advance,
) -> int:
    """Copies every transfer's box from its file to its place, file by file, converted to the place's dtype.

    Args:
        transfers: what this rank reads.
        files: the checkpoint.
        memory: this rank's storages, one-dimensional tensors on any device.
        staging_bytes: most bytes of weights that are held at a time, as they are read or while they are converted.
        progress: called with the number of bytes written after each box.

    Returns:
        The number of bytes read, without scales.

    Raises:
        RefitError: if a weight is too large for the dtype that it is converted to.
        OSError: if a file cannot be read.
    """
    by_file: dict[str, list[Transfer]] = defaultdict(list)
    for item in transfers:
        by_file[files.tensors[item.box.tensor].file].append(item)
    total = 0
    for _, items in sorted(by_file.items()):
        with ExitStack() as stack:
            reader = _Reader(files, stack)
            for item in _in_pieces(items, staging_bytes):
                values = reader.weights(item.box)
                place = item.write.tensor(memory[item.write.storage]).copy_(values)
                if item.source_dtype != item.dtype:
                    check_none_overflowed(values, place, item.box)
                total += item.box.volume * itemsize(item.source_dtype)
                progress(item.nbytes)
    return total


def verify_slices(
    placements: Iterable[Placement],
    files: HuggingFaceFiles,
    memory: Mapping[str, torch.Tensor],
    chunk_bytes: int,
    progress: _Advance,
) -> None:
    """Reads the file's elements of every placement again, and compares their digest with the memory's.

    Args:
        placements: what this rank holds, with the places.
        files: the checkpoint.
        memory: this rank's storages, one-dimensional tensors on any device.
        chunk_bytes: most bytes that are copied at a time.
        progress: called with the number of bytes after each box.

    Raises:
        DigestError: with the first tensor, file and storage that differ.
        OSError: if a file cannot be read.
    """
    for placement in sorted(placements, key=lambda item: (files.tensors[item.box.tensor].file, item.box)):
        box, storage = placement.box, memory[placement.view.storage]
        stored = files.tensors[box.tensor]
        width = max(storage.element_size(), _width(stored.spec.dtype))
        parts = list(box.chunks(max(1, chunk_bytes // width)))
        held = placement.view.tensor(storage)
        found = combine(_digest(held[_slices(part, box.start)], part, stored.spec.shape) for part in parts)
        expected = _digest_of_file(files, stored, parts, storage.dtype)
        if found != expected:
            raise DigestError(
                f"{placement.view.storage} does not hold what {stored.file} has of {box}: digest {found:016x} instead "
                f"of {expected:016x}; the file has changed while it was read, or tensors that should be copies of each "
                "other are not"
            )
        progress(box.volume * itemsize(stored.spec.dtype))


class _Reader:
    """Slices of tensors, through the safetensors library. Files are opened on first use and closed by the stack."""

    def __init__(self, files: HuggingFaceFiles, stack: ExitStack) -> None:
        self._files, self._stack = files, stack
        self._open: dict[str, Any] = {}

    def weights(self, box: Box) -> torch.Tensor:
        """A box as it is stored, or in fp32 if that is block FP8."""
        values = self._slice(box)
        if self._files.tensors[box.tensor].spec.dtype != QUANTIZED:
            return values
        return dequantize(values, self._slice(scales_box(box)), box)

    def _slice(self, box: Box) -> torch.Tensor:
        file = self._files.tensors[box.tensor].file
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._files.directory / file, framework="pt"))
        values: torch.Tensor = self._open[file].get_slice(box.tensor)[_slices(box)]
        return values


def _digest_of_file(files: HuggingFaceFiles, stored: StoredTensor, parts: Iterable[Box], dtype: torch.dtype) -> int:
    """Digest of boxes in the file, converted to ``dtype``."""
    content, scales = _content(files, stored), None
    if stored.spec.dtype == QUANTIZED:
        scales = _content(files, files.tensors[scales_of(stored.spec.name)])
    found = 0
    for part in parts:
        values = _mapped(content, stored, part)
        if scales is not None:
            blocks = scales_box(part)
            values = dequantize_by_block(values, _mapped(scales, files.tensors[blocks.tensor], blocks), part)
        found = combine((found, _digest(values.to(dtype), part, stored.spec.shape)))
    return found


def _content(files: HuggingFaceFiles, stored: StoredTensor) -> NDArray[Any]:
    """The bits of a tensor in its file."""
    kind = f"u{itemsize(stored.spec.dtype)}"
    return np.memmap(files.directory / stored.file, kind, "r", stored.offset, stored.spec.shape)


def _mapped(content: NDArray[Any], stored: StoredTensor, box: Box) -> torch.Tensor:
    """A copy of a box of a tensor's content."""
    return torch.from_numpy(np.array(content[_slices(box)])).view(getattr(torch, stored.spec.dtype))


def _digest(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    bits = values.contiguous().cpu().view(getattr(torch, f"uint{8 * values.element_size()}"))
    return digest_array(bits.numpy(), box, shape)


def _in_pieces(items: Sequence[Transfer], staging_bytes: int) -> Iterable[Transfer]:
    """The transfers, cut so that each needs at most ``staging_bytes``."""
    wider = max(-(-_width(item.source_dtype) // itemsize(item.dtype)) for item in items)
    for _, group in fill(items, max(1, staging_bytes // wider)):
        yield from group


def _width(dtype: str) -> int:
    """Most bytes of an element while it is read: in block FP8, those of a weight and of its scale in fp32."""
    return 8 if dtype == QUANTIZED else itemsize(dtype)


def _slices(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """The box as an index of a tensor whose first element has the index ``origin``; None for the whole tensor."""
    begin = origin or (0,) * len(box.start)
    return tuple(slice(low - at, high - at) for low, high, at in zip(box.start, box.stop, begin, strict=True))
