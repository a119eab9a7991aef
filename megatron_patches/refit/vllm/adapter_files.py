"""Versions of LoRA adapters as files from which vLLM's own loader reads them, in the form of PEFT.

The scale of a module is multiplied into its factor B here, in the type in which vLLM computes, because that is what
vLLM does after loading, bit for bit. vLLM knows a single scale, from the configuration; PEFT may have one per module.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_patches.refit.control.adapter_names import FACTOR_A, FACTOR_B, SCALE, version_name
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.errors import RefitError, StaleVersionError


def tensors_of_peft(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Both factors of each module: A, ``[rank, inputs]``, and B, ``[outputs, rank]``, with the scale multiplied in.

    Args:
        tensors: an adapter's tensors; see [Note: adapter tensors].
        dtype: type in which vLLM computes with adapters.

    Raises:
        RefitError: naming a module whose scale is not a finite number.
    """
    found = {}
    for name, scale in tensors.items():
        if not name.endswith(SCALE):
            continue
        module = name.removesuffix(SCALE)
        if not torch.isfinite(scale).all():
            raise RefitError(f"the scale of {module} is {scale.item()}; it must be a finite number")
        found[module + FACTOR_A] = tensors[module + FACTOR_A].to(dtype)
        found[module + FACTOR_B] = tensors[module + FACTOR_B].to(dtype) * float(scale.item())
    return found


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes an adapter, from :func:`tensors_of_peft`, to an empty folder."""
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    firsts = {name.removesuffix(FACTOR_A): tensor for name, tensor in tensors.items() if name.endswith(FACTOR_A)}
    rank = max(tensor.shape[0] for tensor in firsts.values())
    targets = sorted({module.rpartition(".")[2] for module in firsts})
    # With alpha equal to the rank, vLLM's scale is 1.
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


class AdapterFiles:
    """The files of an engine's adapters, on one worker. Workers of one host write them once between them."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, int], Path] = {}
        self._used: set[tuple[str, int]] = set()
        self._unused: set[tuple[str, int]] = set()

    def check_new(self, adapter: str, version: int) -> None:
        """Refuses a version whose name has been used, by another session too: cache entries may be left of it.

        Raises:
            StaleVersionError: with the name.
        """
        if (adapter, version) in self._used:
            raise StaleVersionError(
                f"this engine has served another {version_name(adapter, version)}, and may have cached what that has "
                "computed; publish with a later version or another name"
            )

    def add(self, adapter: str, version: int, path: Path) -> None:
        """Notes that a version has been written to a folder."""
        self._written[adapter, version] = path
        self._used.add((adapter, version))

    def drop(self, adapter: str, version: int) -> None:
        """Forgets a version that nothing has used."""
        self._written.pop((adapter, version), None)
        self._used.discard((adapter, version))

    def keep(self, adapter: str, versions: Collection[int]) -> None:
        """Removes the versions of an adapter to which nothing refers, neither now nor at the last call.

        A request that was accepted just before its name was dropped may not have been counted as running yet.
        """
        unused = {key for key in self._written if key[0] == adapter and key[1] not in versions}
        for key in unused & self._unused:
            _drop(self._written.pop(key))
        self._unused = {key for key in self._unused if key[0] != adapter} | unused

    def close(self) -> None:
        """Removes all files."""
        for path in self._written.values():
            _drop(path)
        for parent in {path.parent for path in self._written.values()}:
            with contextlib.suppress(OSError):  # another worker has removed it, or has yet to empty it
                parent.rmdir()
        self._written.clear()


@dataclass
class StagedAdapter:
    """A version that is written on all workers of an engine or on none, to its own folder in that of its session.

    A :class:`megatron_patches.refit.vllm.all_or_none.Exchanged` that replaces no earlier version.

    Attributes:
        files: the engine's files, to which it will belong.
        session: folder of the session.
        adapter: name of the adapter.
        version: number of the version.
        tensors: factors of each module, from :func:`tensors_of_peft`.
    """

    files: AdapterFiles
    session: Path
    adapter: str
    version: int
    tensors: dict[str, torch.Tensor]

    def write(self) -> None:
        """Writes the files, beside their final place.

        Raises:
            RefitError: if the folder belongs to another user, others may write to it, or the files cannot be written.
        """
        try:
            _make_private(self.session)
            _drop(self._draft)
            self._draft.mkdir(mode=0o700)
            write_adapter(self._draft, self.tensors)
        except (OSError, SafetensorError) as error:
            _drop(self._draft)
            raise RefitError(
                f"cannot write {version_name(self.adapter, self.version)} to {self.session} ({describe_error(error)}); "
                "make room there, or publish with another folder"
            ) from error

    def build(self) -> None:
        """Does nothing: the files were written while the engine answered requests."""

    def apply(self) -> None:
        """Moves the files to their final folder, unless another worker of this host has."""
        try:
            self._draft.rename(self._path)
        except OSError:
            if not self._path.is_dir():
                raise
            _drop(self._draft)
        self.files.add(self.adapter, self.version, self._path)

    def undo(self) -> None:
        """Removes the files."""
        _drop(self._draft)
        _drop(self._path)
        self.files.drop(self.adapter, self.version)

    def forget(self) -> None:
        """Does nothing: this version replaces no other one."""

    @property
    def _path(self) -> Path:
        return self.session / version_name(self.adapter, self.version)

    @property
    def _draft(self) -> Path:
        return self._path.with_name(f".{self._path.name}.{os.getpid()}")


def _drop(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _make_private(folder: Path) -> None:
    """Makes a folder that only this user can use.

    Raises:
        RefitError: if it exists, and is not such a folder.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RefitError(f"{folder} is not a folder that only user {os.geteuid()} can use; publish with another folder")
