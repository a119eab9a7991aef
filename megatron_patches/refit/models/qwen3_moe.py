"""Qwen3-MoE-like models: Qwen3's attention, and a router with gated experts in every layer, without shared experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_fields import flag, integer
from megatron_patches.refit.models.family import Declaration
from megatron_patches.refit.models.gpt import gpt_refusals, gpt_traits, may_be_gpt
from megatron_patches.refit.models.hf_refusals import expert_refusals
from megatron_patches.refit.models.llama import gpt_traits_from_config
from megatron_patches.refit.models.qwen3 import Qwen3Family, bias_refusals

if TYPE_CHECKING:
    import torch

# transformers' defaults for fields that are left out, where they do not follow from other fields.
_LEFT_OUT: Mapping[str, object] = MappingProxyType({"num_key_value_heads": 4})


class Qwen3MoeFamily(Qwen3Family):
    """``Qwen3MoeForCausalLM``. Parameter names contain the global numbers of experts."""

    architecture = "Qwen3MoeForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            **super().config(),
            "model_type": "qwen3_moe",
            "num_experts": self.traits.num_experts,
            "num_experts_per_tok": self.traits.experts_per_token,
            "moe_intermediate_size": self.traits.moe_ffn_hidden_size,
            "norm_topk_prob": self.traits.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


def _claims(model: torch.nn.Module) -> bool:
    config: Any = model.config
    return may_be_gpt(model) and bool(config.num_moe_experts)


def _refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    config: Any = model.config
    if config.qk_layernorm:
        yield from bias_refusals(config)
    else:
        yield (
            f"no architecture has its {config.num_moe_experts} experts without norms on query and key; train with "
            "--qk-layernorm"
        )
    yield from _router_refusals(config)
    yield from gpt_refusals(model, vocab_size)


def _router_refusals(config: Any) -> Iterator[str]:
    """One clause per difference from Qwen3-MoE's experts: in every layer, gated, chosen by a softmax, none shared."""
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


def _from_config(config: Mapping[str, object]) -> Qwen3MoeFamily:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            f"decoder_sparse_step is {config.get('decoder_sparse_step')} and mlp_only_layers is "
            f"{config.get('mlp_only_layers')}; only models with experts in every layer are known"
        )
    traits = replace(
        gpt_traits_from_config({**_LEFT_OUT, **config}),
        qk_norm=True,
        # transformers 5 writes the longer name.
        num_experts=integer(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        moe_ffn_hidden_size=integer(config, "moe_intermediate_size"),
        norm_topk_prob=flag(config, "norm_topk_prob"),  # as transformers' default
    )
    return Qwen3MoeFamily(traits)


FAMILY = Declaration(
    architecture="Qwen3MoeForCausalLM",
    claims=_claims,
    refusals=_refusals,
    read=lambda model, vocab_size: Qwen3MoeFamily(gpt_traits(model, vocab_size)),
    from_config=_from_config,
)
