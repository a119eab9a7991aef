"""Checks a checkpoint for missing, short and unreadable files before it is loaded.

Megatron loads directly into the weights, file by file: a truncated file would leave a model that is half old and half
new. The index of a checkpoint (``.metadata``) says how long each file must be, so listing the directory is enough. This
module is also the first to read the index, without running code from it. It does not detect changed bytes; Megatron's
``--verify-integrity`` hashes files, and ``integrity.py`` compares checksums for export.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patches.checkpoint.integrity import INDEX as _INDEX
from megatron_patches.checkpoint.integrity import ForeignCodeError, read_index

_WAY_OUT = "copy the checkpoint again, or load another iteration with --ckpt-step"
_OLD_FORMAT = (
    "it has the format torch, which cannot be loaded into shards; convert it in a run with --etp-size 1 "
    "--auto-detect-ckpt-format --ckpt-convert-format torch_dist --ckpt-convert-save DIRECTORY"
)
# Exceptions raised when reading a truncated or changed pickle or archive.
_UNREADABLE = (
    OSError,
    EOFError,
    TypeError,
    MemoryError,
    OverflowError,
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ImportError,
    pickle.UnpicklingError,
)


class IncompleteCheckpointError(CheckpointingException):
    """A checkpoint lacks a file or the end of one. Nothing of it has been loaded."""


def find_problem(directory: str | os.PathLike[str]) -> str | None:
    """Compare the files of a torch_dist checkpoint with its index.

    Args:
        directory: one iteration's directory.

    Returns:
        One line that names the directory, the first file that is missing, short or unreadable, and the remedy; None if
        all files are complete.
    """
    root = Path(directory)
    try:
        problem = _directory_problem(root) or _storage_problem(root)
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks wait for the answer
        problem = f"its files cannot be examined ({type(error).__name__}: {error})"
    return f"checkpoint {root}: {problem}; {_WAY_OUT}" if problem else None


def _directory_problem(root: Path) -> str | None:
    if not root.is_dir():
        return "the directory is missing"
    config = root / CONFIG_FNAME
    if not config.is_file():
        return f"{CONFIG_FNAME} is missing"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{CONFIG_FNAME} cannot be read ({error})"
    return None


def _storage_problem(root: Path) -> str | None:
    if not (root / _INDEX).is_file():
        return f"{_INDEX} is missing: the save did not end, or the file was not copied"
    try:
        needed = _needed_sizes(read_index(root))
    except ForeignCodeError as error:
        return f"{_INDEX} is not what a checkpoint has: {error}"
    except _UNREADABLE as error:
        return f"{_INDEX} cannot be read ({type(error).__name__}: {error})"
    common = root / COMMON_STATE_FNAME
    if common.is_file() and common.stat().st_size == 0:
        return f"{COMMON_STATE_FNAME} is empty"
    bad = [line for name, size in sorted(needed.items()) if (line := _file_problem(root / name, size))]
    more = f" (and {len(bad) - 1} more of {len(needed)} files)" if len(bad) > 1 else ""
    return bad[0] + more if bad else None


def _needed_sizes(index: Metadata) -> dict[str, int]:
    """Minimum size in bytes of each file, by its path relative to the checkpoint."""
    sizes: dict[str, int] = {}
    for entry in (index.storage_data or {}).values():
        sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    return sizes


def _file_problem(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be examined ({error})"
    if found < size:
        return f"{path.name} has {found} bytes of {size}"
    return None if os.access(path, os.R_OK) else f"{path.name} is not readable"


def wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``megatron.core.dist_checkpointing.serialization.load``."""

    @functools.wraps(original)
    def load(
        sharded_state_dict: Any,
        checkpoint_dir: str,
        sharded_strategy: Any = None,
        validate_access_integrity: bool = True,
        *args: Any,
        process_group: torch.distributed.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> Any:
        if not MultiStorageClientFeature.is_enabled():  # object stores have no partly written files
            # Megatron's own load is collective under the same condition.
            _require_complete(checkpoint_dir, collective=validate_access_integrity, group=process_group)
        return original(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            validate_access_integrity,
            *args,
            process_group=process_group,
            **kwargs,
        )

    return load


def _require_complete(directory: str, *, collective: bool, group: torch.distributed.ProcessGroup | None) -> None:
    if not collective or not torch.distributed.is_initialized():
        problem = find_problem(directory)
    else:
        # Only one rank checks: thousands of ranks querying thousands of files would overload a shared file system.
        verdict: list[str | None] = [None]
        if torch.distributed.get_rank(group) == 0:
            verdict = [find_problem(directory)]
        torch.distributed.broadcast_object_list(verdict, group=group, group_src=0)
        problem = verdict[0]
    if problem:
        raise IncompleteCheckpointError(problem)


def wrap_load_common_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``megatron.core.dist_checkpointing.serialization.load_common_state_dict``.

    The original reads a few bytes on every rank and changes nothing, so the files are checked only if it fails.
    """

    @functools.wraps(original)
    def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
        try:
            return original(checkpoint_dir)
        except (*_UNREADABLE, CheckpointingException, CheckpointException) as error:
            problem = find_problem(checkpoint_dir)
            if problem is None:
                problem = f"checkpoint {checkpoint_dir}: its common state cannot be read ({error}); {_WAY_OUT}"
            raise IncompleteCheckpointError(problem) from error

    return load_common_state_dict


def wrap_get_checkpoint_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``megatron.training.checkpointing._get_checkpoint_format``.

    Without ``metadata.json``, Megatron assumes another format. Files of its old format hold whole weights.
    """

    @functools.wraps(original)
    def get_checkpoint_format(checkpoint_name: str, args: Any) -> Any:
        if args.ckpt_format == "torch_dist" and not MultiStorageClientFeature.is_enabled():
            root = Path(checkpoint_name)
            legacy = root.is_dir() and any(entry.name.startswith("mp_rank_") for entry in root.iterdir())
            if legacy and _is_sharded(args):
                raise CheckpointingException(f"checkpoint {root}: {_OLD_FORMAT}")
            problem = None if legacy else _directory_problem(root)
            if problem:
                raise IncompleteCheckpointError(f"checkpoint {root}: {problem}; {_WAY_OUT}")
        return original(checkpoint_name, args)

    return get_checkpoint_format


def _is_sharded(args: Any) -> bool:
    # --use-checkpoint-args looks at the checkpoint before the sizes that were left out have become 1.
    return any((getattr(args, name, None) or 1) > 1 for name in ("etp_size", "expert_etp_size"))
