"""DeepSeek-V3-like models: multi-latent attention, dense first layers, shared and routed experts, and MTP layers.

Megatron's rotary positions de-interleave the rows of query and key as DeepSeek's own code does, so rows keep their
order. A multi-token prediction layer is one more layer of the checkpoint, after the last. Its embedding and output
layer are the model's own; published checkpoints contain copies of them under the layer's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models import rules
from megatron_patches.refit.models.config_fields import check_given, count, flag, integer
from megatron_patches.refit.models.family import Declaration
from megatron_patches.refit.models.hf_refusals import (
    attention_refusals,
    gated_silu_refusals,
    norm_refusals,
    sigmoid_router_refusals,
    vocabulary_refusals,
)
from megatron_patches.refit.models.llama import LlamaFamily, common_config, traits_from_config
from megatron_patches.refit.models.params import TpDim, Weight, alike, feed_forward, mtp_parts
from megatron_patches.refit.models.traits import (
    LatentTraits,
    ModelTraits,
    RouterTraits,
    common_traits,
    sigmoid_router,
    sigmoid_router_from_config,
)
from megatron_patches.refit.models.yarn import yarn_entry, yarn_from_config, yarn_from_megatron, yarn_refusals

if TYPE_CHECKING:
    import torch

# transformers' defaults for fields that are left out; those of other families are 1.
_LEFT_OUT: Mapping[str, object] = MappingProxyType({"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5})


class DeepseekV3Family(LlamaFamily):
    """``DeepseekV3ForCausalLM``, trained with ``--multi-latent-attention``."""

    architecture = "DeepseekV3ForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        t, latent, router = self.traits, self._latent, self.traits.router or RouterTraits()
        return {
            "architectures": [self.architecture],
            "model_type": "deepseek_v3",
            **common_config(t),
            "rope_scaling": None if t.yarn is None else yarn_entry(t.yarn, latent=True),
            "head_dim": latent.rope_dim,  # as transformers defines it: the part of a head with rotary positions
            "q_lora_rank": latent.q_rank or None,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.v_dim,
            "first_k_dense_replace": t.first_dense_layers,
            "moe_layer_freq": 1,
            "n_routed_experts": t.num_experts,
            "n_shared_experts": t.shared_ffn_hidden_size // t.moe_ffn_hidden_size,
            "num_experts_per_tok": t.experts_per_token,
            "moe_intermediate_size": t.moe_ffn_hidden_size,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": t.norm_topk_prob,
            "n_group": router.groups,
            "topk_group": router.groups_per_token,
            "routed_scaling_factor": router.scaling,
            "num_nextn_predict_layers": t.mtp_layers,
        }

    @property
    def _latent(self) -> LatentTraits:
        if self.traits.latent is None:
            raise ValueError("DeepSeek-V3 needs the traits of its multi-latent attention")
        return self.traits.latent

    def outer(self) -> Iterator[Weight]:
        """See :class:`megatron_patches.refit.models.family.ModelFamily`."""
        t, table = self.traits, (self.traits.vocab_size, self.traits.hidden_size)
        layers = [self.prefix(layer) for layer in range(t.num_layers, t.num_layers + t.mtp_layers)]
        copies = {"embedding.word_embeddings.weight": ["embed_tokens"], "output_layer.weight": ["shared_head.head"]}
        for weight in super().outer():
            names = copies.get(weight.name, [])
            if t.tied_embeddings and names:
                names = ["embed_tokens", "shared_head.head"]
            more = {f"{prefix}{name}.weight": table for prefix in layers for name in names}
            yield replace(weight, tensors={**weight.tensors, **more})
        for index, prefix in enumerate(layers):
            yield from mtp_parts(index, t.hidden_size, prefix, prefix + "shared_head.norm.weight")

    def weights(self, layer: int, fused_norms: bool) -> Iterator[Weight]:
        """See :class:`megatron_patches.refit.models.family.ModelFamily`."""
        t = self.traits
        yield alike("input_layernorm.weight", "input_layernorm.weight", (t.hidden_size,))
        for weight in self._attention(fused_norms):
            tensors = {"self_attn." + name: shape for name, shape in weight.tensors.items()}
            yield replace(weight, name="self_attention." + weight.name, tensors=tensors)
        yield from feed_forward(
            t, "mlp.", "post_attention_layernorm.weight", fused_norms, experts=t.has_experts(layer), gated=True
        )

    def tp_dims(self, fused_norms: bool) -> Iterator[TpDim]:
        """Dimensions that tensor parallelism must divide in a layer, besides heads, experts and feed-forward."""
        if not fused_norms:
            yield "rows of the compressed query", self._latent.q_rank
            yield "rows of the compressed key and value", self._latent.kv_rank + self._latent.rope_dim

    def _attention(self, fused: bool) -> Iterator[Weight]:
        """Weights of a layer's attention, with norms within the linear layers that follow if ``fused``."""
        t, latent = self.traits, self._latent
        query, key_value = (t.num_heads * (latent.nope_dim + width) for width in (latent.rope_dim, latent.v_dim))
        q_norm, kv_norm = "q_layernorm.weight", "kv_layernorm.weight"
        if fused:
            q_norm, kv_norm = "linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"

        def down(tensor: str, name: str, rows: int) -> Weight:
            layout = partial(rules.column_parallel_or_whole, rows=rows)
            # Transformer Engine's layers do not shard the down projections.
            return alike(name, tensor, (rows, t.hidden_size), None if fused else 0, layout)

        if latent.q_rank:
            yield down("q_a_proj.weight", "linear_q_down_proj.weight", latent.q_rank)
            yield alike(q_norm, "q_a_layernorm.weight", (latent.q_rank,))
            yield alike("linear_q_up_proj.weight", "q_b_proj.weight", (query, latent.q_rank), 0)
        else:
            yield alike("linear_q_proj.weight", "q_proj.weight", (query, t.hidden_size), 0)
        yield down("kv_a_proj_with_mqa.weight", "linear_kv_down_proj.weight", latent.kv_rank + latent.rope_dim)
        yield alike(kv_norm, "kv_a_layernorm.weight", (latent.kv_rank,))
        yield alike("linear_kv_up_proj.weight", "kv_b_proj.weight", (key_value, latent.kv_rank), 0)
        yield alike("linear_proj.weight", "o_proj.weight", (t.hidden_size, t.num_heads * latent.v_dim), 1)


