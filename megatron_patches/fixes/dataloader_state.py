"""The ranks of a shard group save the states of their data loaders to one file.

With ``--dataloader-save``, the state of an external data loader goes to a file that is named by the data-parallel rank.
Megatron takes this rank from the model's group of replicas, which leaves out the shard group. The ranks of a shard
group read different batches, but write to the same file, and after a restart all but one of them lack their state. With
this fix, the rank is that of the group over which data is distributed, as when a loader is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(save_state: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save_state)
    def replacement(
        train_iterator: Any, iteration: int, dataloader_save_path: Any, *, dp_group: Any = None, **groups: Any
    ) -> None:
        from megatron.core import parallel_state

        if parallel_state.get_gtp_weight_remat_world_size() > 1:
            dp_group = parallel_state.get_data_parallel_group()
        save_state(train_iterator, iteration, dataloader_save_path, dp_group=dp_group, **groups)

    return replacement


RECORD = PatchRecord(
    target="megatron.training.checkpointing:maybe_save_dataloader_state",
    replace=_replace,
    reason="it names the file by a rank that leaves out the shard group, whose ranks have data of their own",
    sha256="5719c273dd140052",
)
