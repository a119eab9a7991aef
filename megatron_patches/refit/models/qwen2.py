"""Dense Qwen2-like models: Llama's layout with biases on query, key and value only (``--add-qkv-bias``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.models.family import Declaration
from megatron_patches.refit.models.gpt import gpt_refusals, gpt_traits, may_be_gpt
from megatron_patches.refit.models.llama import LlamaFamily, common_config, gpt_traits_from_config

if TYPE_CHECKING:
    import torch

# transformers' defaults for fields that are left out, where they do not follow from other fields.
_LEFT_OUT: Mapping[str, object] = MappingProxyType({"num_key_value_heads": 32})


class Qwen2Family(LlamaFamily):
    """``Qwen2ForCausalLM``."""

    architecture = "Qwen2ForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen2",
            "use_sliding_window": False,
            **common_config(self.traits),
        }


def _claims(model: torch.nn.Module) -> bool:
    config: Any = model.config
    others = config.num_moe_experts or config.qk_layernorm
    return may_be_gpt(model) and not others and bool(config.add_qkv_bias) and not config.add_bias_linear


FAMILY = Declaration(
    architecture="Qwen2ForCausalLM",
    claims=_claims,
    refusals=gpt_refusals,
    read=lambda model, vocab_size: Qwen2Family(gpt_traits(model, vocab_size)),
    from_config=lambda config: Qwen2Family(replace(gpt_traits_from_config({**_LEFT_OUT, **config}), qkv_bias=True)),
)
