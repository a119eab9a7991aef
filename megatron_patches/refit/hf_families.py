"""Reads models like DeepSeek-V3 and NemotronH from live Megatron models, and refuses what they cannot express."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.hf_common import common_traits
from megatron_patches.refit.hf_refusals import (
    activation_name,
    attention_refusals,
    norm_refusals,
    refuse,
    sigmoid_router_refusals,
    vocabulary_refusals,
)
from megatron_patches.refit.source.traits import LatentTraits, MambaTraits, ModelTraits, RouterTraits

if TYPE_CHECKING:
    import torch

# Letters of Megatron's hybrid patterns; "|" ends a pipeline stage.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
# Constants of megatron.core.ssm.mamba_mixer.MambaMixer, which no flag sets.
_MIXER_KERNEL, _MIXER_NORM_EPS = 4, 1e-5


def read_latent_traits(model: torch.nn.Module, vocab_size: int) -> ModelTraits:
    """What a GPTModel with multi-latent attention is.

    Raises:
        UnsupportedModelError: naming every feature that DeepSeek-V3 does not have, and its flag.
    """
    config: Any = model.config
    refuse(_latent_refusals(model, config, vocab_size))
    dense = _first_dense_layers(config)
    return ModelTraits(
        **common_traits(model, vocab_size),
        num_layers=config.num_layers,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.qk_head_dim + config.qk_pos_emb_head_dim,
        qkv_bias=False,
        linear_bias=False,
        num_experts=config.num_moe_experts,
        experts_per_token=config.moe_router_topk,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        first_dense_layers=dense if dense is not None else 0,
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        router_bias=True,
        router=_router(config),
        latent=LatentTraits(
            q_rank=config.q_lora_rank or 0,
            kv_rank=config.kv_lora_rank,
            nope_dim=config.qk_head_dim,
            rope_dim=config.qk_pos_emb_head_dim,
            v_dim=config.v_head_dim,
        ),
        mtp_layers=config.mtp_num_layers or 0,
        norm_topk_prob=config.moe_router_topk > 1,
        rope_base=float(config.rotary_base),
    )


def read_hybrid_traits(model: torch.nn.Module, vocab_size: int) -> ModelTraits:
    """What a HybridModel is.

    Raises:
        UnsupportedModelError: naming every feature that NemotronH does not have, and its flag.
    """
    config: Any = model.config
    pattern = str(model.hybrid_layer_pattern).replace("|", "")
    refuse(_hybrid_refusals(model, config, pattern, vocab_size))
    experts = "E" in pattern
    return ModelTraits(
        **common_traits(model, vocab_size),
        num_layers=len(pattern),
        layer_kinds=tuple(_KINDS[letter] for letter in pattern),
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        qkv_bias=False,
        linear_bias=False,
        num_experts=config.num_moe_experts if experts else 0,
        experts_per_token=config.moe_router_topk if experts else 0,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size if experts else 0,
        shared_ffn_hidden_size=(config.moe_shared_expert_intermediate_size or 0) if experts else 0,
        router_bias=experts,
        router=_router(config) if experts else None,
        mamba=MambaTraits(
            heads=config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim,
            head_dim=config.mamba_head_dim,
            groups=config.mamba_num_groups,
            state=config.mamba_state_dim,
            kernel=_MIXER_KERNEL,
        ),
        norm_topk_prob=config.moe_router_topk > 1 if experts else True,
        rope_base=10000.0,  # it has no rotary positions
    )


def _router(config: Any) -> RouterTraits:
    return RouterTraits(
        groups=config.moe_router_num_groups or 1,
        groups_per_token=config.moe_router_group_topk or 1,
        scaling=float(config.moe_router_topk_scaling_factor or 1.0),
    )


def _first_dense_layers(config: Any) -> int | None:
    """Layers before the first with experts; None if others follow without."""
    frequency = config.moe_layer_freq
    if frequency == 1:
        return 0
    if not isinstance(frequency, list) or 1 not in frequency:
        return None
    first = frequency.index(1)
    return first if all(value == 1 for value in frequency[first:]) else None


def _latent_refusals(model: torch.nn.Module, config: Any, vocab_size: int) -> Iterator[str]:
    from torch.nn import functional

    yield from norm_refusals(config)
    yield from vocabulary_refusals(model, vocab_size)
    if not config.gated_linear_unit or config.activation_func is not functional.silu:
        yield f"its feed-forward is not a gated SiLU but {activation_name(config)}; train with --swiglu"
    if not config.qk_layernorm:
        yield "its compressed query and key have no norms; train with --qk-layernorm"
    if config.rope_type != "rope" or float(config.rotary_percent) != 1.0:
        yield (
            f"its positions are {config.rope_type} over {config.rotary_percent} of a head's part; train with "
            "--rope-type rope"
        )
    if config.mscale_all_dim and config.rotary_scaling_factor > 1:
        yield f"it scales attention by --mscale-all-dim {config.mscale_all_dim}; train without"
    if not config.num_moe_experts:
        yield "it has no experts, and DeepSeek-V3 does (--num-experts)"
        return
    if _first_dense_layers(config) is None:
        yield f"layers without experts follow others with (--moe-layer-freq {config.moe_layer_freq})"
    if (config.moe_shared_expert_intermediate_size or 0) % config.moe_ffn_hidden_size:
        yield (
            f"its shared experts are {config.moe_shared_expert_intermediate_size} wide, no multiple of "
            f"{config.moe_ffn_hidden_size}, the width of one (--moe-shared-expert-intermediate-size)"
        )
    if (config.mtp_num_layers or 0) > 1 and getattr(config, "mtp_use_repeated_layer", False):
        yield "one layer predicts several tokens (--mtp-use-repeated-layer)"
    yield from sigmoid_router_refusals(config)
    yield from attention_refusals(config)


def _hybrid_refusals(model: torch.nn.Module, config: Any, pattern: str, vocab_size: int) -> Iterator[str]:
    import torch

    yield from norm_refusals(config)
    yield from vocabulary_refusals(model, vocab_size)
    if any(letter not in _KINDS for letter in pattern):
        yield f"its layers are {pattern} (--hybrid-layer-pattern), and only {', '.join(_KINDS)} are known"
    if model.position_embedding_type != "none":
        yield f"its positions are {model.position_embedding_type!r}; train with --position-embedding-type none"
    probe = torch.tensor([-1.0, 2.0, 3.0])
    if config.gated_linear_unit or config.activation_func(probe).tolist() != [0.0, 4.0, 9.0]:
        yield f"its feed-forward is not a squared ReLU but {activation_name(config)}; train with --squared-relu"
    if config.qk_layernorm:
        yield "it has norms on query and key (--qk-layernorm)"
    if "M" in pattern and config.layernorm_epsilon != _MIXER_NORM_EPS:
        yield (
            f"its norms have an epsilon of {config.layernorm_epsilon} (--norm-epsilon), and those of Mamba mixers have "
            f"{_MIXER_NORM_EPS}; NemotronH has one for all"
        )
    if "E" in pattern:
        yield from sigmoid_router_refusals(config)
    yield from attention_refusals(config)
