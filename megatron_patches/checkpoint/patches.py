"""Lists the Megatron functions that checkpoints of sharded weights replace or rely on."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord, SourceRecord, relied_upon

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

_RELIED_UPON: tuple[tuple[str, str, str], ...] = (
    ("megatron.core.dist_checkpointing.mapping:ShardedTensor", "b8bd38e4c0f8d601", "takes shards of irregular size"),
    (
        "megatron.core.dist_checkpointing.mapping:ShardedTensorFactory",
        "bc5a56be9cbe5428",
        "the base of a shard's entry",
    ),
    ("megatron.core.dist_checkpointing.state_dict_utils", "107d7630926ca774", "builds and merges entries"),
    (
        "megatron.core.dist_checkpointing.strategies.checkpointable",
        "39ac6c8e59a05d6f",
        "writes and reads shards of irregular size",
    ),
    (
        "megatron.core.dist_checkpointing.strategies.torch:mcore_to_pyt_state_dict",
        "782c48d8686fc86a",
        "sends shards of irregular size there",
    ),
    (
        "megatron.core.dist_checkpointing.optimizer:make_sharded_optimizer_tensor",
        "2c5136cde327edce",
        "makes a state's entry from its weight's",
    ),
    (
        f"{_OPTIMIZER}.sharded_param_state_fully_reshardable",
        "4b6b52d956abbad8",
        "makes a state's entry from its weight's",
    ),
    (
        f"{_OPTIMIZER}.load_parameter_state_from_fully_reshardable",
        "478e9161b4aad1c7",
        "takes a state at its weight's padded shape",
    ),
)


def _deferred(module: str, name: str) -> Callable[[Any], Any]:
    """``name`` of ``megatron_patches.checkpoint.<module>``, imported only when applied, because it imports Megatron."""

    def replace(original: Any) -> Any:
        return getattr(importlib.import_module(f"megatron_patches.checkpoint.{module}"), name)(original)

    return replace


def _in_turn(*replacements: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """All ``replacements`` composed into one, with the first one innermost."""
    return lambda original: functools.reduce(lambda wrapped, replace: replace(wrapped), replacements, original)


def records() -> tuple[PatchRecord, ...]:
    """The replacements that checkpoints need. Importing this module and calling this does not import Megatron."""
    return (*_state_records(), *_file_records())


def sources() -> tuple[SourceRecord, ...]:
    """The sources that checkpoints rely on without replacing them."""
    return relied_upon(_RELIED_UPON)


def _state_records() -> tuple[PatchRecord, ...]:
    return (
        PatchRecord(
            target="megatron.core.utils:make_tp_sharded_tensor_for_checkpoint",
            replace=_deferred("model_state", "wrap_make_tp_sharded_tensor"),
            reason="stores a sharded weight at its padded shape, which other numbers of shards cannot load",
            sha256="47d294ffccedd1cc",
        ),
        PatchRecord(
            target="megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
            replace=_deferred("model_state", "wrap_apply_swiglu_factory"),
            reason="halves a shard's rows into gate and up, though a shard may be all gate or all up",
            sha256="8e65d5870da9d7a1",
        ),
        PatchRecord(
            target="megatron.core.ssm.mamba_mixer:MambaMixer.sharded_state_dict",
            replace=_deferred("projection_state", "wrap_mixer_state"),
            reason="gathers the shards of the input projection, and stores them with their padding",
            sha256="d61464b38e785466",
        ),
        PatchRecord(
            target="megatron.core.ssm.gated_delta_net.common:_GDNBase.sharded_state_dict",
            replace=_deferred("projection_state", "wrap_delta_rule_state"),
            reason="fails where a rank has a shard of the input projection",
            sha256="741903d81bf93924",
        ),
        PatchRecord(
            target=f"{_OPTIMIZER}.sharded_state_dict",
            replace=_deferred("optimizer_state", "wrap_distributed_optimizer_state"),
            reason="stores the padding of shards in every layout but fully_reshardable",
            sha256="365ba0883f3cc6d6",
        ),
        PatchRecord(
            target=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            replace=_deferred("optimizer_state", "wrap_set_optimizer_states"),
            reason="fails with KeyError 'step' on a fully_reshardable checkpoint where the optimizer is torch's Adam",
            sha256="553e36e13659587c",
        ),
        PatchRecord(
            target=f"{_OPTIMIZER}.load_state_dict",
            replace=_deferred("optimizer_state", "wrap_load_optimizer_state"),
            reason="makes torch's Adam count one step per parameter after a load",
            sha256="bb573274c03ecd80",
        ),
        *(
            PatchRecord(
                target=f"megatron.core.optimizer.optimizer:{name}.sharded_state_dict",
                replace=_deferred("optimizer_state", "wrap_state_of_sgd"),
                reason="fails with a TypeError before a load where the optimizer is SGD",
                sha256=sha256,
            )
            for name, sha256 in (
                ("FP32Optimizer", "3609742f80716fdf"),
                ("Float16OptimizerWithFloat16Params", "c62f9f64eb08c138"),
            )
        ),
    )


def _file_records() -> tuple[PatchRecord, ...]:
    return (
        PatchRecord(
            target="megatron.core.dist_checkpointing.serialization:load",
            replace=_in_turn(
                _deferred("optimizer_groups", "wrap_load_of_optimizers"), _deferred("verify", "wrap_load")
            ),
            reason="loads into the weights file by file, and stops half-way at one that is missing or short, or where "
            "experts had an optimizer of their own and have none now",
            sha256="3ccee57a8ab08fb7",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.mapping:apply_factory_merges",
            replace=_deferred("sharded_rows", "wrap_apply_factory_merges"),
            reason="fails where a lenient --dist-ckpt-strictness lets the checkpoint lack a weight that is sharded now",
            sha256="dc62e57dedbd76f8",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.serialization:load_common_state_dict",
            replace=_deferred("verify", "wrap_load_common_state_dict"),
            reason="fails with an error that does not name the file",
            sha256="4413cd84da83e3cc",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.strategies.torch:"
            "TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
            replace=_deferred("written", "wrap_finalize_callbacks"),
            reason="fails with an error that does not name the folder, and the rank that could not write on one only",
            sha256="ffdb441f1c4399f5",
        ),
        *_records_of_files_of_one_rank(),
        PatchRecord(
            target="megatron.training.checkpointing:_get_checkpoint_format",
            replace=_deferred("verify", "wrap_get_checkpoint_format"),
            reason="takes a torch_dist checkpoint without metadata.json for another format",
            sha256="cc5a38c037f34c4c",
        ),
    )


def _records_of_files_of_one_rank() -> tuple[PatchRecord, ...]:
    return (
        PatchRecord(
            target="megatron.core.dist_checkpointing.core:save_config",
            replace=_deferred("written", "wrap_save_config"),
            reason="fails on one rank while the others wait for it; the file is there already, or all have failed",
            sha256="2397936cef35752b",
        ),
        PatchRecord(
            target="megatron.core.msc_utils:MaybeMultiStorageClient.__getattr__",
            replace=_deferred("written", "wrap_getattr_of_client"),
            reason="empties a file before it is known whether its new text finds room",
            sha256="dcd5b3f44a6d5e48",
        ),
        *(
            PatchRecord(
                target=f"megatron.training.{target}",
                replace=_deferred("written", replacement),
                reason="fails on one rank, which notes the newest checkpoint, while the others wait for it",
                sha256=sha256,
            )
            for target, replacement, sha256 in (
                ("checkpointing:save_checkpoint", "wrap_save_checkpoint", "31bfe5183153ad30"),
                ("async_utils:schedule_async_save", "wrap_schedule_async_save", "d2c48e703f5df061"),
            )
        ),
    )
