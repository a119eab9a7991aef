"""``--log-params-norm`` omits the biases of experts on all ranks except those of the first expert shards.

``calc_params_l2_norm`` counts parameters that are replicated over the expert shard group only on the group's first
rank, and then sums over groups that do not span the shard group. The last rank of a run, which writes the log, never
holds the first shard if experts are sharded. With this fix, all ranks use the result of the group's first rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.registry import PatchRecord


def _replace(calc_params_l2_norm: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(calc_params_l2_norm)
    def replacement(model: Any, *args: Any, **kwargs: Any) -> float:
        from megatron.core import parallel_state

        norm = calc_params_l2_norm(model, *args, **kwargs)
        if parallel_state.get_expert_gtp_weight_remat_world_size() == 1:
            return norm
        shared = torch.tensor([norm], dtype=torch.float64, device="cuda")
        dist.broadcast(shared, group=parallel_state.get_expert_gtp_weight_remat_group(), group_src=0)
        return float(shared.item())

    return replacement


RECORD = PatchRecord(
    target="megatron.training.utils.common_utils:calc_params_l2_norm",
    replace=_replace,
    reason="it counts the biases of experts on the ranks of their first shards only",
    sha256="9dbbae7592c3ba4e",
)
