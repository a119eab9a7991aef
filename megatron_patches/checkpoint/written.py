"""Names the rank that could not write its part of a checkpoint, and the folder, in one line on every rank.

Megatron writes the index last, so what is not whole is never taken for a checkpoint. But its own error names the rank
on one rank only, does not name the folder, and is no ``Exception``, so that a launcher does not report it.
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
    """A rank could not write its part of a checkpoint. Those before it are untouched."""


def wrap_finalize_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks``, also of asynchronous saves.

    What finalizes a save is collective, and fails on all ranks if one of them could not write.
    """

    @functools.wraps(original)
    def get_save_and_finalize_callbacks(self: Any, writer: Any, save_state_dict_ret: Any, *args: Any) -> Any:
        request = original(self, writer, save_state_dict_ret, *args)
        *_, ranks = save_state_dict_ret
        finalize = functools.partial(_finalize, request.finalize_fns, str(writer.checkpoint_id), ranks.group)
        return request._replace(finalize_fns=[finalize])

    return get_save_and_finalize_callbacks


def _finalize(functions: list[Callable[[], None]], directory: str, group: dist.ProcessGroup | None) -> None:
    try:
        for function in functions:
            function()
    except CheckpointException as error:
        own = list(error.failures), socket.gethostname(), _room(directory)
        everyone = gather_objects(own, group, f"report of the ranks that could not write {directory}")
        # Only one rank knows them, by their numbers in the group.
        failed = sorted({number for numbers, _, _ in everyone for number in numbers})
        ranks = list(range(len(everyone))) if group is None else dist.get_process_group_ranks(group)
        _, host, room = everyone[failed[0]]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointNotWrittenError(
            f"checkpoint {directory}: rank {ranks[failed[0]]} on {host}{more} could not write its part, and {room} "
            f"there; its log has the error. Make room, and go on from a whole checkpoint with --load "
            f"{Path(directory).parent}"
        ) from error


def _room(directory: str) -> str:
    try:
        return f"{size_text(shutil.disk_usage(directory).free)} are free"
    except OSError:
        return "how much is free is unknown"
