"""The location of every tensor of a sharded safetensors checkpoint, computed before any file exists.

The format: 8 bytes with the header's length (little endian), the header (JSON: dtype, shape and byte range of each
tensor), then the tensors, contiguous and row-major. Every rank computes the same layout independently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.dtypes import SAFETENSORS_CODE, itemsize
from megatron_patches.refit.layout.manifest import Manifest

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class ShardFile:
    """One file of the checkpoint.

    Attributes:
        name: file name.
        tensors: its tensors, in order.
    """

    name: str
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def header(self) -> bytes:
        """Length and header, padded with spaces to a multiple of 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for spec in self.tensors:
            entries[spec.name] = {
                "dtype": SAFETENSORS_CODE[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.nbytes],
            }
            position += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """First byte of each tensor in the file."""
        found = {}
        position = len(self.header)
        for spec in self.tensors:
            found[spec.name] = position
            position += spec.nbytes
        return found

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True)
class CheckpointLayout:
    """All files of a checkpoint.

    Attributes:
        files: the files, in order.
    """

    files: tuple[ShardFile, ...]

    @cached_property
    def locations(self) -> Mapping[str, tuple[ShardFile, int]]:
        """File and first byte of every tensor."""
        return {name: (file, offset) for file in self.files for name, offset in file.offsets.items()}

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(file.nbytes for file in self.files)

    def index(self) -> Mapping[str, object] | None:
        """Content of the index file; None for a single file, which needs none."""
        if len(self.files) == 1:
            return None
        total = sum(spec.nbytes for file in self.files for spec in file.tensors)
        where = {spec.name: file.name for file in self.files for spec in file.tensors}
        return {"metadata": {"total_size": total}, "weight_map": where}

    def manifest(self) -> Manifest:
        """The checkpoint as the single destination of a plan."""
        return Manifest.of_whole(0, "", (spec for file in self.files for spec in file.tensors))


def layout_checkpoint(tensors: Sequence[TensorSpec], max_shard_bytes: int) -> CheckpointLayout:
    """Distributes tensors, in order, into files of at most ``max_shard_bytes`` of data. A larger one gets its own file.

    Within a file, wider dtypes come first, so that every tensor is aligned to its elements.

    Raises:
        ValueError: if there are no tensors, or the limit is not positive.
    """
    if not tensors or max_shard_bytes < 1:
        raise ValueError(f"cannot lay out {len(tensors)} tensors in files of {max_shard_bytes} bytes")
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in tensors:
        if groups[-1] and filled + spec.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return CheckpointLayout(
        tuple(
            ShardFile(name, tuple(sorted(group, key=lambda spec: -itemsize(spec.dtype))))
            for name, group in zip(names, groups, strict=True)
        )
    )
