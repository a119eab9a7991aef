"""Dense Qwen3-like models: Llama's layout without biases, with an RMSNorm on each query and key head (QK norm)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron_patches.refit.source import rules
from megatron_patches.refit.source.llama import LlamaFamily, Rule, common_config


class Qwen3Family(LlamaFamily):
    """``Qwen3ForCausalLM``, trained with ``--qk-layernorm``. A head's size need not be hidden size over heads."""

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""
        return "Qwen3ForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "attention_bias": self.traits.qkv_bias,
            "use_sliding_window": False,
            **common_config(self.traits),
        }

    def _attention_shapes(self) -> Mapping[str, tuple[int, ...]]:
        head = (self.traits.head_dim,)
        return {**super()._attention_shapes(), "self_attn.q_norm.weight": head, "self_attn.k_norm.weight": head}

    def _layer_rules(self, prefix: str) -> Mapping[str, Rule]:
        norms = {
            f"self_attention.{kind}_layernorm.weight": partial(
                rules.replicated, tensor=f"{prefix}self_attn.{kind}_norm.weight"
            )
            for kind in "qk"
        }
        return {**super()._layer_rules(prefix), **norms}
