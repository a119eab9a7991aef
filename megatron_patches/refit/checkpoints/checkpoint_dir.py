"""The directory that an export writes, hidden until it is complete.

Everything is written to a sibling of the target, ``.<name>.partial-<token>``, which is renamed at the end. Readers see
the old checkpoint or the new one, never a mixture. On failure the previous state remains.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_patches.refit.checkpoints.safetensors_layout import INDEX_NAME, CheckpointLayout
from megatron_patches.refit.errors import ExportError

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # not those of an adapter or an optimizer
_RESERVED_BYTES = 1 << 20  # for JSON files and file system metadata
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class CheckpointDirectory:
    """A checkpoint directory in the making. Rank 0 creates, commits or discards it; other ranks write files inside.

    Args:
        target: final path of the checkpoint.
        token: distinguishes this export's partial directory from others'; equal on every rank.
        overwrite: whether to replace an earlier export at ``target``.
    """

    def __init__(self, target: str | os.PathLike[str], token: str, overwrite: bool = False) -> None:
        self.target = Path(target).expanduser().resolve()
        self.partial = self.target.parent / f".{self.target.name}.partial-{token}"
        self.overwrite = overwrite

    def create(self) -> None:
        """Checks the target and creates the empty partial directory.

        Raises:
            ExportError: if the target exists already, or the directory cannot be created; with the remedy.
        """
        self._check_target()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.partial.mkdir()
        except OSError as error:
            raise ExportError(
                f"cannot write to {self.target.parent} ({error.strerror}); choose another output directory"
            ) from error

    def allocate(self, layout: CheckpointLayout) -> None:
        """Creates every file at its final size with its header in place.

        Raises:
            ExportError: if the file system has less free space than the checkpoint needs.
            OSError: if a file cannot be written.
        """
        free = shutil.disk_usage(self.partial).free
        needed = layout.nbytes + _RESERVED_BYTES
        if free < needed:
            raise ExportError(
                f"the checkpoint needs {needed / 1e6:.1f} MB and {self.target.parent} has {free / 1e6:.1f} MB free; "
                "make room or choose another output directory"
            )
        for file in layout.files:
            path = self.partial / file.name
            with path.open("wb") as handle, named(path):
                handle.write(file.header)
                handle.truncate(file.nbytes)
                handle.flush()
                os.fsync(handle.fileno())

    def commit(self, layout: CheckpointLayout, config: Mapping[str, object], generation: Mapping[str, object]) -> None:
        """Writes the JSON files and moves the checkpoint to its target in one step.

        Args:
            layout: the files written.
            config: content of ``config.json``.
            generation: content of ``generation_config.json``; empty for none.

        Raises:
            ExportError: if the target has appeared in the meantime, or may not be replaced.
            OSError: if a file cannot be written.
        """
        self._check_target()
        _write_json(self.partial / CONFIG_NAME, config)
        if generation:
            _write_json(self.partial / GENERATION_NAME, generation)
        index = layout.index()
        if index is not None:
            _write_json(self.partial / INDEX_NAME, index)
        replaced = self.target.is_dir() and any(self.target.iterdir())
        if replaced:
            self._carry_over()
        _sync_directory(self.partial)
        if replaced:
            _swap(self.partial, self.target)
        else:
            self.partial.rename(self.target)
        _sync_directory(self.target.parent)
        if replaced:
            try:
                shutil.rmtree(self.partial)  # contains the old checkpoint now
            except OSError as error:  # for example for files in use, on some network file systems
                logger.error("%s is in place; the one before could not be removed: %s", self.target, error)

    def discard(self) -> None:
        """Removes the partial directory. The target is unchanged."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not self.target.is_dir():
            raise ExportError(f"{self.target} exists and is not a directory; choose another output directory")
        if self.target.is_mount():  # the rename at the end would fail, and all before it would be on another disk
            raise ExportError(f"{self.target} is a mount point, which cannot be replaced; choose a directory in it")
        entries = sorted(self.target.iterdir())
        if not entries:
            return
        if not self.overwrite:
            raise ExportError(
                f"{self.target} is not empty; choose another output directory, or pass --overwrite to replace the "
                "checkpoint in it"
            )
        if not (self.target / CONFIG_NAME).is_file():
            raise ExportError(
                f"{self.target} holds no {CONFIG_NAME}, so it is not a checkpoint that --overwrite may replace; "
                "choose another output directory"
            )
        nested = next((entry for entry in entries if not (entry.is_file() or entry.is_symlink())), None)
        if nested is not None:
            raise ExportError(f"{nested} is not a file of a checkpoint; move it away before replacing {self.target}")

    def _carry_over(self) -> None:
        """Copies other files beside the old checkpoint, such as a tokenizer, into the new one; links stay links."""
        replaced = {CONFIG_NAME, GENERATION_NAME, INDEX_NAME, *_named_by_index(self.target / INDEX_NAME)}
        for entry in self.target.iterdir():
            if entry.name not in replaced and not _WEIGHTS.fullmatch(entry.name):
                shutil.copy2(entry, self.partial / entry.name, follow_symlinks=False)


def _named_by_index(path: Path) -> set[str]:
    """The files that an index names; none if it is missing or unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    where = content.get("weight_map") if isinstance(content, dict) else None
    return {file for file in where.values() if isinstance(file, str)} if isinstance(where, dict) else set()


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    with path.open("w", encoding="utf-8") as handle, named(path):
        json.dump(content, handle, indent=2)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds the file name to an OSError of a write or sync, which lacks it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _swap(first: Path, second: Path) -> None:
    """Exchanges two directories in one step, or in two renames if the system does not support that.

    Between the two renames the target has no checkpoint. If the second rename fails, the first is undone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None:
        done = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
        if done == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(second))
    aside = first.with_name(first.name + ".old")
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)
