"""``--log-num-zeros-in-grad`` counts the padding of shards, whose gradient is always zero.

Megatron's optimizers count what they hold: flat parts of shards with the distributed optimizer, otherwise whole shards
or fp32 copies of them. With this fix, their padding is subtracted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from etp import ETPShardedParam
from megatron_patches.registry import PatchRecord

_MODULE = "megatron.core.optimizer.optimizer"


def _replace(count_zeros: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(count_zeros)
    def replacement(self: Any) -> int:
        return count_zeros(self) - _padding([self], self.get_grad_stats_parallel_group())

    return replacement


def _replace_chained(count_zeros: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(count_zeros)
    def replacement(self: Any) -> int:
        zeros = count_zeros(self)
        if not self.grads_states_parallel_group_is_shared():
            return zeros  # the sum of what each optimizer counted for itself
        return zeros - _padding(self.chained_optimizers, self.get_grad_stats_parallel_group())

    return replacement


def _padding(optimizers: Iterable[Any], group: dist.ProcessGroup) -> int:
    """Padding elements that all ranks of ``group`` count in these optimizers. Collective if any is sharded."""
    from megatron.core import parallel_state

    if parallel_state.get_gtp_weight_remat_world_size() * parallel_state.get_expert_gtp_weight_remat_world_size() == 1:
        return 0
    local = sum(
        max(0, stop - max(start, _logical_numel(shard)))
        for optimizer in optimizers
        for shard, start, stop in _held(optimizer)
        if isinstance(shard, ETPShardedParam) and _is_counted(shard, optimizer)
    )
    total = torch.tensor([local], dtype=torch.int64, device="cuda")
    dist.all_reduce(total, group=group)
    return int(total.item())


def _held(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """The model's parameters, and which flat range of their elements this rank's optimizer holds."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if hasattr(optimizer, "model_param_gbuf_map"):
        for parameter in optimizer.model_param_gbuf_map:
            part = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, part.start, part.end
        return
    groups = [group["params"] for group in optimizer.param_groups]
    if hasattr(optimizer, "float16_groups"):
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
    for parameter in (parameter for group in groups for parameter in group):
        yield parameter, 0, parameter.numel()


def _logical_numel(shard: ETPShardedParam) -> int:
    return shard.layout.logical_rows(shard.group_rank) * shard.layout.row_numel


def _is_counted(shard: ETPShardedParam, optimizer: Any) -> bool:
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    groups = {name: getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
    return bool(param_is_not_shared(shard) and param_is_not_tensor_parallel_duplicate(shard, **groups))


_REASON = "it counts the padding of shards as gradients of zero"
RECORDS = (
    PatchRecord(
        target=f"{_MODULE}:MegatronOptimizer.count_zeros", replace=_replace, reason=_REASON, sha256="cfc05024048db439"
    ),
    PatchRecord(
        target=f"{_MODULE}:ChainedOptimizer.count_zeros",
        replace=_replace_chained,
        reason=_REASON,
        sha256="d8aa56d9b142c1d6",
    ),
)
