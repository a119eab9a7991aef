"""Derives a Hugging Face configuration from a live Megatron model, and refuses what it cannot express.

A model that uses a feature without counterpart would load and silently compute something else. So every such
feature is refused by name of its flag, and the rotary frequencies are compared with the model's own buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.hf_common import common_traits
from megatron_patches.refit.hf_families import read_hybrid_traits, read_latent_traits
from megatron_patches.refit.hf_refusals import (
    activation_name,
    attention_refusals,
    expert_refusals,
    refuse,
    vocabulary_refusals,
)
from megatron_patches.refit.source.deepseek_v3 import DeepseekV3Family
from megatron_patches.refit.source.family import ModelFamily
from megatron_patches.refit.source.llama import LlamaFamily
from megatron_patches.refit.source.nemotron_h import NemotronHFamily
from megatron_patches.refit.source.qwen2 import Qwen2Family
from megatron_patches.refit.source.qwen3 import Qwen3Family
from megatron_patches.refit.source.qwen3_moe import Qwen3MoeFamily
from megatron_patches.refit.source.traits import ModelTraits

if TYPE_CHECKING:
    import torch

# Megatron's constants for --use-rope-scaling, see RotaryEmbedding._apply_scaling
_LOW_FACTOR, _HIGH_FACTOR, _ORIGINAL_LENGTH = 1.0, 4.0, 8192


def read_traits(model: torch.nn.Module, vocab_size: int) -> ModelTraits:
    """What a GPTModel or a HybridModel is.

    Args:
        model: the model, or any pipeline stage of it, without wrappers.
        vocab_size: rows of the embedding that are the tokenizer's; the rest is padding.

    Raises:
        UnsupportedModelError: naming every feature that cannot be exported, and its flag.
    """
    if getattr(model, "hybrid_layer_pattern", None):
        return read_hybrid_traits(model, vocab_size)
    if model.config.multi_latent_attention:  # type: ignore[union-attr]
        return read_latent_traits(model, vocab_size)
    refuse(_refusals(model, vocab_size))
    config: Any = model.config
    experts = config.num_moe_experts or 0
    return ModelTraits(
        **common_traits(model, vocab_size),
        num_layers=config.num_layers,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        qkv_bias=bool(config.add_bias_linear or config.add_qkv_bias),
        linear_bias=bool(config.add_bias_linear),
        qk_norm=bool(config.qk_layernorm),
        num_experts=experts,
        experts_per_token=config.moe_router_topk if experts else 0,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size if experts else 0,
        # Scores are made to add up to one where the softmax comes after the choice of experts.
        norm_topk_prob=not (experts and config.moe_router_pre_softmax),
        rope_base=float(model.rotary_base),  # type: ignore[arg-type]
        rope_scaling_factor=_rope_scaling_factor(model, config),
    )


def family_for(traits: ModelTraits) -> ModelFamily:
    """The architecture that has exactly these biases and norms.

    Raises:
        UnsupportedModelError: if none has.
    """
    if traits.layer_kinds:
        return NemotronHFamily(traits)
    if traits.latent is not None:
        return DeepseekV3Family(traits)
    if traits.qk_norm:
        if traits.qkv_bias or traits.linear_bias:
            raise UnsupportedModelError(
                "cannot export this model: no architecture has both the norms of --qk-layernorm and biases on linear "
                "layers; train with --disable-bias-linear and without --add-qkv-bias, or without --qk-layernorm"
            )
        if traits.num_experts:
            return Qwen3MoeFamily(traits)
        return Qwen3Family(traits)
    if traits.num_experts:
        raise UnsupportedModelError(
            f"cannot export this model: no architecture has its {traits.num_experts} experts without norms on query "
            "and key; train with --qk-layernorm"
        )
    if traits.qkv_bias and not traits.linear_bias:
        return Qwen2Family(traits)
    return LlamaFamily(traits)


def build_config(
    family: ModelFamily, dtype: str, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> Mapping[str, object]:
    """Content of ``config.json``.

    Args:
        family: the architecture, with its traits.
        dtype: torch's name of the weights' element type.
        bos_token_id: token that begins a text, if the tokenizer has one.
        eos_token_id: token that ends a text, if the tokenizer has one.
    """
    return {
        **family.config(),
        "torch_dtype": dtype,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }


def _refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    """One clause for each feature that has no counterpart."""
    from torch.nn import functional

    config: Any = model.config
    if not hasattr(model, "decoder") or not hasattr(model, "share_embeddings_and_output_weights"):
        yield f"{type(model).__name__} is not a GPTModel"
        return
    if config.num_moe_experts:
        yield from _expert_refusals(config)
    if config.mtp_num_layers:
        yield f"it has {config.mtp_num_layers} multi-token prediction layers (--mtp-num-layers)"
    if config.normalization != "RMSNorm":
        yield f"its norms are {config.normalization}; train with --normalization RMSNorm"
    if config.layernorm_zero_centered_gamma:
        yield "its norm weights are centred at zero (--apply-layernorm-1p)"
    if not config.gated_linear_unit or config.activation_func is not functional.silu:
        yield f"its feed-forward is not a gated SiLU but {activation_name(config)}; train with --swiglu"
    if model.position_embedding_type != "rope":
        yield f"its positions are {model.position_embedding_type!r}; train with --position-embedding-type rope"
    else:
        yield from _rotary_refusals(model, config)
    yield from attention_refusals(config)
    yield from vocabulary_refusals(model, vocab_size)


def _expert_refusals(config: Any) -> Iterator[str]:
    """Experts are exported as Qwen3-MoE has them: in every layer, gated, chosen by a softmax, none shared."""
    frequency = config.moe_layer_freq
    if frequency != 1 and not (isinstance(frequency, list) and all(value == 1 for value in frequency)):
        yield f"only some of its layers have experts (--moe-layer-freq {frequency})"
    if config.moe_router_score_function != "softmax":
        yield f"its router scores by {config.moe_router_score_function} (--moe-router-score-function)"
    if config.moe_router_topk_scaling_factor not in {None, 1.0}:
        yield f"it scales its experts (--moe-router-topk-scaling-factor {config.moe_router_topk_scaling_factor})"
    if not isinstance(getattr(config, "moe_router_pre_softmax", None), bool):
        yield "whether its experts' scores add up to one cannot be told (--moe-router-pre-softmax)"
    if config.moe_shared_expert_intermediate_size:
        yield f"it sets --moe-shared-expert-intermediate-size ({config.moe_shared_expert_intermediate_size})"
    if config.moe_router_enable_expert_bias:
        yield "it sets --moe-router-enable-expert-bias (True)"
    if config.moe_router_num_groups:
        yield f"it sets --moe-router-num-groups ({config.moe_router_num_groups})"
    yield from expert_refusals(config)


def _rotary_refusals(model: torch.nn.Module, config: Any) -> Iterator[str]:
    if config.rotary_interleaved:
        yield "it uses --rotary-interleaved"
    if float(model.rotary_percent) != 1.0:  # type: ignore[arg-type]
        yield f"it rotates a part of each head (--rotary-percent {model.rotary_percent})"
    rotary: Any = model.rotary_pos_emb
    if rotary.seq_len_interpolation_factor is not None:
        yield f"it uses --rotary-seq-len-interpolation-factor {rotary.seq_len_interpolation_factor}"
    if float(model.rotary_percent) == 1.0 and not _rope_agrees(model, config):  # type: ignore[arg-type]
        yield "its rotary frequencies follow neither --rotary-base alone nor Llama 3's scaling of it"


def rotary_frequencies(head_dim: int, base: float, scaling_factor: float | None) -> list[float]:
    """Inverse frequencies of rotary positions as Hugging Face computes them, with Llama 3's scaling if given."""
    plain = [base ** (-index / head_dim) for index in range(0, head_dim, 2)]
    if scaling_factor is None:
        return plain
    result = []
    for frequency in plain:
        turns = _ORIGINAL_LENGTH * frequency / (2 * math.pi)  # rotations within the original context
        keep = min(1.0, max(0.0, (turns - _LOW_FACTOR) / (_HIGH_FACTOR - _LOW_FACTOR)))
        result.append(frequency * (keep + (1 - keep) / scaling_factor))
    return result


def _rope_scaling_factor(model: torch.nn.Module, config: Any) -> float | None:
    """Factor of Llama 3's scaling, from the lowest frequency in use: not every builder passes the flag on."""
    if not model.rotary_scaling:
        return None
    rotary: Any = model.rotary_pos_emb
    plain = rotary_frequencies(config.kv_channels, float(model.rotary_base), None)  # type: ignore[arg-type]
    if _ORIGINAL_LENGTH * plain[-1] / (2 * math.pi) >= _LOW_FACTOR:
        return None  # no frequency is low enough to be scaled by the whole factor; the comparison decides
    return round(plain[-1] / float(rotary.inv_freq[-1]), 4)


def _rope_agrees(model: torch.nn.Module, config: Any) -> bool:
    rotary: Any = model.rotary_pos_emb
    expected = rotary_frequencies(
        config.kv_channels,
        float(model.rotary_base),  # type: ignore[arg-type]
        _rope_scaling_factor(model, config),
    )
    actual = [float(value) for value in rotary.inv_freq]
    return len(actual) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(actual, expected, strict=True)
    )
