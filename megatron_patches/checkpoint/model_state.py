"""Sharded weights in Megatron's sharded state dicts: builds the entry of each parameter.

The functions here replace Megatron's corresponding helpers for sharded parameters only; every other tensor goes to the
original. Megatron itself would store the padded weight, whose shape ties a checkpoint to one number of shards.

Megatron is imported only inside the functions: this module is imported before Megatron is patched, and Megatron's
modules keep some objects that they find at import (its seam, torch's functions as default arguments).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from megatron_patches.checkpoint.pieces import StackAxis, WeightPlacement, halves

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedBase

    from megatron_patches.checkpoint.sharded_rows import ShardedRows
    from megatron_patches.sharded_weight import MegatronShardedParam

ProcessGroup = torch.distributed.ProcessGroup
Offsets = Iterable[tuple[int, int, int]]


def is_sharded(tensor: object) -> TypeGuard[MegatronShardedParam]:
    """Whether ``tensor`` is a parameter of which this rank holds one shard."""
    return bool(getattr(tensor, "is_gtp_weight_remat", False))


def sharded_rows_entry(
    parameter: MegatronShardedParam,
    key: str,
    tp_axis: int | None = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    *,
    tp_group: ProcessGroup | None = None,
    replica_group: ProcessGroup | None = None,
    allow_shape_mismatch: bool = False,
) -> ShardedRows:
    """The state dict entry of one sharded parameter.

    Args:
        parameter: the shard, with ``layout`` and ``group``.
        key: name of the checkpoint's tensor.
        tp_axis: the axis that tensor parallelism splits; None if all of its ranks have the whole weight.
        replica_id: see :class:`ShardedRows`; by default the rank in ``replica_group``.
        prepend_offsets: ``(axis, index, count)`` of the leading axes, as Megatron passes them.
        tp_group: tensor-parallel group; Megatron's own by default.
        replica_group: ranks that hold the same shard; by default Megatron's data-parallel group (with context
            parallelism) without the weight-shard axis.
        allow_shape_mismatch: see :class:`ShardedRows`.

    Raises:
        NotImplementedError: if the parameter's storage is quantized.
        ValueError: if the leading axes are not the first ones, each once.
    """
    from megatron.core import parallel_state
    from megatron.core.fp8_utils import is_float8tensor
    from megatron.core.utils import get_pg_rank, get_pg_size

    from megatron_patches.checkpoint.sharded_rows import ShardedRows

    if is_float8tensor(parameter):
        raise NotImplementedError(
            f"{key}: sharded weights in a quantized storage cannot be stored; train without --fp8-param-gather"
        )
    if tp_group is None:
        tp_group = parallel_state.get_tensor_model_parallel_group()
    tp_rank, tp_size = get_pg_rank(tp_group), get_pg_size(tp_group)
    if replica_id is None:
        if replica_group is None:
            replica_group = parallel_state.get_data_parallel_group(with_context_parallel=True, with_gtp_remat=False)
        replica_id = (0, tp_rank if tp_axis is None else 0, get_pg_rank(replica_group))
    placement = WeightPlacement(
        layout=parameter.layout,
        shard=get_pg_rank(parameter.group),
        tp_axis=tp_axis or 0,
        tp_rank=0 if tp_axis is None else tp_rank,
        tp_size=1 if tp_axis is None else tp_size,
        stack=_stack(key, prepend_offsets),
    )
    return ShardedRows(
        key=key,
        data=parameter,
        replica_id=replica_id,
        placement=placement,
        allow_shape_mismatch=allow_shape_mismatch,
    )


def _stack(key: str, prepend_offsets: Offsets) -> tuple[StackAxis, ...]:
    ordered = sorted(prepend_offsets)
    if [axis for axis, _, _ in ordered] != list(range(len(ordered))):
        raise ValueError(f"{key}: {ordered} are not (axis, index, count) of axes 0, 1, ... in front of the weight")
    return tuple(StackAxis(index, count) for _, index, count in ordered)


def wrap_make_tp_sharded_tensor(original: Callable[..., ShardedBase]) -> Callable[..., ShardedBase]:
    """For ``megatron.core.utils.make_tp_sharded_tensor_for_checkpoint``."""

    @functools.wraps(original)
    def make_tp_sharded_tensor(
        tensor: torch.Tensor,
        key: str,
        tp_axis: int = 0,
        replica_id: ReplicaId | None = None,
        prepend_offsets: Offsets = (),
        **kwargs: Any,
    ) -> ShardedBase:
        if not is_sharded(tensor):
            return original(tensor, key, tp_axis, replica_id, prepend_offsets, **kwargs)
        # The data-parallel group that Megatron passes spans the ranks of all shards, which are not replicas.
        kwargs.pop("dp_cp_group", None)
        return sharded_rows_entry(tensor, key, tp_axis, replica_id, prepend_offsets, **kwargs)

    return make_tp_sharded_tensor


def wrap_apply_swiglu_factory(original: Callable[..., ShardedBase]) -> Callable[..., ShardedBase]:
    """For ``megatron.core.transformer.mlp.apply_swiglu_sharded_factory``.

    The original splits a rank's rows in half; for a shard, the halves are not gate and up.
    """
    from megatron_patches.checkpoint.sharded_rows import ShardedRows

    @functools.wraps(original)
    def apply_swiglu_factory(
        original_sh_ten: ShardedBase,
        sharded_offsets: Offsets,
        singleton_local_shards: bool = False,
        **kwargs: Any,
    ) -> ShardedBase:
        if not isinstance(original_sh_ten, ShardedRows):
            return original(original_sh_ten, sharded_offsets, singleton_local_shards, **kwargs)
        suffixes = ("_w", "_v") if singleton_local_shards else ("", "")
        return original_sh_ten.with_parts(halves(original_sh_ten.placement.layout, suffixes))

    return apply_swiglu_factory


def make_sharded_tensors_for_checkpoint_with_gtp_remat(
    state_dict: Mapping[str, torch.Tensor],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = "_extra_state",
    *,
    tp_group: ProcessGroup,
    dp_cp_group: ProcessGroup,
    intra_dp_cp_group: ProcessGroup | None = None,
) -> dict[str, ShardedBase]:
    """Entries of a module's state dict with at least one sharded parameter. Part of Megatron's seam.

    Args:
        state_dict: the module's parameters (the objects themselves) and extra states, by name.
        prefix: prepended to each name in the result and in the checkpoint.
        tensor_parallel_layers_axis_map: the axis that tensor parallelism splits, by name; others are not split.
        sharded_offsets: ``(axis, index, count)`` of the leading axes.
        extra_state_suffix: names with this suffix are objects, not tensors.
        tp_group: tensor-parallel group.
        dp_cp_group: data-parallel group, including the weight-shard axis.
        intra_dp_cp_group: ranks that hold the same shard; by default Megatron's.

    Returns:
        One entry per name.
    """
    from megatron.core import parallel_state

    if intra_dp_cp_group is None:
        intra_dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True, with_gtp_remat=False)
    axes = tensor_parallel_layers_axis_map or {}
    replicas = _Replicas.of(state_dict.values(), tp_group, intra_dp_cp_group)
    entries: dict[str, ShardedBase] = {}
    for name, tensor in state_dict.items():
        key = f"{prefix}{name}"
        if is_sharded(tensor):
            entries[key] = sharded_rows_entry(
                tensor,
                key,
                axes.get(name),
                prepend_offsets=sharded_offsets,
                tp_group=tp_group,
                replica_group=intra_dp_cp_group,
            )
        else:
            is_object = name.endswith(extra_state_suffix)
            groups = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
            entries[key] = _replicated_entry(tensor, key, is_object, axes.get(name), sharded_offsets, replicas, groups)
    return entries


@dataclass(frozen=True)
class _Replicas:
    """Replica ids of tensors that are not sharded, and therefore replicated over the ranks of the shards.

    They use the middle number because Megatron overwrites the last one for experts.

    Attributes:
        cut: for tensors that tensor parallelism splits.
        whole: for all other tensors.
    """

    cut: tuple[int, int, int]
    whole: tuple[int, int, int]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], tp_group: ProcessGroup, data_group: ProcessGroup) -> _Replicas:
        """``data_group``: the ranks that hold the same shard of the sharded parameters among ``tensors``."""
        from megatron.core.utils import get_pg_rank, get_pg_size

        group = next((tensor.group for tensor in tensors if is_sharded(tensor)), None)
        shard, shards = (0, 1) if group is None else (get_pg_rank(group), get_pg_size(group))
        data_rank = get_pg_rank(data_group)
        return cls(cut=(0, shard, data_rank), whole=(0, get_pg_rank(tp_group) * shards + shard, data_rank))


def _replicated_entry(
    tensor: torch.Tensor,
    key: str,
    is_object: bool,
    tp_axis: int | None,
    offsets: Offsets,
    replicas: _Replicas,
    groups: Mapping[str, ProcessGroup],
) -> ShardedBase:
    from megatron.core import utils as core
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    if is_object:
        return make_sharded_object_for_checkpoint(tensor, key, offsets, replica_id=replicas.whole)
    if tp_axis is None:
        return core.make_sharded_tensor_for_checkpoint(
            tensor, key, replica_id=replicas.whole, prepend_offsets=offsets, **groups
        )
    return core.make_tp_sharded_tensor_for_checkpoint(
        tensor, key, tp_axis, replica_id=replicas.cut, prepend_offsets=offsets, **groups
    )
