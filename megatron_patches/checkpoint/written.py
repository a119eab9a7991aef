"""Names the rank that could not write its part of a checkpoint, or a file that one rank writes for all, on every rank.

Megatron writes the index late, and ``latest_checkpointed_iteration.txt`` last, so what is not whole is never taken for
a checkpoint. But its own error names the rank on one rank only, does not name the folder, and is no ``Exception``, so
that a launcher does not report it. If the index, ``metadata.json`` or ``latest_checkpointed_iteration.txt`` cannot be
written, only the rank that writes it raises, and the others wait for it. The last one is empty then, and no checkpoint
can be loaded.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import core
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from etp.collectives.works import gather_objects
from megatron_patches.refit.size_text import size_text

_TRACKER = "latest_checkpointed_iteration.txt"


class CheckpointNotWrittenError(CheckpointingException):
    """A rank could not write its part of a checkpoint, or a file for all. The checkpoints before it are untouched."""


def wrap_finalize_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks``, also of asynchronous saves.

    What finalizes a save is collective, and fails on all ranks if one of them could not write.
    """

    @functools.wraps(original)
    def get_save_and_finalize_callbacks(self: Any, writer: Any, save_state_dict_ret: Any, *args: Any) -> Any:
        request = original(self, writer, save_state_dict_ret, *args)
        *_, ranks = save_state_dict_ret
        config = CheckpointingConfig(self.backend, self.version)
        finalize = functools.partial(_finalize, request.finalize_fns, writer, config, ranks.group)
        return request._replace(finalize_fns=[finalize])

    return get_save_and_finalize_callbacks


def _finalize(
    functions: list[Callable[[], None]], writer: Any, config: CheckpointingConfig, group: dist.ProcessGroup | None
) -> None:
    directory, finish = str(writer.checkpoint_id), writer.finish
    errors: list[BaseException] = []
    failed: dict[int, str] = {}

    def finish_without_raising(*args: Any) -> None:
        # One rank writes the index, and all others wait for its word that no part is missing.
        what = "the index"
        try:
            finish(*args)
            what = core.CONFIG_FNAME
            core.save_config(config, directory)
        except OSError as error:
            errors.append(error)
            failed[dist.get_rank(group)] = what

    writer.finish = finish_without_raising
    try:
        for function in functions:
            function()
    except CheckpointException as error:
        errors.append(error)
        # Only one rank knows them, by their numbers in the group.
        failed |= dict.fromkeys(error.failures, "its part")
    finally:
        del writer.finish
    _raise_together(failed, directory, str(Path(directory).parent), next(iter(errors), None), group)


def wrap_save_config(original: Callable[..., None]) -> Callable[..., None]:
    """For ``megatron.core.dist_checkpointing.core.save_config``, which :func:`_finalize` calls before Megatron does."""

    @functools.wraps(original)
    def save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
        try:
            written = core.maybe_load_config(checkpoint_dir)
        except ValueError:  # an earlier save was cut off there
            written = None
        if written != config:
            original(config, checkpoint_dir)

    return save_config


def wrap_save_checkpoint(original: Callable[..., None]) -> Callable[..., None]:
    """For ``megatron.training.checkpointing.save_checkpoint``."""

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        from megatron.training.global_vars import get_args

        error = None
        try:
            original(*args, **kwargs)
        except OSError as raised:
            error = _of_tracker(raised)
            # In it, the other ranks wait for the end of the save.
            dist.barrier()
        if not get_args().async_save:
            _raise_tracker_together(error)

    return save_checkpoint


def wrap_schedule_async_save(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """For ``megatron.training.async_utils.schedule_async_save``."""

    @functools.wraps(original)
    def schedule_async_save(async_request: Any) -> None:
        finalize = functools.partial(_finalize_tracker, async_request.finalize_fns)
        original(async_request._replace(finalize_fns=[finalize]))

    return schedule_async_save


def _finalize_tracker(functions: list[Callable[[], None]]) -> None:
    error = None
    try:
        for function in functions:
            function()
    except OSError as raised:
        error = _of_tracker(raised)
    _raise_tracker_together(error)


def _of_tracker(error: OSError) -> OSError:
    """``error`` if the tracker could not be written; raises any other, which the other ranks may not wait for."""
    if Path(str(error.filename)).name != _TRACKER:
        raise error
    return error


def _raise_tracker_together(error: OSError | None) -> None:
    directory = str(Path(error.filename).parent) if error else ""
    _raise_together({dist.get_rank(): _TRACKER} if error else {}, directory, directory, error, None)


def wrap_getattr_of_client(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """For ``MaybeMultiStorageClient.__getattr__``, whose ``open`` writes the files that one rank writes for all."""

    @functools.wraps(original)
    def getattr_of_client(self: Any, name: str) -> Any:
        found = original(self, name)
        return _open if found is open else found

    return getattr_of_client


def _open(path: str, mode: str = "r", **kwargs: Any) -> contextlib.AbstractContextManager[IO[Any]]:
    """As ``open``, but a text that is written takes the place of the former one once it is whole."""
    return _replacing(Path(path), kwargs) if mode == "w" else Path(path).open(mode, **kwargs)


@contextlib.contextmanager
def _replacing(path: Path, options: Mapping[str, Any]) -> Iterator[IO[str]]:
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("w", **options) as file:
            yield file
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        # That of a full disk names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _raise_together(
    failed: dict[int, str], directory: str, load: str, error: BaseException | None, group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks if one could not write. Collective.

    Args:
        failed: what each rank could not write, by its number in the group, as far as this rank knows.
        directory: where it could not.
        load: the folder of the checkpoints.
        error: this rank's own.
        group: the ranks; all of them if None.

    Raises:
        CheckpointNotWrittenError: with the first rank of those that failed.
    """
    report = failed, directory, load, socket.gethostname(), _room(directory)
    everyone = gather_objects(report, group, "report of the ranks that could not write a checkpoint")
    known = {number: what for told, *_ in everyone for number, what in told.items()}
    if not known:
        return
    number = min(known)
    _, where, load, host, room = everyone[number]
    rank = number if group is None else dist.get_process_group_ranks(group)[number]
    more = f" (and {len(known) - 1} more)" if len(known) > 1 else ""
    raise CheckpointNotWrittenError(
        f"checkpoint {where}: rank {rank} on {host}{more} could not write {known[number]}, and {room} there; its log "
        f"has the error. Make room, and go on from a whole checkpoint with --load {load}"
    ) from error


def _room(directory: str) -> str:
    try:
        return f"{size_text(shutil.disk_usage(directory).free)} are free"
    except OSError:
        return "how much is free is unknown"
