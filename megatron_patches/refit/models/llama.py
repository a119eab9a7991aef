"""Dense Llama-like models: Megatron's GPTModel with RMSNorm, rotary positions, GQA and gated SiLU.

Layers come in two flavours: the local spec has separate norms, Transformer Engine's keeps them inside the linear
layer that follows. Both map to the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_fields import flag, integer, number
from megatron_patches.refit.models.family import Declaration, ModelFamily
from megatron_patches.refit.models.gpt import gpt_refusals, gpt_traits, may_be_gpt
from megatron_patches.refit.models.params import Weight, attention, feed_forward
from megatron_patches.refit.models.traits import ModelTraits
from megatron_patches.refit.models.yarn import yarn_entry, yarn_from_config

if TYPE_CHECKING:
    import torch


class LlamaFamily(ModelFamily):
    """``LlamaForCausalLM``, with biases either on all linear layers or on none."""

    architecture = "LlamaForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "attention_bias": self.traits.qkv_bias,
            "mlp_bias": self.traits.linear_bias,
            "pretraining_tp": 1,
            **common_config(self.traits),
        }

    def weights(self, layer: int, fused_norms: bool) -> Iterator[Weight]:
        """See :class:`megatron_patches.refit.models.family.ModelFamily`."""
        t = self.traits
        yield from attention(t, "self_attn.", "input_layernorm.weight", fused_norms)
        yield from feed_forward(
            t, "mlp.", "post_attention_layernorm.weight", fused_norms, experts=t.has_experts(layer), gated=True
        )


def common_config(traits: ModelTraits) -> Mapping[str, object]:
    """Fields of ``config.json`` that all dense Llama-like architectures share."""
    scaling: Mapping[str, object] | None = None
    if traits.yarn is not None:
        scaling = yarn_entry(traits.yarn, latent=False)
    elif traits.rope_scaling_factor is not None:
        scaling = {  # Megatron's constants, see RotaryEmbedding._apply_scaling
            "rope_type": "llama3",
            "factor": traits.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return {
        "hidden_act": "silu",
        "hidden_size": traits.hidden_size,
        "initializer_range": traits.init_std,
        "intermediate_size": traits.ffn_hidden_size,
        "max_position_embeddings": traits.max_positions,
        "num_attention_heads": traits.num_heads,
        "num_hidden_layers": traits.num_layers,
        "num_key_value_heads": traits.num_kv_heads,
        "head_dim": traits.head_dim,
        "rms_norm_eps": traits.norm_eps,
        "rope_theta": traits.rope_base,
        "rope_scaling": scaling,
        "tie_word_embeddings": traits.tied_embeddings,
        "use_cache": True,
        "vocab_size": traits.vocab_size,
    }


def traits_from_config(config: Mapping[str, object], mlp_bias: bool = False) -> ModelTraits:
    """Traits from the fields of a ``config.json`` that all dense Llama-like architectures share.

    Args:
        config: content of the file.
        mlp_bias: whether the feed-forward has biases.

    Raises:
        UnsupportedModelError: if a field is missing or invalid.
    """
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    attention_bias = flag(config, "attention_bias")
    if attention_bias != mlp_bias:
        raise UnsupportedModelError(
            f"attention_bias is {attention_bias} and mlp_bias is {mlp_bias}: Megatron has a bias on all linear layers "
            "of a layer, on none, or on query, key and value alone"
        )
    return ModelTraits(
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", heads),
        head_dim=integer(config, "head_dim", hidden // heads),
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias,
        linear_bias=mlp_bias,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_base=number(config, "rope_theta", 10000.0),
    )


def gpt_traits_from_config(config: Mapping[str, object], mlp_bias: bool = False) -> ModelTraits:
    """As :func:`traits_from_config`, with YaRN, for architectures without latent attention whose positions are rotary.

    Raises:
        UnsupportedModelError: if a field is missing or invalid, or Megatron has no such YaRN.
    """
    return replace(traits_from_config(config, mlp_bias), yarn=yarn_from_config(config, latent=False))


def _claims(model: torch.nn.Module) -> bool:
    """Claims every model that no other Llama-like family claims."""
    config: Any = model.config
    others = config.num_moe_experts or config.qk_layernorm or (config.add_qkv_bias and not config.add_bias_linear)
    return may_be_gpt(model) and not others


FAMILY = Declaration(
    architecture="LlamaForCausalLM",
    claims=_claims,
    refusals=gpt_refusals,
    read=lambda model, vocab_size: LlamaFamily(gpt_traits(model, vocab_size)),
    from_config=lambda config: LlamaFamily(gpt_traits_from_config(config, flag(config, "mlp_bias"))),
)
