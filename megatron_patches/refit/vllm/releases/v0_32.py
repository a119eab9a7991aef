"""vLLM 0.32.0, for torch 2.13. Its CPU build is tested with a trainer in another environment.

Differences from 0.26.0 that affect refit:

- All kinds of attention that need processing are processed after all other layers, and declare it themselves.
- ``bias`` is among the tensors that keep their memory while a layer is in loader form.
- A model may have processing of its own, after all layers; nothing calls it when weights are replaced.
- Word embeddings that a checkpoint unties are tied again after loading if both turn out equal.
- The kernel of unquantized experts may process weights itself; on CPUs it packs them. vLLM calls this when a model is
  loaded, but not when weights are replaced: experts would then compute with unpacked weights.
- Weights can be mapped from a daemon's memory, which other engines map as well.
- KV cache scales are no longer taken from requests (``--calculate-kv-scales`` is gone).
- Workers that quantize what they load agree on the scales of tensors and channels of which each has a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from megatron_patches.refit.vllm.releases.release import Release

_EXPERTS = "vllm.model_executor.layers.fused_moe"
_IN_PARAMETERS = frozenset(
    {
        f"{_EXPERTS}.modular_kernel.FusedMoEExperts.process_weights_after_loading",  # does nothing
        f"{_EXPERTS}.experts.flashinfer_cutlass_moe.FlashInferExperts.process_weights_after_loading",  # only scales
        f"{_EXPERTS}.experts.cpu_moe.CPUUnquantizedExperts.process_weights_after_loading",
    }
)
"""Kernels whose processing stores all its results in the layer's parameters."""


class Vllm032(Release):
    """vLLM 0.32.0."""

    names: tuple[str, ...] = (
        "vllm.config:LoadConfig.load_format",
        "vllm.config:ModelConfig.word_embeddings_untied_by_checkpoint",
        "vllm.config:ParallelConfig.dcp_q_replicate",
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper",
    )
    renames = "get_rename_mapper"

    def is_deferred(self, layer: nn.Module) -> bool:
        """Attention layers that declare that vLLM must process them after all others."""
        return bool(is_deferred_attention_layer(layer))

    def quantizes_to_fp8(self, config: VllmConfig) -> bool:
        """With ``--quantization fp8_per_block``; in one worker also with ``fp8_per_tensor`` or ``fp8_per_channel``."""
        quantization: Any = config.quant_config
        if type(quantization) is not OnlineQuantizationConfig or quantization.args.targets is not None:
            return False
        parallel = config.parallel_config
        known = [kFp8Static128BlockSym]
        if parallel.tensor_parallel_size * parallel.prefill_context_parallel_size * parallel.data_parallel_size == 1:
            known += [kFp8StaticTensorSym, kFp8StaticChannelSym]
        specs = (quantization.args.linear, quantization.args.moe)
        return all(spec is None or spec.weight is None or spec.weight in known for spec in specs)

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Also refuses new options that keep weights elsewhere or derive them from other workers' weights."""
        yield from super().refusals(config)
        if config.model_config is not None and config.model_config.word_embeddings_untied_by_checkpoint:
            yield (
                "its config.json says that word embeddings are tied, and its checkpoint has an lm_head: vLLM lets both "
                "share their memory if they are equal; set tie_word_embeddings to false there, or remove the lm_head"
            )
        if config.load_config.load_format == "ipc_cache":
            yield "it shares them with other engines (--load-format ipc_cache)"
        if config.parallel_config.dcp_q_replicate:
            yield "it derives some of them from those of other workers (dcp_q_replicate)"

    def derives_by_itself(self, layer: nn.Module) -> bool:
        """Also refuses kernels of experts that store something derived from weights outside the layer."""
        experts = _experts_of(layer)
        if experts is None:
            return super().derives_by_itself(layer)
        own = type(experts).process_weights_after_loading
        return f"{own.__module__}.{own.__qualname__}" not in _IN_PARAMETERS

    def process(self, layer: nn.Module, method: Any) -> None:
        """Also runs the experts' kernel on the weights, which vLLM skips once the kernel exists."""
        experts = _experts_of(method)
        super().process(layer, method)
        if experts is not None:
            experts.process_weights_after_loading(layer)


def _experts_of(method: object) -> Any:
    """The kernel that unquantized experts already use; None for other methods."""
    kernel = method.moe_kernel if isinstance(method, UnquantizedFusedMoEMethod) else None
    return kernel.fused_experts if kernel is not None else None


ADAPTER = Vllm032()
