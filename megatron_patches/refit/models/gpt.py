"""Reads GPTModels with grouped-query attention and rotary positions; refuses what no Llama-like family can express.

Rotary frequencies are compared with the model's own buffer, because not every builder passes its flags on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.models.hf_refusals import (
    attention_refusals,
    gated_silu_refusals,
    norm_refusals,
    vocabulary_refusals,
)
from megatron_patches.refit.models.traits import ModelTraits, common_traits
from megatron_patches.refit.models.yarn import gpt_yarn_from_megatron, gpt_yarn_refusals

if TYPE_CHECKING:
    import torch

# Megatron's constants for --use-rope-scaling, see RotaryEmbedding._apply_scaling
_LOW_FACTOR, _HIGH_FACTOR, _ORIGINAL_LENGTH = 1.0, 4.0, 8192


def may_be_gpt(model: torch.nn.Module) -> bool:
    """Whether the model is neither a hybrid nor uses multi-latent attention."""
    config: Any = model.config
    return not getattr(model, "hybrid_layer_pattern", None) and not config.multi_latent_attention


def gpt_refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    """One clause per feature without a counterpart, except experts and norms on query and key."""
    config: Any = model.config
    if not hasattr(model, "decoder") or not hasattr(model, "share_embeddings_and_output_weights"):
        yield f"{type(model).__name__} is not a GPTModel"
        return
    if config.mtp_num_layers:
        yield f"it has {config.mtp_num_layers} multi-token prediction layers (--mtp-num-layers)"
    yield from norm_refusals(config, biases=True)
    yield from gated_silu_refusals(config)
    if model.position_embedding_type not in ("rope", "yarn"):
        yield f"its positions are {model.position_embedding_type!r}; train with --position-embedding-type rope or yarn"
    else:
        yield from _rotary_refusals(model, config)
    yield from attention_refusals(config)
    yield from vocabulary_refusals(model, vocab_size)


def gpt_traits(model: torch.nn.Module, vocab_size: int) -> ModelTraits:
    """Traits of a model without refusals.

    Args:
        model: the model, or any pipeline stage of it, without wrappers.
        vocab_size: number of embedding rows that belong to tokens.
    """
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
        # Scores are normalized to a sum of one if the softmax comes after the choice of experts.
        norm_topk_prob=not (experts and config.moe_router_pre_softmax),
        rope_base=float(model.rotary_base),  # type: ignore[arg-type]
        rope_scaling_factor=_rope_scaling_factor(model, config),
        yarn=gpt_yarn_from_megatron(model),
    )


def _rotary_refusals(model: torch.nn.Module, config: Any) -> Iterator[str]:
    if float(model.rotary_percent) != 1.0:  # type: ignore[arg-type]
        yield f"it rotates a part of each head (--rotary-percent {model.rotary_percent})"
    rotary: Any = model.rotary_pos_emb
    if rotary.seq_len_interpolation_factor is not None:
        yield f"it uses --rotary-seq-len-interpolation-factor {rotary.seq_len_interpolation_factor}"
    if model.position_embedding_type == "yarn":
        yield from gpt_yarn_refusals(model)
    elif float(model.rotary_percent) == 1.0 and not _rope_agrees(model, config):  # type: ignore[arg-type]
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
    """Factor of Llama 3's scaling, from the lowest frequency in use, because not every builder passes the flag on."""
    if not model.rotary_scaling or model.position_embedding_type != "rope":
        return None
    rotary: Any = model.rotary_pos_emb
    plain = rotary_frequencies(config.kv_channels, float(model.rotary_base), None)  # type: ignore[arg-type]
    if _ORIGINAL_LENGTH * plain[-1] / (2 * math.pi) >= _LOW_FACTOR:
        return None  # no frequency is low enough for the whole factor; the comparison decides
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
