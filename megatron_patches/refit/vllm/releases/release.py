"""What refit uses of vLLM below its documented interface, as far as the supported releases agree.

Most of it is vLLM's layerwise reloading (``vllm/model_executor/model_loader/reload/``), which remembers for each layer
the tensors that weight loaders know: shapes, dtypes and attributes, without memory. Refit drives it layer by layer
instead of loader call by loader call.

[Note: quantized on load] With ``--quantization fp8_per_tensor`` and the like, vLLM loads weights as they are trained,
and then quantizes each layer, with a scale for a tensor, or for its channels or blocks. Its weight loaders know the
weights as they are trained, so that is what a trainer sends, and the commit quantizes them as vLLM does after loading.
The loaders of a checkpoint in FP8 with a scale for each tensor know E4M3 numbers and their scales instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.v1.attention.backend import AttentionImplBase

from megatron_patches.refit.layout.weight_format import BLOCK

Tensors = dict[str, torch.Tensor]

PROCESSED = "_already_called_process_weights_after_loading"
"""Attribute that some of vLLM's methods set on a layer so that they process it only once."""

CACHE_SCALES = frozenset({"_q_scale", "_k_scale", "_v_scale", "_prob_scale"})
"""Buffers of attention layers that vLLM computes with, whatever it loads the scales of a KV cache into."""

_RELOADING = "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo"
_NAMES = (
    *(f"{_RELOADING}.{name}" for name in ("restore_metadata", "restore_device", "kernel_tensors", "reset")),
    f"{_RELOADING}.kernel_non_persistent_buffers",
    "vllm._custom_ops:_supports_onednn",
    "vllm.config:CacheConfig.cache_dtype",
    "vllm.config:OffloadConfig.uva",
    "vllm.config:OffloadConfig.prefetch",
    "vllm.config:ParallelConfig._api_process_count",
    "vllm.config:ParallelConfig.data_parallel_index",
    "vllm.config:ParallelConfig.enable_eplb",
    "vllm.config:ParallelConfig.world_size_across_dp",
    "vllm.config:VllmConfig.lora_config",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",
    "vllm.config:VllmConfig.quant_config",
    "vllm.device_allocator:AllocationData.is_asleep",
    "vllm.device_allocator:AllocationData.tag",
    "vllm.device_allocator.cumem:CuMemAllocator.instance",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
    "vllm.distributed.parallel_state:get_world_group",
    "vllm.lora.lora_weights:LoRALayerWeights.optimize",
    "vllm.lora.utils:parse_fine_tuned_lora_name",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update",
)


def tensors_of(layer: nn.Module) -> Tensors:
    """A layer's own parameters and buffers, by attribute."""
    own = (*layer._parameters.items(), *layer._buffers.items())
    return {name: tensor for name, tensor in own if tensor is not None}


