"""Reads slices of safetensors files into a model's memory, and compares the two afterwards.

The weights are read through the safetensors library. The comparison maps the files by their headers instead, and
weights every element by its position in the whole tensor, so a slice that was cut in the wrong place shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles, StoredTensor
from megatron_patches.refit.errors import DigestError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.layout.conversion import check_none_overflowed
from megatron_patches.refit.layout.digest import combine, digest_array
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Placement
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
        staging_bytes: most bytes that are read at a time.
        progress: called with the number of bytes after each box.

    Returns:
        The number of bytes read.

    Raises:
        RefitError: if a weight is too large for the dtype that it is converted to.
        OSError: if a file cannot be read.
    """
    by_file: dict[str, list[Transfer]] = defaultdict(list)
    for item in transfers:
        by_file[files.tensors[item.box.tensor].file].append(item)
    total = 0
    for file, items in sorted(by_file.items()):
        with safe_open(files.directory / file, framework="pt") as handle:
            for item in _in_pieces(items, staging_bytes):
                values = handle.get_slice(item.box.tensor)[_slices(item.box)]
                place = item.write.tensor(memory[item.write.storage]).copy_(values)
                if item.source_dtype != item.dtype:
                    check_none_overflowed(values, place, item.box)
                total += values.nbytes
                progress(values.nbytes)
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
        width = max(storage.element_size(), itemsize(stored.spec.dtype))
        parts = list(box.chunks(max(1, chunk_bytes // width)))
        held = placement.view.tensor(storage)
        found = combine(_digest(held[_slices(part, box.start)], part, stored.spec.shape) for part in parts)
        expected = _digest_of_file(stored, files.directory, parts, storage.dtype)
        if found != expected:
            raise DigestError(
                f"{placement.view.storage} does not hold what {stored.file} has of {box}: digest {found:016x} instead "
                f"of {expected:016x}; the file has changed while it was read, or tensors that should be copies of each "
                "other are not"
            )
        progress(box.volume * itemsize(stored.spec.dtype))


def _digest_of_file(stored: StoredTensor, directory: Path, parts: Iterable[Box], dtype: torch.dtype) -> int:
    """Digest of boxes in the file, converted to ``dtype``."""
    content = np.memmap(
        directory / stored.file, f"u{itemsize(stored.spec.dtype)}", "r", stored.offset, stored.spec.shape
    )
    found = 0
    for part in parts:
        bits = torch.from_numpy(np.array(content[_slices(part)]))
        values = bits.view(getattr(torch, stored.spec.dtype)).to(dtype)
        found = combine((found, _digest(values, part, stored.spec.shape)))
    return found


def _digest(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    bits = values.contiguous().cpu().view(getattr(torch, f"uint{8 * values.element_size()}"))
    return digest_array(bits.numpy(), box, shape)


def _in_pieces(items: Sequence[Transfer], staging_bytes: int) -> Iterable[Transfer]:
    """The transfers, cut so that each reads at most ``staging_bytes``."""
    wider = max(-(-itemsize(item.source_dtype) // itemsize(item.dtype)) for item in items)
    for _, group in fill(items, max(1, staging_bytes // wider)):
        yield from group


def _slices(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """The box as an index of a tensor whose first element has the index ``origin``; None for the whole tensor."""
    begin = origin or (0,) * len(box.start)
    return tuple(slice(low - at, high - at) for low, high, at in zip(box.start, box.stop, begin, strict=True))
