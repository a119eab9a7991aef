"""Where a worker's attention layers keep the scales of their KV caches that a trainer gives; see [Note: KV scales].

Attention reads a scale from a buffer of its layer, from a number beside it, or from both. The buffer is replaced like a
weight, in its memory, to which captured graphs refer; :func:`follow_scales` makes the numbers follow. Only backends
with which this is enough are taken. FlashInfer computes with the numbers: they are arguments of captured kernels, or
factors of products that its first forward pass stores. Multi-latent attention may read the buffers alone, but sets them
to one whenever it derives projections from new weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform

from megatron_patches.refit.control.kv_scales import is_kv_scale, split_scale_name
from megatron_patches.refit.errors import ModelMismatchError, UnsupportedEngineError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.vllm.layers import join

_IN_FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
# FlashAttention and Triton read the buffers at every call; on CPUs attention reads the numbers, outside of any graph.
_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"})
_INSTEAD = "publish without kv_scales"


def with_kv_scales(manifest: Manifest, model: nn.Module, config: VllmConfig, tensors: Sequence[TensorSpec]) -> Manifest:
    """What a worker wants, scales included.

    Args:
        manifest: what it wants of the weights.
        model: the serving model.
        config: vLLM's configuration.
        tensors: the trainer's tensors.

    Raises:
        UnsupportedEngineError: if the engine's KV cache has no scales that can be replaced.
        ModelMismatchError: if a layer of the engine gets none, or the engine has no such layer.
    """
    names = [spec.name for spec in tensors if is_kv_scale(spec.name)]
    if not names:
        return manifest
    places = _places(model, config, names)
    return manifest.with_more(
        (Storage(place, "float32", 1, 1) for place in places.values()),
        (Placement(Box(name, (0,), (1,)), View(place, 0, (1,), (1,))) for name, place in places.items()),
    )


def follow_scales(model: nn.Module) -> None:
    """Makes the numbers that some backends read instead of the buffers follow them, where scales may be replaced."""
    layers: list[Any] = [layer for layer in model.modules() if _has_scales(layer)]
    layers = [layer for layer in layers if layer.attn_backend.get_name() in _BACKENDS]
    buffers = [(layer, kind, getattr(layer, kind)) for layer in layers for kind in ("_q_scale", "_k_scale", "_v_scale")]
    if not buffers:
        return
    values = torch.stack([buffer.detach() for _, _, buffer in buffers]).tolist()
    for (layer, kind, _), value in zip(buffers, values, strict=True):
        setattr(layer, f"{kind}_float", value)
        on_host = getattr(layer, f"{kind}_cpu", None)
        if on_host is not None:
            on_host.fill_(value)


def _places(model: nn.Module, config: VllmConfig, names: Sequence[str]) -> dict[str, str]:
    """The buffer of each scale of this worker's layers with caches in FP8, by name of the tensor."""
    attention = {path: layer for path, layer in model.named_modules() if isinstance(layer, Attention | MLAAttention)}
    _check_engine(attention, config)
    given: dict[str, dict[str, str]] = {}
    for name in names:
        layer_name, kind = split_scale_name(name)
        given.setdefault(layer_name, {})[kind] = name
    missing = (path.split(".") for path, layer in model.named_modules() if isinstance(layer, PPMissingLayer))
    elsewhere = {part for parts in missing for part in parts if part.isdecimal()}
    unknown = {name for name in given if not elsewhere.intersection(name.split("."))}
    found: dict[str, str] = {}
    for path, layer in attention.items():
        mine = [name for name in given if name in _names_of(layer)]
        unknown.difference_update(mine)
        if layer.kv_cache_dtype not in _IN_FP8:  # vLLM does not read them then, as with those of a checkpoint
            continue
        if len(mine) != 1:
            told = f"gives scales as {' and '.join(mine)}" if mine else "gives no scales"
            raise ModelMismatchError(
                f"kv_scales: the trainer {told} for {path}, whose KV cache is in {layer.kv_cache_dtype}; give those of "
                "every attention layer once"
            )
        _check_layer(path, layer)
        found |= {name: join(path, f"_{kind}") for kind, name in given[mine[0]].items()}
    if unknown:
        there = f"it has {next(iter(attention))} to {next(reversed(attention))}" if attention else "it has none"
        raise ModelMismatchError(f"kv_scales: the engine has no attention layer {min(unknown)}; {there}")
    return found


def _names_of(layer: Any) -> set[str]:
    """The names by which a trainer may call a layer."""
    name: str = layer.layer_name
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return {name, name.removesuffix(".attn"), *(numbers if len(numbers) == 1 else ())}


def _has_scales(layer: nn.Module) -> bool:
    """Whether a layer has a scale for all heads together."""
    if not isinstance(layer, Attention) or layer.kv_cache_dtype not in _IN_FP8:
        return False
    return all(getattr(layer, kind).dim() == 0 for kind in ("_q_scale", "_k_scale", "_v_scale"))


def _check_engine(attention: dict[str, Any], config: VllmConfig) -> None:
    if all(layer.kv_cache_dtype not in _IN_FP8 for layer in attention.values()) and attention:
        raise UnsupportedEngineError(
            f"kv_scales: this engine's KV cache is not in FP8 (--kv-cache-dtype {config.cache_config.cache_dtype}); "
            f"start it with --kv-cache-dtype fp8, or {_INSTEAD}"
        )
    if current_platform.is_fp8_fnuz():
        raise UnsupportedEngineError(f"kv_scales: this GPU's FP8 has another range (FNUZ); {_INSTEAD}")
    if CuMemAllocator.instance is not None:
        raise UnsupportedEngineError(
            "kv_scales: an engine with vLLM's sleep mode sets them to one when its KV cache wakes up; start it without "
            f"--enable-sleep-mode, or {_INSTEAD}"
        )


def _check_layer(path: str, layer: Any) -> None:
    backend = layer.attn_backend.get_name()
    if backend not in _BACKENDS:
        other = "start the engine with --attention-backend FLASH_ATTN or TRITON_ATTN, or "
        raise UnsupportedEngineError(
            f"kv_scales: {path} computes with {backend}, which would keep old scales or lose new ones; "
            f"{other if isinstance(layer, Attention) else ''}{_INSTEAD}"
        )
    if not _has_scales(layer):
        raise UnsupportedEngineError(f"kv_scales: {path} has scales for each head; {_INSTEAD}")
