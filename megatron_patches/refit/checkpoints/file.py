"""Writes a plan into the files of a checkpoint: each rank its own boxes, in place, with positioned writes.

No rank holds a full tensor. A rank reads its boxes in place, stages at most its budget (boxes that are strided, on a
GPU, or converted), and writes the contiguous runs that box and file have in common. Consecutive runs in the file go out
in one vectored write. Afterwards every rank reads back a share of the tensors, in chunks, and compares their digests
with the sums of what all ranks sent.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.checkpoints.checkpoint_dir import named
from megatron_patches.refit.checkpoints.safetensors_layout import CheckpointLayout, ShardFile
from megatron_patches.refit.errors import DigestError, ExportError
from megatron_patches.refit.layout.boxes import TensorSpec, contiguous_runs
from megatron_patches.refit.layout.conversion import check_none_overflowed
from megatron_patches.refit.layout.digest import combine, digest_array
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.loads import fill
from megatron_patches.refit.planning.plan import Plan
from megatron_patches.refit.planning.transfers import Transfer

if TYPE_CHECKING:
    import torch

_Bytes = NDArray[np.uint8]
_Advance = Callable[[int], None]

_MAX_VECTORS = 1024  # IOV_MAX on Linux
_OPEN_FLAGS = os.O_WRONLY | os.O_CLOEXEC


def write_boxes(
    plan: Plan,
    rank: int,
    memory: Mapping[str, torch.Tensor],
    layout: CheckpointLayout,
    directory: Path,
    staging_bytes: int,
    progress: _Advance,
) -> dict[str, int]:
    """Writes everything that ``rank`` sends into the pre-sized files of ``directory``, and syncs them.

    Args:
        plan: the plan; its one destination is the checkpoint.
        rank: source rank.
        memory: this rank's storages, one-dimensional tensors.
        layout: where every tensor lies in which file.
        directory: directory of the files.
        staging_bytes: most bytes that are read before they are written.
        progress: called with the number of bytes after each group of boxes.

    Returns:
        This rank's share of the digest of each tensor that it wrote a part of.

    Raises:
        ExportError: if a file is missing.
        RefitError: if a weight is too large for the dtype that it is converted to.
        OSError: if a write or sync fails.
    """
    specs = {spec.name: spec for spec in plan.tensors}
    digests: dict[str, int] = defaultdict(int)
    with ExitStack() as stack:
        handles = _Handles(directory, stack)
        mine = [item for item in plan.transfers if item.source == rank]
        widths = (-(-itemsize(item.source_dtype) // itemsize(item.dtype)) for item in mine)
        for _, transfers in fill(mine, staging_bytes // max(widths, default=1)):
            batches: dict[ShardFile, list[tuple[int, memoryview]]] = defaultdict(list)
            for item in transfers:
                payload = _payload(item, memory[item.read.storage])
                spec = specs[item.box.tensor]
                values = payload.view(f"u{itemsize(item.dtype)}")
                digests[spec.name] = combine((digests[spec.name], digest_array(values, item.box, spec.shape)))
                file, start = layout.locations[spec.name]
                batches[file].extend(_file_runs(item, payload, start))
            for file, runs in batches.items():
                for position, vectors in _adjacent(runs):
                    handles.write(file.name, vectors, position)
            progress(sum(item.nbytes for item in transfers))
        handles.sync()
    return dict(digests)


def verify_tensors(
    specs: Sequence[TensorSpec],
    expected: Mapping[str, int],
    layout: CheckpointLayout,
    directory: Path,
    chunk_bytes: int,
    progress: _Advance,
) -> None:
    """Reads tensors back and compares their digests with what was sent.

    Raises:
        DigestError: with the first tensor and file that differ.
        OSError: if a file cannot be read.
    """
    for spec in specs:
        file, start = layout.locations[spec.name]
        width = itemsize(spec.dtype)
        found, done = 0, 0
        with (directory / file.name).open("rb", buffering=0) as handle:
            for box in spec.box.chunks(max(1, chunk_bytes // width)):
                size = box.volume * width
                content = os.pread(handle.fileno(), size, start + done)
                while len(content) < size:
                    more = os.pread(handle.fileno(), size - len(content), start + done + len(content))
                    if not more:
                        raise DigestError(f"{spec.name}: {file.name} ends after byte {start + done + len(content)}")
                    content += more
                values = np.frombuffer(content, dtype=f"u{width}")
                found = combine((found, digest_array(values, box, spec.shape)))
                done += size
                progress(size)
        if found != expected.get(spec.name):
            raise DigestError(
                f"{spec.name}: {file.name} reads back with digest {found:016x}, the ranks sent "
                f"{expected.get(spec.name, 0):016x}; the file system returned other bytes than were written"
            )


def share_of(specs: Iterable[TensorSpec], rank: int, size: int) -> list[TensorSpec]:
    """The tensors that ``rank`` of ``size`` verifies: about equal bytes on every rank."""
    load = [0] * size
    mine = []
    for spec in sorted(specs, key=lambda item: (-item.nbytes, item.name)):
        chosen = load.index(min(load))
        load[chosen] += spec.nbytes
        if chosen == rank:
            mine.append(spec)
    return mine


def _payload(item: Transfer, storage: torch.Tensor) -> _Bytes:
    """The box's elements in the destination's dtype, contiguous in host memory; in place if they already are."""
    import torch

    values = item.read.tensor(storage.detach())
    if item.source_dtype != item.dtype:
        converted = values.to(getattr(torch, item.dtype))
        check_none_overflowed(values, converted, item.box)
        values = converted
    values = values.contiguous().cpu()
    return values.reshape(-1).view(torch.uint8).numpy()


def _file_runs(item: Transfer, payload: _Bytes, start: int) -> Iterator[tuple[int, memoryview]]:
    """(position in the file, bytes) of each contiguous run of the box. The tensor starts at ``start`` in the file."""
    width = itemsize(item.dtype)
    length, starts = contiguous_runs(item.write)
    size = length * width
    view = memoryview(payload)
    for index, element in enumerate(starts.tolist()):
        yield start + element * width, view[index * size : (index + 1) * size]


def _adjacent(runs: list[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Groups runs that are consecutive in the file, up to the limit of one call."""
    runs.sort(key=lambda run: run[0])
    position, vectors, end = 0, list[memoryview](), -1
    for start, piece in runs:
        if start != end or len(vectors) == _MAX_VECTORS:
            if vectors:
                yield position, vectors
            position, vectors = start, []
        vectors.append(piece)
        end = start + len(piece)
    if vectors:
        yield position, vectors


class _Handles:
    """The files that this rank writes, opened on first use and closed by the stack."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._open: dict[str, int] = {}

    def write(self, name: str, vectors: list[memoryview], position: int) -> None:
        """Writes all of ``vectors`` at ``position``, in as many calls as necessary."""
        handle = self._handle(name)
        while vectors:
            with named(self._directory / name):
                written = os.pwritev(handle, vectors, position)
            position += written
            while vectors and written >= len(vectors[0]):
                written -= len(vectors.pop(0))
            if vectors and written:
                vectors[0] = vectors[0][written:]

    def sync(self) -> None:
        """Waits until written data is on the device. Some file systems report a full disk only here."""
        for name, handle in self._open.items():
            with named(self._directory / name):
                os.fsync(handle)

    def _handle(self, name: str) -> int:
        if name not in self._open:
            path = self._directory / name
            try:
                self._open[name] = os.open(path, _OPEN_FLAGS)
            except FileNotFoundError as error:
                raise ExportError(
                    f"{path} is not there, though rank 0 created it; the output directory must be on a file system "
                    "that all ranks share"
                ) from error
            self._stack.callback(os.close, self._open[name])
        return self._open[name]
