"""Features of a Megatron model that no Hugging Face architecture can express, with the flags that set them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def vocabulary_refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    """A clause if the model's embedding cannot hold ``vocab_size`` tokens."""
    if not 0 < vocab_size <= int(model.vocab_size):  # type: ignore[arg-type]
        yield f"its embedding has {model.vocab_size} rows, padding included, which cannot hold {vocab_size} tokens"


def attention_refusals(config: Any) -> Iterator[str]:
    """One clause per unsupported setting of attention or of the layer around it."""
    unsupported: Sequence[tuple[str, object, str]] = (
        ("qk_l2_norm", False, "--qk-l2-norm"),
        ("attention_output_gate", False, "--attention-output-gate"),
        ("window_size", None, "--window-size"),
        ("softmax_scale", None, "--softmax-scale"),
        ("softmax_type", "vanilla", "--softmax-type"),
        ("experimental_attention_variant", None, "--experimental-attention-variant"),
        ("no_rope_freq", None, "--no-rope-freq"),
        ("rotary_interleaved", False, "--rotary-interleaved"),
        ("apply_residual_connection_post_layernorm", False, "--apply-residual-connection-post-layernorm"),
        ("activation_func_clamp_value", None, "--activation-func-clamp-value"),
        ("glu_linear_offset", 0.0, "--glu-linear-offset"),
        ("heterogeneous_block_specs", False, "--heterogeneous-layers-config-path"),
        ("use_mup", False, "--use-mup"),
    )
    for name, plain, flag in unsupported:
        value = getattr(config, name, plain)
        if value != plain and value:
            yield f"it sets {flag} ({value})"


def expert_refusals(config: Any, *, latent: bool = False) -> Iterator[str]:
    """One clause per unsupported setting of experts; ``latent`` where the architecture has latent experts."""
    kinds = config.moe_router_load_balancing_type
    balancing = {kinds} if isinstance(kinds, str) else set(kinds)
    if not balancing <= {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}:
        yield f"its router chooses experts by --moe-router-load-balancing-type {kinds}"
    unsupported = (
        ("moe_shared_expert_gate", "--moe-shared-expert-gate"),
        ("moe_expert_capacity_factor", "--moe-expert-capacity-factor"),
        ("moe_apply_probs_on_input", "--moe-apply-probs-on-input"),
        *(() if latent else (("moe_latent_size", "--moe-latent-size"),)),
        ("moe_mlp_glu_interleave_size", "--moe-mlp-glu-interleave-size"),
        ("moe_shared_expert_glu_interleave_size", "--moe-shared-expert-glu-interleave-size"),
        ("moe_router_force_load_balancing", "--moe-router-force-load-balancing"),
        ("moe_router_force_biased", "--moe-router-force-biased"),
    )
    for name, flag in unsupported:
        if getattr(config, name, None):
            yield f"it sets {flag} ({getattr(config, name)})"


def sigmoid_router_refusals(config: Any, *, latent: bool = False) -> Iterator[str]:
    """One clause per difference of a router from DeepSeek-V3's, and of its experts; see :func:`expert_refusals`."""
    if config.moe_router_score_function != "sigmoid":
        yield (
            f"its router scores by {config.moe_router_score_function}; train with --moe-router-score-function sigmoid"
        )
    if not config.moe_router_enable_expert_bias:
        yield "its router has no bias; train with --moe-router-enable-expert-bias"
    picked, groups = config.moe_router_topk, config.moe_router_group_topk
    if groups and picked // groups != 2:
        yield (
            f"its router ranks groups by their best {picked // groups} experts, and transformers by their best 2 "
            f"(--moe-router-topk {picked}, --moe-router-group-topk {groups})"
        )
    yield from expert_refusals(config, latent=latent)


def norm_refusals(config: Any, *, biases: bool = False) -> Iterator[str]:
    """One clause per difference from plain RMSNorm, and one for biases unless the architecture has them."""
    if config.normalization != "RMSNorm":
        yield f"its norms are {config.normalization}; train with --normalization RMSNorm"
    if config.layernorm_zero_centered_gamma:
        yield "its norm weights are centred at zero (--apply-layernorm-1p)"
    if not biases and (config.add_bias_linear or config.add_qkv_bias):
        yield "it has biases on linear layers; train with --disable-bias-linear and without --add-qkv-bias"


def gated_silu_refusals(config: Any) -> Iterator[str]:
    """A clause if the feed-forward is not a gated SiLU."""
    from torch.nn import functional

    if not config.gated_linear_unit or config.activation_func is not functional.silu:
        yield f"its feed-forward is not a gated SiLU but {activation_name(config)}; train with --swiglu"


def activation_name(config: Any) -> str:
    """Name of the feed-forward activation, for messages."""
    name = getattr(config.activation_func, "__name__", str(config.activation_func))
    return f"a {'gated ' if config.gated_linear_unit else ''}{name}"
