"""Megatron's Muon scales updates by padded sizes, keeps query, key and value together, and norms miss experts' shards.

:class:`megatron_patches.muon.ShardedMuon` replaces it for models with sharded weights. The norm of all gradients counts
experts' shards of this rank only, because it is summed over a group that does not span the experts' shard group; with
``--optimizer adam`` Megatron sums over the right one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.checkpoint.model_state import is_sharded
from megatron_patches.refusals import MUON_RELEASE, has_muon
from megatron_patches.registry import PatchRecord


def _replace_build(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def replacement(config: Any, model_chunks: Any, config_overrides: Any = None, pg_collection: Any = None) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = copy.copy(pg_collection or ProcessGroupCollection.use_mpu_process_groups())
        if hasattr(groups, "tp_ep_pp_with_egtp_remat"):
            groups.tp_ep_pp = groups.tp_ep_pp_with_egtp_remat
        return build(config, model_chunks, config_overrides, groups)

    return replacement


def _replace_create(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def replacement(config: Any, param_groups: Any, eopt_name: str, model_chunks: Any, pg_collection: Any) -> Any:
        if not any(is_sharded(param) for group in param_groups for param in group["params"]):
            return create(config, param_groups, eopt_name, model_chunks, pg_collection)
        _check(config, eopt_name)
        if eopt_name == "lion":
            # Element-wise: a shard is stepped as any other parameter.
            return create(config, param_groups, eopt_name, model_chunks, pg_collection)
        from megatron.core.optimizer import emerging_optimizers as megatron

        from megatron_patches.muon import ShardedMuon

        entry = megatron._EMERGING_OPTIMIZERS[eopt_name]
        options = megatron._muon_config_to_kwargs(config, model_chunks, pg_collection)
        _mark_whole_query_groups(model_chunks, options["qkv_split_shapes"])
        return ShardedMuon(param_groups, **options), entry.init_state_fn

    return replacement


def _check(config: Any, name: str) -> None:
    """Refuse, in scripts without Megatron's command line too, what ``megatron_patches.refusals`` lists."""
    if name not in ("lion", "muon"):
        raise UnsupportedConfigurationError(
            f"optimizer {name} would take each shard for a whole matrix; with sharded weights use muon, lion or adam"
        )
    if config.use_layer_wise_distributed_optimizer or config.optimizer.startswith("dist_"):
        raise UnsupportedConfigurationError(
            "a layer-wise distributed optimizer gives each replica of a shard other weights to step; with sharded "
            f"weights use optimizer {name} without use_layer_wise_distributed_optimizer"
        )
    if name == "muon" and not has_muon():
        raise UnsupportedConfigurationError(
            f"Muon for sharded weights needs emerging-optimizers {MUON_RELEASE}: "
            f"pip install 'emerging-optimizers=={MUON_RELEASE}.*'"
        )


def _mark_whole_query_groups(model_chunks: Sequence[Any], qkv_split_shapes: Sequence[int]) -> None:
    """Mark weights of query, key and value by their rows, as Megatron does by those of the shards."""
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            if is_sharded(param) and "linear_qkv.weight" in name and param.requires_grad:
                param.is_qkv = param.layout.rows % sum(qkv_split_shapes) == 0
                param.qkv_split_shapes = list(qkv_split_shapes)


RECORDS = (
    PatchRecord(
        target="megatron.core.optimizer:_get_megatron_emerging_optimizer",
        replace=_replace_build,
        reason="the gradient norm of its optimizers counts one rank's shards of experts",
        sha256="df0f3d86babb9ebf",
    ),
    PatchRecord(
        target="megatron.core.optimizer.emerging_optimizers:_create_emerging_optimizer",
        replace=_replace_create,
        reason="its Muon orthogonalizes padded matrices, on every rank of a shard group",
        sha256="82e61f08c18bf3c5",
    ),
)
