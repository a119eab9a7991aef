"""vLLM 0.26.0, for torch 2.11. Its CPU build is tested with a trainer in the same environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from megatron_patches.refit.vllm.releases.release import Release

_FP8 = (kFp8StaticTensorSym, kFp8StaticChannelSym, kFp8Static128BlockSym)


class Vllm026(Release):
    """vLLM 0.26.0."""

    names = (
        "vllm.config:CacheConfig.calculate_kv_scales",
        "vllm.model_executor.models.utils:WeightsMapper.get_unstacked_mapper",
    )
    renames = "get_unstacked_mapper"

    def is_deferred(self, layer: nn.Module) -> bool:
        """Attention layers, which vLLM processes after all others."""
        return isinstance(layer, Attention | MLAAttention | MMEncoderAttention)

    def quantizes_to_fp8(self, config: VllmConfig) -> bool:
        """With ``--quantization`` ``fp8``, ``fp8_per_tensor``, ``fp8_per_channel`` or ``fp8_per_block``."""
        quantization: Any = config.quant_config
        if type(quantization) is Fp8Config:
            return not quantization.is_checkpoint_fp8_serialized
        if type(quantization) is not OnlineQuantizationConfig:
            return False
        specs = (quantization.args.linear, quantization.args.moe)
        return all(spec is None or spec.weight is None or spec.weight in _FP8 for spec in specs)

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Also refuses cache scales that this release can take from the first request."""
        yield from super().refusals(config)
        if config.cache_config.calculate_kv_scales:
            yield "scales of its KV cache are of the weights of its first request (--calculate-kv-scales)"


ADAPTER = Vllm026()
