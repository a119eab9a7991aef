"""Describes what this rank's live Megatron model holds.

A weight that extended tensor parallelism shards needs only ``layout`` (its ``ShardLayout``) and ``group`` (its process
group); any class that has both will do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from etp.layout import ShardLayout
from megatron_patches.refit.errors import RefitError, UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.models.shard import ParamShard
from megatron_patches.refit.source.live_memory import LiveTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..+)")
# One module per expert (SequentialMLP), or one weight per expert in a grouped module (TEGroupedMLP).
_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..+)|(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


@runtime_checkable
class RowShardedWeight(Protocol):
    """A weight that holds one shard of its rows."""

    layout: ShardLayout
    group: ProcessGroup


def unwrapped_chunk(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside wrappers such as DDP and Float16Module, which all keep it as ``module``."""
    import torch

    while not hasattr(chunk, "decoder") and isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def describe_model(
    chunks: Sequence[torch.nn.Module], tp_group: ProcessGroup | None = None
) -> Iterator[LiveTensor[ParamShard]]:
    """Describes every parameter of this rank's model chunks, and every buffer that a checkpoint keeps.

    Experts are named by their number in the whole model, and cut by expert tensor parallelism.

    Args:
        chunks: the model, one module per virtual pipeline stage, wrapped or not.
        tp_group: tensor-parallel group of everything but experts; None for the group that the model was built with.

    Raises:
        RefitError: if a parameter's memory is not contiguous, or its shape differs from its layout's.
        UnmappedParameterError: if a parameter is a scalar.
        UnsupportedModelError: if a parameter holds quantized values, or is a DTensor.
    """
    for number, chunk in enumerate(chunks):
        model = unwrapped_chunk(chunk)
        groups = getattr(model, "pg_collection", None)
        dense_group = tp_group if tp_group is not None else getattr(groups, "tp", None)
        for local_name, param in _kept_tensors(model):
            name = _global_name(model, local_name)
            group = dense_group
            if (match := _EXPERT.fullmatch(name)) is not None:
                name, group = _global_expert(model, match), getattr(groups, "expt_tp", None)
            yield _describe(name, f"chunk{number}.{local_name}", param, group)


def _kept_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, without an output layer that is not used."""
    for restore in float32_keepers(model):
        restore()
    unused = _unused_output_weight(model)
    yield from ((name, param) for name, param in model.named_parameters() if param is not unused)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _unused_output_weight(model: torch.nn.Module) -> torch.Tensor | None:
    """The weight of an output layer that Megatron makes, but calls with the embedding, which it is tied to, instead.

    Megatron does so on a last stage that has the embedding, too, for multi-token prediction. Nothing trains it.
    """
    if not getattr(model, "share_embeddings_and_output_weights", False) or not hasattr(model, "embedding"):
        return None
    return getattr(getattr(model, "output_layer", None), "weight", None)


def float32_keepers(model: torch.nn.Module) -> list[Callable[[], None]]:
    """Functions that restore the biases of routers, which are buffers, to float32.

    Converting a model to bfloat16 converts them too. The router restores them before its next forward pass or
    checkpoint.
    """
    asked = (getattr(module, "_maintain_float32_expert_bias", None) for module in model.modules())
    return [restore for restore in asked if restore is not None]


def _describe(name: str, storage: str, param: torch.Tensor, tp_group: ProcessGroup | None) -> LiveTensor[ParamShard]:
    import torch
    from torch.distributed.tensor import DTensor

    if type(param).dequantize is not torch.Tensor.dequantize:
        raise UnsupportedModelError(
            f"{name} is kept quantized ({type(param).__name__}); export from a run without --fp8-param-gather and "
            "--fp4-param-gather"
        )
    if isinstance(param, DTensor) or isinstance(param.data, DTensor):
        raise UnsupportedModelError(
            f"{name} is a DTensor, of which this rank holds a part that Megatron does not know of; train without "
            "--use-torch-fsdp2 and --use-megatron-fsdp"
        )
    held_shape = tuple(param.shape)
    if not held_shape:
        raise UnmappedParameterError(
            f"no tensor corresponds to {name}, which is a single number; where it is a buffer, register it with "
            "persistent=False, as no checkpoint that is written here has it"
        )
    if isinstance(param, RowShardedWeight):
        rank = param.group.rank()
        shape, rows = tuple(param.layout.shape), param.layout.logical_range(rank)
        if held_shape != tuple(param.layout.shard_shape):
            raise RefitError(f"{name} has shape {held_shape}; its layout's shards have {param.layout.shard_shape}")
    else:
        shape, rows = held_shape, (0, held_shape[0])
    if not param.is_contiguous():
        raise RefitError(f"{name} is not contiguous in memory (strides {param.stride()})")
    cut = bool(getattr(param, "tensor_model_parallel", False))
    shard = ParamShard(
        name=name,
        storage=storage,
        shape=shape,
        rows=rows,
        held_shape=held_shape,
        dtype=str(param.dtype).removeprefix("torch."),
        tp_rank=tp_group.rank() if tp_group is not None else 0,
        tp_size=tp_group.size() if tp_group is not None else 1,
        partition_dim=int(getattr(param, "partition_dim", -1)) if cut else None,
    )
    return LiveTensor(shard, param, param.dtype)


def _global_name(model: torch.nn.Module, name: str) -> str:
    """The parameter's name with its layer's global number. Megatron's layers carry that number, counted from 1.

    It accounts for pipeline, virtual pipeline and uneven splits, so no offset is computed here.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    prefix, local, rest = match.groups()
    number = getattr(model.get_submodule(f"{prefix}{local}"), "layer_number", None)
    if number is None:
        raise RefitError(f"layer {local} of {name} has no layer_number, so its place in the whole model is unknown")
    return f"{prefix}{int(number) - 1}{rest}"


def _global_expert(model: torch.nn.Module, match: re.Match[str]) -> str:
    """The parameter's name with its expert's global number: ranks hold equal, consecutive blocks of experts."""
    config: Any = model.config
    group = getattr(getattr(model, "pg_collection", None), "ep", None)
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    offset = rank * (int(config.num_moe_experts) // size)
    sequential, local, rest, grouped, index = match.groups()
    if sequential is not None:
        return f"{sequential}{offset + int(local)}{rest}"
    return f"{grouped}{offset + int(index)}"