class Release:
    """One release of vLLM. Subclasses hold what differs between releases.

    Attributes:
        names: further names of vLLM that this release's adapter uses, as ``module:qualified.name``.
        renames: method of a model's mapper that leaves out renames which stack projections: adapters name these one by
            one.
    """

    names: tuple[str, ...] = ()
    renames: str

    def quantizes_to_fp8(self, config: VllmConfig) -> bool:
        """Whether weights are quantized on load, by each worker for itself alone; see [Note: quantized on load].

        Workers that agree on scales while they quantize would wait for one that has failed.
        """
        raise NotImplementedError

    def missing_names(self) -> list[str]:
        """The names that refit uses and this vLLM lacks."""
        return [name for name in (*_NAMES, *self.names) if not _exists(name)]

    def is_deferred(self, layer: nn.Module) -> bool:
        """Whether vLLM processes a layer after all others, because it derives something from their weights."""
        raise NotImplementedError

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Why new weights would not reach everything that serves under a configuration, each with the way out."""
        quantization = config.quant_config
        if quantization is not None and not _is_block_fp8(quantization) and not self.quantizes_to_fp8(config):
            yield (
                f"trainers do not send them as they are quantized here ({quantization.get_name()}); start it from a "
                "configuration without quantization_config (docs/engines.md says with which --quantization), or "
                "from what `refit export --weight-format fp8_block` writes"
            )
        if config.parallel_config.enable_eplb:
            yield "it moves experts between ranks, where their loader does not look for them (--enable-eplb)"
        offload = config.offload_config
        if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
            yield "it keeps some of them on the host (--cpu-offload-gb, --offload-group-size)"

    def adapter_names(self, model: nn.Module) -> Any:
        """The mapper, of vLLM, from names of an adapter's modules to the engine's; None if the names are equal."""
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        return None if mapper is None else getattr(mapper, self.renames)()

    def derives(self, layer: nn.Module) -> bool:
        """Whether a deferred layer derives something. By default attention only sets scales of the cache to one."""
        if not self.is_deferred(layer):
            return False
        attention = cast(Any, layer)
        own = type(attention).process_weights_after_loading is not Attention.process_weights_after_loading
        return own or (
            type(attention.impl).process_weights_after_loading is not AttentionImplBase.process_weights_after_loading
        )

    def derives_by_itself(self, layer: nn.Module) -> bool:
        """Whether a layer or model has processing of its own that nothing calls when weights are replaced.

        Quantization methods with kernels are modules too, but they process the layer that they belong to.
        """
        if self.is_deferred(layer) or isinstance(layer, QuantizeMethodBase):
            return False
        return callable(getattr(layer, "process_weights_after_loading", None))

    def is_cache_scale(self, layer: nn.Module) -> bool:
        """Whether a layer's own parameters are scales of its KV cache, which vLLM drops once they are loaded."""
        return isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod)

    def scales_of_kernel(self, method: Any) -> Tensors:
        """Scales of quantized experts to which the kernel of a method refers, by attribute of its configuration."""
        config = getattr(method, "moe_quant_config", None)
        scales = {name: getattr(config, name, None) for name in ("w1_scale", "w2_scale")}
        return {name: scale for name, scale in scales.items() if isinstance(scale, torch.Tensor)}

    def kernel_of(self, method: Any) -> dict[str, object]:
        """Attributes of a method by which its kernel refers to scales of quantized experts; empty if it has none."""
        if not self.scales_of_kernel(method):
            return {}
        return {name: getattr(method, name) for name in ("moe_quant_config", "moe_kernel")}

    def known_to_loaders(self, layer: nn.Module) -> tuple[Tensors, Tensors]:
        """A layer's parameters and buffers as weight loaders know them, on the meta device."""
        parameters, buffers = get_layerwise_info(layer).restore_metadata
        return parameters, buffers

    def keeps(self, layer: nn.Module, name: str) -> bool:
        """Whether vLLM never moves a tensor to the meta device; processing does not change such tensors."""
        return type(layer).__name__ in SKIP_MODULES or name in SKIP_TENSORS

    @contextmanager
    def loader_form(self, model: nn.Module) -> Iterator[None]:
        """Puts a model into the form that its weight loaders know, on the meta device, and restores it at the end."""
        try:
            initialize_layerwise_reload(model)
            for layer in model.modules():
                for tensor in tensors_of(layer).values():
                    if hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = _get_original_loader(tensor)
            yield
        finally:
            for layer in model.modules():
                self.put_back(layer)
            if hasattr(model, "_original_do_torchao_reload"):
                cast(Any, model)._do_torchao_reload = model._original_do_torchao_reload

    def take_to_loader_form(self, layer: nn.Module) -> None:
        """Replaces a layer's tensors with meta tensors, and remembers the serving ones."""
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)

    def put_back(self, layer: nn.Module) -> None:
        """Restores a layer's serving tensors if they were replaced."""
        info: LayerReloadingInfo = get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()

    def non_persistent(self, layer: nn.Module) -> set[str]:
        """Buffers that checkpoints leave out, of a layer that is in loader form."""
        found: set[str] = get_layerwise_info(layer).kernel_non_persistent_buffers
        return found

    def method(self, layer: nn.Module) -> Any:
        """The method that processes a layer's loaded weights; None if there is none."""
        found = getattr(layer, "quant_method", None)
        return found if isinstance(found, QuantizeMethodBase) else None

    def leaves_alone(self, method: Any) -> bool:
        """Whether a method does no processing."""
        own = type(method).process_weights_after_loading
        return own is QuantizeMethodBase.process_weights_after_loading

    def make_ready(self, layer: nn.Module) -> None:
        """Prepares a layer whose weights were replaced for processing."""
        for tensor in tensors_of(layer).values():
            cast(Any, tensor).weight_loader = _get_original_loader(tensor)
        if hasattr(layer, PROCESSED):
            delattr(layer, PROCESSED)

    def device(self, layer: nn.Module) -> torch.device:
        """The device of a layer when its weights were loaded; as a context manager, the device of new tensors."""
        return cast(torch.device, get_layerwise_info(layer).restore_device)

    def process(self, layer: nn.Module, method: Any) -> None:
        """Processes a layer's weights as vLLM does after loading. Called on the layer's device."""
        method.process_weights_after_loading(layer)

    def after_processing(self, layer: nn.Module) -> None:
        """What vLLM does to a layer after processing."""
        if hasattr(layer, "update_param_tp_status"):
            cast(Any, layer).update_param_tp_status()


def _is_block_fp8(quantization: Any) -> bool:
    """Whether linear layers are loaded in block FP8; see [Note: block FP8] in ``refit/layout/weight_format.py``."""
    return (
        type(quantization) is Fp8Config
        and quantization.is_checkpoint_fp8_serialized
        and quantization.weight_block_size == [BLOCK, BLOCK]
        and quantization.store_dtype is None
        and getattr(quantization, "online_quantization_config", None) is None  # since 0.32, quantizes it anew
    )


def _exists(name: str) -> bool:
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", ()):
            return False
        found = getattr(found, part, None)
    return True
