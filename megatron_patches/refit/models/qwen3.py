"""Dense Qwen3-like models: Llama's layout without biases, with an RMSNorm on each query and key head (QK norm)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.models.family import Declaration
from megatron_patches.refit.models.gpt import gpt_refusals, gpt_traits, may_be_gpt
from megatron_patches.refit.models.llama import LlamaFamily, common_config, gpt_traits_from_config

if TYPE_CHECKING:
    import torch

# transformers' defaults for fields that are left out, where they do not follow from other fields.
_LEFT_OUT: Mapping[str, object] = MappingProxyType({"num_key_value_heads": 32, "head_dim": 128})


class Qwen3Family(LlamaFamily):
    """``Qwen3ForCausalLM``, trained with ``--qk-layernorm``. The head size may differ from hidden size over heads."""

    architecture = "Qwen3ForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "attention_bias": self.traits.qkv_bias,
            "use_sliding_window": False,
            **common_config(self.traits),
        }


def bias_refusals(config: Any) -> Iterator[str]:
    """A clause if a model with norms on query and key has biases."""
    if config.add_bias_linear or config.add_qkv_bias:
        yield (
            "no architecture has both the norms of --qk-layernorm and biases on linear layers; train with "
            "--disable-bias-linear and without --add-qkv-bias, or without --qk-layernorm"
        )


def _claims(model: torch.nn.Module) -> bool:
    config: Any = model.config
    return may_be_gpt(model) and bool(config.qk_layernorm) and not config.num_moe_experts


def _refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    yield from bias_refusals(model.config)
    yield from gpt_refusals(model, vocab_size)


FAMILY = Declaration(
    architecture="Qwen3ForCausalLM",
    claims=_claims,
    refusals=_refusals,
    read=lambda model, vocab_size: Qwen3Family(gpt_traits(model, vocab_size)),
    from_config=lambda config: Qwen3Family(replace(gpt_traits_from_config({**_LEFT_OUT, **config}), qk_norm=True)),
)
