"""DeepSeek-V3-like models: multi-latent attention, dense first layers, shared and routed experts, and MTP layers.

Megatron's rotary positions de-interleave the rows of query and key as DeepSeek's own code does, so rows keep their
order. A multi-token prediction layer is one more layer of the checkpoint, after the last. Its embedding and output
layer are the model's own; published checkpoints contain copies of them under the layer's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.hf_common import common_traits
from megatron_patches.refit.hf_refusals import (
    activation_name,
    attention_refusals,
    norm_refusals,
    sigmoid_router_refusals,
    vocabulary_refusals,
)
from megatron_patches.refit.source import rules
from megatron_patches.refit.source.config_fields import check_given, count, flag, integer, number
from megatron_patches.refit.source.experts import (
    expert_pieces,
    expert_shapes,
    sigmoid_router,
    sigmoid_router_from_config,
)
from megatron_patches.refit.source.family import Declaration
from megatron_patches.refit.source.llama import LlamaFamily, common_config, linear
from megatron_patches.refit.source.params import Cut, Param, Rule, Weight, feed_forward_params
from megatron_patches.refit.source.shard import ParamShard, RowSpan
from megatron_patches.refit.source.traits import LatentTraits, ModelTraits, RouterTraits

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)|mtp\.layers\.(\d+)\.(?:mtp_model_layer\.)(.+)")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.(enorm|hnorm|eh_proj|final_layernorm)\.weight")


class DeepseekV3Family(LlamaFamily):
    """``DeepseekV3ForCausalLM``, trained with ``--multi-latent-attention``."""

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""
        return "DeepseekV3ForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        t, latent, router = self.traits, self._latent, self.traits.router or RouterTraits()
        return {
            "architectures": [self.architecture],
            "model_type": "deepseek_v3",
            **common_config(t),
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

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor of the checkpoint, in the order of the file."""
        t = self.traits
        shapes = dict(super().shapes())
        for prefix, layer in self._mtp_prefixes():
            shapes[prefix + "embed_tokens.weight"] = (t.vocab_size, t.hidden_size)
            shapes[prefix + "enorm.weight"] = shapes[prefix + "hnorm.weight"] = (t.hidden_size,)
            shapes[prefix + "eh_proj.weight"] = (t.hidden_size, 2 * t.hidden_size)
            shapes.update(self._layer_shapes(layer))
            shapes[prefix + "shared_head.norm.weight"] = (t.hidden_size,)
            shapes[prefix + "shared_head.head.weight"] = (t.vocab_size, t.hidden_size)
        return shapes

    def pieces(self, shard: ParamShard) -> Sequence[RowSpan]:
        """The box of each range of rows of the TP-local weight.

        Raises:
            UnmappedParameterError: if such a model has no such parameter, layer or expert.
        """
        found: Sequence[RowSpan] | None = None
        if (match := _LAYER.fullmatch(shard.name)) is not None:
            main, name, extra, extra_name = match.groups()
            number, limit = int(main or extra), self.traits.num_layers if main else self.traits.mtp_layers
            if number < limit:
                found = self._layer_pieces(
                    shard, number if main else self.traits.num_layers + number, name or extra_name
                )
        elif (match := _MTP.fullmatch(shard.name)) is not None:
            if int(match[1]) < self.traits.mtp_layers:
                found = self._mtp_pieces(shard, self.traits.num_layers + int(match[1]), match[2])
        else:
            found = self._table_pieces(shard)
        if found is None:
            raise self._unmapped(shard)
        return found

    def layer_params(self, layer: int, fused_norms: bool) -> Iterator[Param]:
        """Parameters of a layer, except those of routed experts, by name within it."""
        yield Param("input_layernorm.weight", (self.traits.hidden_size,))
        for weight in self._attention(fused_norms):
            yield Param("self_attention." + weight.name, weight.shape, weight.dim)
        yield from feed_forward_params(self.traits, fused_norms, experts=self.traits.has_experts(layer), gated=True)

    def cuts(self, fused_norms: bool) -> Iterator[Cut]:
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
            return Weight(tensor, name, (rows, t.hidden_size), None if fused else 0, layout)

        if latent.q_rank:
            yield down("q_a_proj.weight", "linear_q_down_proj.weight", latent.q_rank)
            yield Weight("q_a_layernorm.weight", q_norm, (latent.q_rank,))
            yield Weight("q_b_proj.weight", "linear_q_up_proj.weight", (query, latent.q_rank), 0)
        else:
            yield Weight("q_proj.weight", "linear_q_proj.weight", (query, t.hidden_size), 0)
        yield down("kv_a_proj_with_mqa.weight", "linear_kv_down_proj.weight", latent.kv_rank + latent.rope_dim)
        yield Weight("kv_a_layernorm.weight", kv_norm, (latent.kv_rank,))
        yield Weight("kv_b_proj.weight", "linear_kv_up_proj.weight", (key_value, latent.kv_rank), 0)
        yield Weight("o_proj.weight", "linear_proj.weight", (t.hidden_size, t.num_heads * latent.v_dim), 1)

    def _mtp_prefixes(self) -> Sequence[tuple[str, int]]:
        """Prefix and number of each multi-token prediction layer in the checkpoint."""
        first = self.traits.num_layers
        return [(f"model.layers.{layer}.", layer) for layer in range(first, first + self.traits.mtp_layers)]

    def _table_pieces(self, shard: ParamShard) -> Sequence[RowSpan] | None:
        rule = self._outer_rules().get(shard.name)
        if rule is None:
            return None
        copies = {"embedding.word_embeddings.weight": ["embed_tokens"], "output_layer.weight": ["shared_head.head"]}
        names = copies.get(shard.name, [])
        if self.traits.tied_embeddings and names:
            names = ["embed_tokens", "shared_head.head"]
        pieces = list(rule(shard))
        for prefix, _ in self._mtp_prefixes():
            for name in names:
                pieces.extend(rules.vocabulary(shard, f"{prefix}{name}.weight", self.traits.vocab_size))
        return pieces

    def _mtp_pieces(self, shard: ParamShard, layer: int, kind: str) -> Sequence[RowSpan]:
        prefix = f"model.layers.{layer}."
        if kind == "eh_proj":
            return rules.column_parallel(shard, prefix + "eh_proj.weight")
        name = "shared_head.norm" if kind == "final_layernorm" else kind
        return rules.replicated(shard, f"{prefix}{name}.weight")

    def _layer_pieces(self, shard: ParamShard, layer: int, name: str) -> Sequence[RowSpan] | None:
        t, prefix = self.traits, f"model.layers.{layer}."
        if t.has_experts(layer):  # first, because there are many
            found = expert_pieces(shard, name, prefix + "mlp.experts.", t.num_experts, gated=True)
            if found is not None:
                return found
        rule = {**self._attention_rules(prefix), **self._feed_forward_rules(prefix, t.has_experts(layer))}.get(name)
        return None if rule is None else rule(shard)

    def _layer_shapes(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        t, prefix = self.traits, f"model.layers.{layer}."
        inner = dict(self._attention_shapes())
        if t.has_experts(layer):
            inner["mlp.gate.weight"] = (t.num_experts, t.hidden_size)
            if t.router_bias:
                inner["mlp.gate.e_score_correction_bias"] = (t.num_experts,)
            inner |= expert_shapes("mlp.experts.", t.num_experts, t.hidden_size, t.moe_ffn_hidden_size, gated=True)
            if t.shared_ffn_hidden_size:
                inner |= _gated_shapes("mlp.shared_experts.", t.hidden_size, t.shared_ffn_hidden_size)
        else:
            inner |= _gated_shapes("mlp.", t.hidden_size, t.ffn_hidden_size)
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        inner |= dict.fromkeys(norms, (t.hidden_size,))
        return {prefix + name: shape for name, shape in inner.items()}

    def _attention_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"self_attn." + weight.tensor: weight.shape for weight in self._attention(fused=False)}

    def _attention_rules(self, prefix: str) -> Mapping[str, Rule]:
        norm = partial(rules.replicated, tensor=prefix + "input_layernorm.weight")
        weights = [*self._attention(fused=False), *self._attention(fused=True)]
        inner = {"self_attention." + weight.name: weight.rule(prefix + "self_attn.") for weight in weights}
        return {"input_layernorm.weight": norm, **inner}

    def _feed_forward_rules(self, prefix: str, experts: bool) -> Mapping[str, Rule]:
        norm = partial(rules.replicated, tensor=prefix + "post_attention_layernorm.weight")
        if not experts:
            return {
                "pre_mlp_layernorm.weight": norm,
                "mlp.linear_fc1.layer_norm_weight": norm,
                **_gated_rules("mlp.", prefix + "mlp."),
            }
        found: dict[str, Rule] = {
            "pre_mlp_layernorm.weight": norm,
            "mlp.router.weight": partial(rules.replicated, tensor=prefix + "mlp.gate.weight"),
        }
        if self.traits.router_bias:
            bias = prefix + "mlp.gate.e_score_correction_bias"
            found["mlp.router.expert_bias"] = partial(rules.replicated, tensor=bias)
        if self.traits.shared_ffn_hidden_size:
            found |= _gated_rules("mlp.shared_experts.", prefix + "mlp.shared_experts.")
        return found


