"""vLLM 0.32.0, for torch 2.13; its build for CPUs is tested with a trainer in another environment.

Against 0.26.0, in what refit touches:

- Whatever kind of attention has something to process is put off until all others are processed, and says so itself.
- ``bias`` is among the tensors that never leave their memory while a layer is in its loaders' form.
- A model may have something to process of its own, after all layers; nothing calls that when weights are replaced.
- Word embeddings that a checkpoint unties are tied again after loading where both turn out equal.
- The kernel of unquantized experts may process weights of its own accord, as on CPUs, where it packs them. vLLM lets it
  do so when a model is loaded, but not when weights are replaced: then experts would compute with weights that are not
  packed.
- Weights can be mapped from a daemon's memory, which other engines map as well.
- Scales of the KV cache are not taken from requests any more (``--calculate-kv-scales`` is gone).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from megatron_patches.refit.vllm.releases.release import Release

_EXPERTS = "vllm.model_executor.layers.fused_moe"
_IN_PARAMETERS = frozenset(
    {
        f"{_EXPERTS}.modular_kernel.FusedMoEExperts.process_weights_after_loading",  # nothing
        f"{_EXPERTS}.experts.flashinfer_cutlass_moe.FlashInferExperts.process_weights_after_loading",  # scales alone
        f"{_EXPERTS}.experts.cpu_moe.CPUUnquantizedExperts.process_weights_after_loading",
    }
)
"""Kernels whose processing puts what it makes into the layer's parameters, and keeps nothing elsewhere."""


class Vllm032(Release):
    """vLLM 0.32.0."""

    names = (
        "vllm.config:LoadConfig.load_format",
        "vllm.config:ModelConfig.word_embeddings_untied_by_checkpoint",
        "vllm.config:ParallelConfig.dcp_q_replicate",
    )

    def is_deferred(self, layer: nn.Module) -> bool:
        """Those whose processing vLLM puts off until all others are processed."""
        return bool(is_deferred_attention_layer(layer))

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Also what is new in this release and keeps weights elsewhere, or derives from other workers' weights."""
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
        """Also kernels of experts that keep something of the weights elsewhere than in the layer."""
        experts = _experts_of(layer)
        if experts is None:
            return super().derives_by_itself(layer)
        own = type(experts).process_weights_after_loading
        return f"{own.__module__}.{own.__qualname__}" not in _IN_PARAMETERS

    def process(self, layer: nn.Module, method: Any) -> None:
        """Also lets the kernel of experts process weights, which vLLM leaves out once there is one."""
        experts = _experts_of(method)
        super().process(layer, method)
        if experts is not None:
            experts.process_weights_after_loading(layer)


def _experts_of(method: object) -> Any:
    """The kernel that unquantized experts already compute with; None for other methods."""
    kernel = method.moe_kernel if isinstance(method, UnquantizedFusedMoEMethod) else None
    return kernel.fused_experts if kernel is not None else None


ADAPTER = Vllm032()
