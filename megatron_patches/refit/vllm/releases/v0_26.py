"""vLLM 0.26.0, for torch 2.11. Its CPU build is tested with a trainer in the same environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention

from megatron_patches.refit.vllm.releases.release import Release


class Vllm026(Release):
    """vLLM 0.26.0."""

    names = (
        "vllm.config:CacheConfig.calculate_kv_scales",
        "vllm.model_executor.models.utils:WeightsMapper.get_unstacked_mapper",
    )

    def is_deferred(self, layer: nn.Module) -> bool:
        """Attention layers, which vLLM processes after all others."""
        return isinstance(layer, Attention | MLAAttention | MMEncoderAttention)

    def adapter_names(self, model: nn.Module) -> Any:
        """Without stacking: adapters name the projections that the engine's layers stack."""
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_unstacked_mapper()

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Also refuses cache scales that this release can take from the first request."""
        yield from super().refusals(config)
        if config.cache_config.calculate_kv_scales:
            yield "scales of its KV cache are of the weights of its first request (--calculate-kv-scales)"


ADAPTER = Vllm026()