def _gated_shapes(prefix: str, hidden: int, width: int) -> Mapping[str, tuple[int, ...]]:
    return {
        **linear(prefix + "gate_proj", width, hidden, bias=False),
        **linear(prefix + "up_proj", width, hidden, bias=False),
        **linear(prefix + "down_proj", hidden, width, bias=False),
    }


def _gated_rules(mine: str, theirs: str) -> Mapping[str, Rule]:
    gate, up = theirs + "gate_proj.weight", theirs + "up_proj.weight"
    return {
        mine + "linear_fc1.weight": partial(rules.gated, gate=gate, up=up),
        mine + "linear_fc2.weight": partial(rules.row_parallel, tensor=theirs + "down_proj.weight"),
    }


def _claims(model: torch.nn.Module) -> bool:
    config: Any = model.config
    return not getattr(model, "hybrid_layer_pattern", None) and bool(config.multi_latent_attention)


def _refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    from torch.nn import functional

    config: Any = model.config
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


def _read(model: torch.nn.Module, vocab_size: int) -> DeepseekV3Family:
    config: Any = model.config
    dense = _first_dense_layers(config)
    traits = ModelTraits(
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
    traits = ModelTraits(
        num_layers=integer(config, "num_hidden_layers"),
        hidden_size=integer(config, "hidden_size"),
        ffn_hidden_size=integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope,
        vocab_size=integer(config, "vocab_size"),
        max_positions=integer(config, "max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
        qkv_bias=False,
        linear_bias=False,
        num_experts=integer(config, "n_routed_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        first_dense_layers=count(config, "first_k_dense_replace"),
        shared_ffn_hidden_size=count(config, "n_shared_experts") * width,
        router_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",  # the only method of transformers' class
        router=sigmoid_router_from_config(config),
        latent=LatentTraits(
            q_rank=count(config, "q_lora_rank"),
            kv_rank=integer(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=integer(config, "v_head_dim"),
        ),
        mtp_layers=count(config, "num_nextn_predict_layers"),
        norm_topk_prob=flag(config, "norm_topk_prob", True),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_base=number(config, "rope_theta", 10000.0),
    )
    return DeepseekV3Family(traits)


FAMILY = Declaration(
    architecture="DeepseekV3ForCausalLM",
    claims=_claims,
    refusals=_refusals,
    read=_read,
    from_config=_from_config,
)
