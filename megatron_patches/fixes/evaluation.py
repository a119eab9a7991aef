"""The evaluation loss is averaged over only one shard's share of the data.

The ranks of a shard group read different batches. ``evaluate`` includes these ranks when it computes the number of
microbatches, but reduces the losses over the model's ``dp_cp`` group, which excludes the shard group. Each rank of the
shard group then reports the loss of its own share. ``train_step`` uses ``dp_cp_gtp_remat``, the group of all data. With
this fix, so does evaluation: while it runs, the model exposes a copy of its process groups in which ``dp_cp`` is that
group.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def replacement(forward_step_func: Any, data_iterator: Any, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import get_attr_wrapped_model

        owner = get_attr_wrapped_model(model[0], "pg_collection", return_model_obj=True)
        groups = owner.pg_collection
        all_data = getattr(groups, "dp_cp_gtp_remat", None)
        if all_data is None or all_data.size() == groups.dp_cp.size():
            return evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
        owner.pg_collection = copy.copy(groups)
        owner.pg_collection.dp_cp = all_data
        try:
            return evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
        finally:
            owner.pg_collection = groups

    return replacement


RECORD = PatchRecord(
    target="megatron.training.training:evaluate",
    replace=_replace,
    reason="it reduces the loss over a group that leaves out the shard group's other batches",
    upstream="NVIDIA/Megatron-LM#6717",
    sha256="80f7316dbb102e9c",
)
