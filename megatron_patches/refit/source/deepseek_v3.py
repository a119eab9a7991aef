"""DeepSeek-V3-like models: multi-latent attention, dense first layers, shared and routed experts, and MTP layers.

Megatron's rotary positions de-interleave the rows of query and key as DeepSeek's own code does, so rows keep their
order. A multi-token prediction layer is one more layer of the checkpoint, behind the last; its embedding and output
layer are the model's own, of which published checkpoints hold copies under the layer's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_patches.refit.source import rules
from megatron_patches.refit.source.experts import expert_pieces, expert_shapes
from megatron_patches.refit.source.llama import LlamaFamily, Rule, common_config, linear
from megatron_patches.refit.source.shard import ParamShard, Piece
from megatron_patches.refit.source.traits import LatentTraits, RouterTraits

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
            "head_dim": latent.rope_dim,  # what transformers means by it: the part of a head with rotary positions
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

    def pieces(self, shard: ParamShard) -> Sequence[Piece]:
        """Which rows of the TP-local weight are which box.

        Raises:
            UnmappedParameterError: if the name is none of such a model's, or its layer or expert does not exist.
        """
        found: Sequence[Piece] | None = None
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

    def _mtp_prefixes(self) -> Sequence[tuple[str, int]]:
        """Prefix and number of each multi-token prediction layer in the checkpoint."""
        first = self.traits.num_layers
        return [(f"model.layers.{layer}.", layer) for layer in range(first, first + self.traits.mtp_layers)]

    def _table_pieces(self, shard: ParamShard) -> Sequence[Piece] | None:
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

    def _mtp_pieces(self, shard: ParamShard, layer: int, kind: str) -> Sequence[Piece]:
        prefix = f"model.layers.{layer}."
        if kind == "eh_proj":
            return rules.column_parallel(shard, prefix + "eh_proj.weight")
        name = "shared_head.norm" if kind == "final_layernorm" else kind
        return rules.replicated(shard, f"{prefix}{name}.weight")

    def _layer_pieces(self, shard: ParamShard, layer: int, name: str) -> Sequence[Piece] | None:
        t, prefix = self.traits, f"model.layers.{layer}."
        layer_rules = {**self._attention_rules(prefix), **self._feed_forward_rules(prefix, t.has_experts(layer))}
        if name in layer_rules:
            return layer_rules[name](shard)
        if t.has_experts(layer):
            return expert_pieces(shard, name, prefix + "mlp.experts.", t.num_experts, gated=True)
        return None

    def _layer_shapes(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        t, prefix = self.traits, f"model.layers.{layer}."
        inner = {**self._attention_shapes()}
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
        t, latent = self.traits, self._latent
        query = t.num_heads * (latent.nope_dim + latent.rope_dim)
        shapes: dict[str, tuple[int, ...]] = {}
        if latent.q_rank:
            shapes |= linear("self_attn.q_a_proj", latent.q_rank, t.hidden_size, bias=False)
            shapes["self_attn.q_a_layernorm.weight"] = (latent.q_rank,)
            shapes |= linear("self_attn.q_b_proj", query, latent.q_rank, bias=False)
        else:
            shapes |= linear("self_attn.q_proj", query, t.hidden_size, bias=False)
        shapes |= linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, t.hidden_size, bias=False)
        shapes["self_attn.kv_a_layernorm.weight"] = (latent.kv_rank,)
        key_value = t.num_heads * (latent.nope_dim + latent.v_dim)
        shapes |= linear("self_attn.kv_b_proj", key_value, latent.kv_rank, bias=False)
        shapes |= linear("self_attn.o_proj", t.hidden_size, t.num_heads * latent.v_dim, bias=False)
        return shapes

    def _attention_rules(self, prefix: str) -> Mapping[str, Rule]:
        latent, mine, theirs = self._latent, "self_attention.", prefix + "self_attn."
        q_norm = partial(rules.replicated, tensor=theirs + "q_a_layernorm.weight")
        kv_norm = partial(rules.replicated, tensor=theirs + "kv_a_layernorm.weight")
        q_down, kv_down = theirs + "q_a_proj.weight", theirs + "kv_a_proj_with_mqa.weight"
        kv_rows = latent.kv_rank + latent.rope_dim
        found: dict[str, Rule] = {
            "input_layernorm.weight": partial(rules.replicated, tensor=prefix + "input_layernorm.weight"),
            mine + "linear_kv_down_proj.weight": partial(rules.column_parallel_or_whole, tensor=kv_down, rows=kv_rows),
            mine + "kv_layernorm.weight": kv_norm,
            mine + "linear_kv_up_proj.layer_norm_weight": kv_norm,
            mine + "linear_kv_up_proj.weight": partial(rules.column_parallel, tensor=theirs + "kv_b_proj.weight"),
            mine + "linear_proj.weight": partial(rules.row_parallel, tensor=theirs + "o_proj.weight"),
        }
        if not latent.q_rank:
            return {
                **found,
                mine + "linear_q_proj.weight": partial(rules.column_parallel, tensor=theirs + "q_proj.weight"),
            }
        return {
            **found,
            mine + "linear_q_down_proj.weight": partial(
                rules.column_parallel_or_whole, tensor=q_down, rows=latent.q_rank
            ),
            mine + "q_layernorm.weight": q_norm,
            mine + "linear_q_up_proj.layer_norm_weight": q_norm,
            mine + "linear_q_up_proj.weight": partial(rules.column_parallel, tensor=theirs + "q_b_proj.weight"),
        }

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
