"""Opens a Hugging Face checkpoint: its configuration, and where each tensor lies in which safetensors file.

Only headers are read. What they say is checked against the files' sizes, so a download that was cut off is refused
before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_patches.refit.checkpoints.safetensors_layout import INDEX_NAME
from megatron_patches.refit.errors import LoadError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.dtypes import SAFETENSORS_CODE
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.models.config_traits import read_config

_SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_Count = Annotated[int, msgspec.Meta(ge=0)]
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last one if it is nested too deeply
_DTYPE: Mapping[str, str] = {code: dtype for dtype, code in SAFETENSORS_CODE.items()}


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        spec: name, shape and dtype.
        file: name of its file.
        offset: its first byte in the file.
    """

    spec: TensorSpec
    file: str
    offset: int


@dataclass(frozen=True)
class HuggingFaceFiles:
    """A checkpoint on disk.

    Attributes:
        directory: the folder.
        config: content of ``config.json``.
        tensors: every tensor, by name.
    """

    directory: Path
    config: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]

    def manifest(self, names: Iterable[str]) -> Manifest:
        """The named tensors as one side of a plan."""
        return Manifest.of_whole(0, "", (self.tensors[name].spec for name in names))


def open_checkpoint(directory: Path) -> HuggingFaceFiles:
    """Reads the configuration, the index and the header of every file.

    Args:
        directory: folder with ``config.json`` and either ``model.safetensors`` or several files with an index.

    Raises:
        LoadError: if a file is missing, damaged or cut off, or a tensor is in two files; names the file.
        UnsupportedModelError: if there is no readable ``config.json``.
    """
    if not directory.is_dir():
        raise LoadError(f"{directory} is not a directory; name the folder of a Hugging Face checkpoint")
    config = read_config(directory)
    indexed = _indexed(directory)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(indexed.values())) if indexed else [_only_file(directory)]:
        for tensor in _tensors_of(directory / file):
            known = found.setdefault(tensor.spec.name, tensor)
            if known is not tensor:
                raise LoadError(f"{tensor.spec.name} is in both {known.file} and {file} of {directory}")
    for name, file in indexed.items():
        if name not in found or found[name].file != file:
            raise LoadError(f"{directory / INDEX_NAME} says that {name} is in {file}, which does not have it")
    return HuggingFaceFiles(directory, config, found)


def _indexed(directory: Path) -> Mapping[str, str]:
    """File of each tensor as the index says; empty without an index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the latter if it is nested too deeply
        raise LoadError(f"{path} is not JSON: {error}") from error
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where:
        raise LoadError(f"{path} has no weight_map")
    # transformers would read this file, and others those that the index names.
    if _SINGLE_FILE not in where.values() and (directory / _SINGLE_FILE).exists():
        raise LoadError(
            f"{directory} has {_SINGLE_FILE} beside {INDEX_NAME}, which does not name it; remove the one that is not "
            "the model's"
        )
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise LoadError(f"{path} says that {name} is in {file!r}, which is not a file beside it")
    return where


def _only_file(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if _SINGLE_FILE in files:
        return _SINGLE_FILE
    if len(files) == 1:
        return files[0]
    if files:
        raise LoadError(f"{directory} has {len(files)} safetensors files and no {INDEX_NAME}; download it completely")
    raise LoadError(f"{directory} has no safetensors file; save the model with save_pretrained of transformers")


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    """The tensors of one file, from its header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise LoadError(f"{path} is no complete safetensors file: it has {size} bytes; download it again")
            header = msgspec.json.decode(handle.read(length), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from error
    except _NO_JSON as error:
        raise LoadError(f"{path} is no safetensors file: its header is no JSON object ({error})") from error
    for name, entry in header.items():
        if name != "__metadata__":
            yield _tensor(path, name, entry, 8 + length, size)


def _tensor(path: Path, name: str, content: msgspec.Raw, begin: int, size: int) -> StoredTensor:
    """One entry of a header. Tensors begin at byte ``begin`` of a file of ``size`` bytes."""
    try:
        entry = msgspec.json.decode(content, type=_Entry)
    except _NO_JSON as error:
        raise LoadError(f"{path} does not say dtype, shape and data_offsets of {name}: {error}") from error
    dtype = _DTYPE.get(entry.dtype)
    if dtype is None:
        raise LoadError(f"{name} in {path} is of type {entry.dtype}; known are {', '.join(_DTYPE)}")
    spec = TensorSpec(name, entry.shape, dtype)
    first, stop = entry.data_offsets
    if stop - first != spec.nbytes:
        raise LoadError(
            f"{name} in {path} has {stop - first} bytes; its shape {spec.shape} of {dtype} needs {spec.nbytes}"
        )
    if begin + stop > size:
        raise LoadError(f"{path} is cut off: {name} ends at byte {begin + stop} of {size}; download it again")
    return StoredTensor(spec, path.name, begin + first)