def _claims(model: torch.nn.Module) -> bool:
    config: Any = model.config
    return not getattr(model, "hybrid_layer_pattern", None) and bool(config.multi_latent_attention)


def _refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    config: Any = model.config
    yield from norm_refusals(config)
    yield from vocabulary_refusals(model, vocab_size)
    yield from gated_silu_refusals(config)
    if not config.qk_layernorm:
        yield "its compressed query and key have no norms; train with --qk-layernorm"
    yield from yarn_refusals(config)
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


def _read(model: torch.nn.Module, vocab_size: int) -> DeepseekV3Family:
    config: Any = model.config
    dense = _first_dense_layers(config)
    traits = ModelTraits(
        **common_traits(model, vocab_size),
        num_layers=config.num_layers,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.qk_head_dim + config.qk_pos_emb_head_dim,
        num_experts=config.num_moe_experts,
        experts_per_token=config.moe_router_topk,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        first_dense_layers=dense if dense is not None else 0,
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        router_bias=True,
        router=sigmoid_router(config),
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
        yarn=yarn_from_megatron(config),
    )
    return DeepseekV3Family(traits)


def _first_dense_layers(config: Any) -> int | None:
    """Number of layers before the first with experts; None if later layers have none."""
    frequency = config.moe_layer_freq
    if frequency == 1:
        return 0
    if not isinstance(frequency, list) or 1 not in frequency:
        return None
    first = frequency.index(1)
    return first if all(value == 1 for value in frequency[first:]) else None


def _from_config(config: Mapping[str, object]) -> DeepseekV3Family:
    check_given(config, "DeepseekV3ForCausalLM", ("q_lora_rank", "first_k_dense_replace", "n_shared_experts"))
    if flag(config, "attention_bias") or config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            f"attention_bias is {config.get('attention_bias')} and moe_layer_freq is {config.get('moe_layer_freq')}; "
            "only models without biases and with experts in every layer but the first are known"
        )
    nope, rope = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    heads, width = integer(config, "num_attention_heads"), integer(config, "moe_intermediate_size")
    traits = replace(
        traits_from_config(config),
        num_kv_heads=heads,
        head_dim=nope + rope,
        num_experts=integer(config, "n_routed_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        first_dense_layers=count(config, "first_k_dense_replace"),
        shared_ffn_hidden_size=count(config, "n_shared_experts") * width,
        router_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",  # the only method of transformers' class
        router=sigmoid_router_from_config({**_LEFT_OUT, **config}),
        latent=LatentTraits(
            q_rank=count(config, "q_lora_rank"),
            kv_rank=integer(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=integer(config, "v_head_dim"),
        ),
        mtp_layers=count(config, "num_nextn_predict_layers"),
        norm_topk_prob=flag(config, "norm_topk_prob", True),
        yarn=yarn_from_config(config, latent=True),
    )
    return DeepseekV3Family(traits)


FAMILY = Declaration(
    architecture="DeepseekV3ForCausalLM",
    claims=_claims,
    refusals=_refusals,
    read=_read,
    from_config=_from_config,
)
