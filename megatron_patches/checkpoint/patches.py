"""Lists the Megatron functions that checkpoints of sharded weights replace or rely on."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from megatron_patches.registry import PatchRecord, SourceRecord, Table, relied_upon

_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

_RELIED_UPON: Table = {
    "megatron.core.dist_checkpointing.mapping": {
        "ShardedTensor": ("b8bd38e4c0f8d601", "takes shards of irregular size"),
        "ShardedTensorFactory": ("bc5a56be9cbe5428", "the base of a shard's entry"),
    },
    "megatron.core.dist_checkpointing.state_dict_utils": {"": ("107d7630926ca774", "builds and merges entries")},
    "megatron.core.dist_checkpointing.strategies.checkpointable": {
        "": ("39ac6c8e59a05d6f", "writes and reads shards of irregular size")
    },
    "megatron.core.dist_checkpointing.strategies.torch": {
        "mcore_to_pyt_state_dict": ("782c48d8686fc86a", "sends shards of irregular size there")
    },
    "megatron.core.dist_checkpointing.optimizer": {
        "make_sharded_optimizer_tensor": ("2c5136cde327edce", "makes a state's entry from its weight's")
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "DistributedOptimizer.load_parameter_state_from_fully_reshardable": (
            "478e9161b4aad1c7",
            "takes a state at its weight's padded shape",
        ),
    },
}


# Functions of megatron_patches.checkpoint that wrap the target, the first one innermost; the target, what goes wrong
# without them, and the hash of its source.
_REPLACED: tuple[tuple[str, str, str, str], ...] = (
    (
        "model_state.wrap_make_tp_sharded_tensor",
        "megatron.core.utils:make_tp_sharded_tensor_for_checkpoint",
        "stores a sharded weight at its padded shape, which other numbers of shards cannot load",
        "47d294ffccedd1cc",
    ),
    (
        "model_state.wrap_apply_swiglu_factory",
        "megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
        "halves a shard's rows into gate and up, though a shard may be all gate or all up",
        "8e65d5870da9d7a1",
    ),
    (
        "projection_state.wrap_mixer_state",
        "megatron.core.ssm.mamba_mixer:MambaMixer.sharded_state_dict",
        "gathers the shards of the input projection, and stores them with their padding",
        "d61464b38e785466",
    ),
    (
        "projection_state.wrap_delta_rule_state",
        "megatron.core.ssm.gated_delta_net.common:_GDNBase.sharded_state_dict",
        "fails where a rank has a shard of the input projection",
        "741903d81bf93924",
    ),
    (
        "optimizer_state.wrap_distributed_optimizer_state",
        f"{_OPTIMIZER}.sharded_state_dict",
        "stores the padding of shards in every layout but fully_reshardable",
        "365ba0883f3cc6d6",
    ),
    (
        "optimizer_state.wrap_fully_reshardable_state",
        f"{_OPTIMIZER}.sharded_param_state_fully_reshardable",
        "saves parts of other parameters' states where buckets of gradients end with padding (upstream #5077)",
        "4b6b52d956abbad8",
    ),
    (
        "optimizer_state.wrap_set_optimizer_states",
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        "with torch's Adam, fails on fully_reshardable checkpoints, and counts steps from 0 after dp_reshardable ones",
        "553e36e13659587c",
    ),
    (
        "optimizer_state.wrap_load_optimizer_state",
        f"{_OPTIMIZER}.load_state_dict",
        "makes torch's Adam count one step per parameter after a load",
        "bb573274c03ecd80",
    ),
    (
        "optimizer_state.wrap_state_of_sgd",
        "megatron.core.optimizer.optimizer:FP32Optimizer.sharded_state_dict",
        "fails with a TypeError before a load where the optimizer is SGD",
        "3609742f80716fdf",
    ),
    (
        "optimizer_state.wrap_state_of_sgd",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
        "fails with a TypeError before a load where the optimizer is SGD",
        "c62f9f64eb08c138",
    ),
    (
        "optimizer_groups.wrap_load_of_optimizers verify.wrap_load",
        "megatron.core.dist_checkpointing.serialization:load",
        "stops half-way, with some weights loaded, at a file that is missing or short, or at experts' optimizer state",
        "3ccee57a8ab08fb7",
    ),
    (
        "sharded_rows.wrap_apply_factory_merges",
        "megatron.core.dist_checkpointing.mapping:apply_factory_merges",
        "fails where a lenient --dist-ckpt-strictness lets the checkpoint lack a weight that is sharded now",
        "dc62e57dedbd76f8",
    ),
    (
        "verify.wrap_load_common_state_dict",
        "megatron.core.dist_checkpointing.serialization:load_common_state_dict",
        "fails with an error that does not name the file",
        "4413cd84da83e3cc",
    ),
    (
        "written.wrap_finalize_callbacks",
        f"{_STRATEGY}:TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
        "fails with an error that does not name the folder, and the rank that could not write on one only",
        "ffdb441f1c4399f5",
    ),
    (
        "written.wrap_save_config",
        "megatron.core.dist_checkpointing.core:save_config",
        "fails on one rank while the others wait for it; the file is there already, or all have failed",
        "2397936cef35752b",
    ),
    (
        "written.wrap_getattr_of_client",
        "megatron.core.msc_utils:MaybeMultiStorageClient.__getattr__",
        "empties a file before it is known whether its new text finds room",
        "dcd5b3f44a6d5e48",
    ),
    (
        "written.wrap_save_checkpoint",
        "megatron.training.checkpointing:save_checkpoint",
        "fails on one rank, which notes the newest checkpoint, while the others wait for it",
        "31bfe5183153ad30",
    ),
    (
        "written.wrap_schedule_async_save",
        "megatron.training.async_utils:schedule_async_save",
        "fails on one rank, which notes the newest checkpoint, while the others wait for it",
        "d2c48e703f5df061",
    ),
    (
        "verify.wrap_get_checkpoint_format",
        "megatron.training.checkpointing:_get_checkpoint_format",
        "takes a torch_dist checkpoint without metadata.json for another format",
        "cc5a38c037f34c4c",
    ),
)


def _deferred(names: str, original: Any) -> Any:
    """``original``, wrapped by one function after the other; their modules, imported here, import Megatron."""
    for name in names.split():
        module, _, function = name.partition(".")
        original = getattr(importlib.import_module(f"megatron_patches.checkpoint.{module}"), function)(original)
    return original


def records() -> tuple[PatchRecord, ...]:
    """The replacements that checkpoints need. Importing this module and calling this does not import Megatron."""
    return tuple(
        PatchRecord(target=target, replace=functools.partial(_deferred, names), reason=reason, sha256=sha256)
        for names, target, reason, sha256 in _REPLACED
    )


def sources() -> tuple[SourceRecord, ...]:
    """The sources that checkpoints rely on without replacing them."""
    return relied_upon(_RELIED_UPON)
