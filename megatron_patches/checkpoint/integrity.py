"""Reads a checkpoint's index without running code from it, and finds changed bytes in its files.

The index (``.metadata``) is a pickle, and unpickling calls whatever it names, so only the classes of PyTorch's
distributed checkpoints are allowed. Each tensor in the other files is a separate zip archive with a checksum, which
PyTorch writes but never compares.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
_CLASSES: dict[str, str] = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath Path",
    "pathlib._local": "PosixPath PurePosixPath Path",
}


class ForeignCodeError(pickle.UnpicklingError):
    """An index names something that does not belong in an index and that loading it would call."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Allow the classes of an index, and PyTorch's element types."""
        if global_name in _CLASSES.get(module_name, "").split():
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise ForeignCodeError(f"it would run {module_name}.{global_name}; do not load it unless you trust its origin")


def read_index(directory: Path) -> Metadata:
    """A checkpoint's index.

    Raises:
        ForeignCodeError: if it names anything that does not belong in an index. None of its code has run.
        pickle.UnpicklingError: if it is damaged.
    """
    with (directory / INDEX).open("rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__} instead of an index")
    return index


def find_changed(
    directory: Path, wanted: Callable[[str], bool], part: int = 0, parts: int = 1
) -> tuple[str, str, str] | None:
    """The first entry whose bytes differ from the checksum that was written with them.

    Args:
        directory: one iteration's directory, whose files must have their full length.
        wanted: which entries to read, by name.
        part: which of ``parts`` shares of the entries to read; ranks divide the work this way.
        parts: number of shares.

    Returns:
        The entry's name, its file's name, and the problem; None if there is none.
    """
    index = read_index(directory)
    stored = [(key.fqn, place) for key, place in (index.storage_data or {}).items() if wanted(key.fqn)]
    stored.sort(key=lambda entry: (entry[1].relative_path, entry[1].offset))
    for name, place in stored[part::parts]:
        with (directory / place.relative_path).open("rb") as file:
            problem = _archive_problem(_Slice(file, place.offset, place.length))
        if problem:
            return name, place.relative_path, problem
    return None


def _archive_problem(data: _Slice) -> str:
    try:
        with zipfile.ZipFile(data) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OverflowError, ValueError) as error:
        return f"is no archive of a tensor any more ({error})"
    return f"has changed bytes in {bad}" if bad else ""


class _Slice:
    """Part of a file as a separate file object, for ``zipfile``."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As ``io.BufferedReader``."""
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError("its directory points outside of it")
        return self._at

    def tell(self) -> int:
        """Position of the next byte to read."""
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Up to ``size`` bytes; all remaining bytes if it is negative or None."""
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def close(self) -> None:
        """Do nothing: the underlying file stays open."""
