"""Names the rank that could not write its part of a checkpoint, or its index, and where, in one line on every rank.

Megatron writes the index last, so what is not whole is never taken for a checkpoint. But its own error names the rank
on one rank only, does not name the folder, and is no ``Exception``, so that a launcher does not report it. If the index
cannot be written, only the rank that writes it raises, and the others wait for it.
"""

from __future__ import annotations

import functools
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from etp.collectives.works import gather_objects
from megatron_patches.refit.size_text import size_text


class CheckpointNotWrittenError(CheckpointingException):
    """A rank could not write its part of a checkpoint, or the index. Those before it are untouched."""


def wrap_finalize_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks``, also of asynchronous saves.

    What finalizes a save is collective, and fails on all ranks if one of them could not write.
    """

    @functools.wraps(original)
    def get_save_and_finalize_callbacks(self: Any, writer: Any, save_state_dict_ret: Any, *args: Any) -> Any:
        request = original(self, writer, save_state_dict_ret, *args)
        *_, ranks = save_state_dict_ret
        return request._replace(finalize_fns=[functools.partial(_finalize, request.finalize_fns, writer, ranks.group)])

    return get_save_and_finalize_callbacks


def _finalize(functions: list[Callable[[], None]], writer: Any, group: dist.ProcessGroup | None) -> None:
    directory, finish = str(writer.checkpoint_id), writer.finish
    errors: list[BaseException] = []

    def finish_without_raising(*args: Any) -> None:
        # One rank writes the index, and all others wait for its word that no part is missing.
        try:
            finish(*args)
        except OSError as error:
            errors.append(error)

    writer.finish = finish_without_raising
    parts: list[int] = []
    try:
        for function in functions:
            function()
    except CheckpointException as error:
        errors.append(error)
        # Only one rank knows them, by their numbers in the group.
        parts = list(error.failures)
    finally:
        del writer.finish
    index = bool(errors) and not isinstance(errors[0], CheckpointException)
    report = parts, index, socket.gethostname(), _room(directory)
    everyone = gather_objects(report, group, f"report of the ranks that could not write {directory}")
    failed, what = sorted({number for numbers, *_ in everyone for number in numbers}), "its part"
    if not failed:
        failed, what = [number for number, (_, is_index, *_) in enumerate(everyone) if is_index], "the index"
    if not failed:
        return
    ranks = list(range(len(everyone))) if group is None else dist.get_process_group_ranks(group)
    *_, host, room = everyone[failed[0]]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    raise CheckpointNotWrittenError(
        f"checkpoint {directory}: rank {ranks[failed[0]]} on {host}{more} could not write {what}, and {room} there; "
        f"its log has the error. Make room, and go on from a whole checkpoint with --load {Path(directory).parent}"
    ) from next(iter(errors), None)


def _room(directory: str) -> str:
    try:
        return f"{size_text(shutil.disk_usage(directory).free)} are free"
    except OSError:
        return "how much is free is unknown"
