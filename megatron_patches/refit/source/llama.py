"""Dense Llama-like models: Megatron's GPTModel with RMSNorm, rotary positions, GQA and gated SiLU.

Layers come in two flavours: the local spec has separate norms, Transformer Engine's keeps them inside the linear
layer that follows. Both map to the same tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.source import rules
from megatron_patches.refit.source.config_fields import flag, integer, number
from megatron_patches.refit.source.family import Declaration
from megatron_patches.refit.source.gpt import gpt_refusals, gpt_traits, may_be_gpt
from megatron_patches.refit.source.params import (
    Cut,
    Param,
    Rule,
    attention_cuts,
    attention_params,
    expert_params,
    feed_forward_params,
)
from megatron_patches.refit.source.shard import ParamShard, RowSpan
from megatron_patches.refit.source.traits import ModelTraits

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class LlamaFamily:
    """``LlamaForCausalLM``.

    Args:
        traits: the model; biases either on all linear layers or on none.
    """

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""
        return "LlamaForCausalLM"

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

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor of the checkpoint, in the order of the file."""
        t = self.traits
        table, norm = (t.vocab_size, t.hidden_size), (t.hidden_size,)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        for layer in range(t.num_layers):
            shapes.update(self._layer_shapes(layer))
        shapes["model.norm.weight"] = norm
        if not t.tied_embeddings:
            shapes["lm_head.weight"] = table
        return shapes

    def pieces(self, shard: ParamShard) -> Sequence[RowSpan]:
        """The box of each range of rows of the TP-local weight.

        Raises:
            UnmappedParameterError: if a Llama-like model has no such parameter or layer.
        """
        match = _LAYER.fullmatch(shard.name)
        if match is None:
            rule = self._outer_rules().get(shard.name)
        elif int(match[1]) < self.traits.num_layers:
            rule = self._layer_rules(f"model.layers.{match[1]}.").get(match[2])
        else:
            rule = None
        if rule is None:
            raise self._unmapped(shard)
        return rule(shard)

    @property
    def final_norm(self) -> str:
        """Megatron's name of the norm after the last layer."""
        return "decoder.final_layernorm.weight"

    def layer_params(self, layer: int, fused_norms: bool) -> Iterator[Param]:
        """Parameters of a layer, except those of routed experts, by name within it."""
        yield from attention_params(self.traits, fused_norms)
        yield from feed_forward_params(self.traits, fused_norms, experts=self.traits.has_experts(layer), gated=True)

    def expert_params(self) -> Sequence[Param]:
        """Parameters of one routed expert, by name within it."""
        return expert_params(self.traits, gated=True)

    def cuts(self, fused_norms: bool) -> Iterator[Cut]:  # noqa: ARG002 - unused: other families need it
        """Dimensions that tensor parallelism must divide in a layer, besides heads, experts and feed-forward."""
        yield from attention_cuts(self.traits)

    def _unmapped(self, shard: ParamShard) -> UnmappedParameterError:
        return UnmappedParameterError(
            f"no tensor of {self.architecture} corresponds to the Megatron parameter {shard.name} of shape "
            f"{shard.shape}; add it to the family's mapping, or train without the feature that it belongs to"
        )

    def _layer_shapes(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """Tensors of a layer, by full name."""
        prefix, norm = f"model.layers.{layer}.", (self.traits.hidden_size,)
        inner = {**self._attention_shapes(), **self._mlp_shapes()}
        return {
            prefix + "input_layernorm.weight": norm,
            **{prefix + name: shape for name, shape in inner.items()},
            prefix + "post_attention_layernorm.weight": norm,
        }

    def _attention_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensors of a layer's attention, by name within the layer."""
        t = self.traits
        query, key = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
        return {
            **linear("self_attn.q_proj", query, t.hidden_size, t.qkv_bias),
            **linear("self_attn.k_proj", key, t.hidden_size, t.qkv_bias),
            **linear("self_attn.v_proj", key, t.hidden_size, t.qkv_bias),
            **linear("self_attn.o_proj", t.hidden_size, query, t.linear_bias),
        }

    def _mlp_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensors of a layer's feed-forward, by name within the layer."""
        t = self.traits
        return {
            **linear("mlp.gate_proj", t.ffn_hidden_size, t.hidden_size, t.linear_bias),
            **linear("mlp.up_proj", t.ffn_hidden_size, t.hidden_size, t.linear_bias),
            **linear("mlp.down_proj", t.hidden_size, t.ffn_hidden_size, t.linear_bias),
        }

    def _outer_rules(self) -> Mapping[str, Rule]:
        embedding = "model.embed_tokens.weight"
        head = embedding if self.traits.tied_embeddings else "lm_head.weight"
        table = partial(rules.vocabulary, vocab_size=self.traits.vocab_size)
        return {
            "embedding.word_embeddings.weight": partial(table, tensor=embedding),
            "output_layer.weight": partial(table, tensor=head),
            "decoder.final_layernorm.weight": partial(rules.replicated, tensor="model.norm.weight"),
        }

    def _layer_rules(self, prefix: str) -> Mapping[str, Rule]:
        t = self.traits
        before_attention = partial(rules.replicated, tensor=prefix + "input_layernorm.weight")
        before_mlp = partial(rules.replicated, tensor=prefix + "post_attention_layernorm.weight")
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        found: dict[str, Rule] = {
            "input_layernorm.weight": before_attention,
            "self_attention.linear_qkv.layer_norm_weight": before_attention,
            "pre_mlp_layernorm.weight": before_mlp,
            "mlp.linear_fc1.layer_norm_weight": before_mlp,
            "self_attention.linear_proj.weight": partial(rules.row_parallel, tensor=attention + "o_proj.weight"),
            "self_attention.linear_proj.bias": partial(rules.replicated, tensor=attention + "o_proj.bias"),
            "mlp.linear_fc2.weight": partial(rules.row_parallel, tensor=mlp + "down_proj.weight"),
            "mlp.linear_fc2.bias": partial(rules.replicated, tensor=mlp + "down_proj.bias"),
        }
        for kind in ("weight", "bias"):
            found[f"self_attention.linear_qkv.{kind}"] = partial(
                rules.fused_qkv,
                names=(f"{attention}q_proj.{kind}", f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}"),
                heads=t.num_heads,
                kv_heads=t.num_kv_heads,
                head_dim=t.head_dim,
            )
            found[f"mlp.linear_fc1.{kind}"] = partial(
                rules.gated, gate=f"{mlp}gate_proj.{kind}", up=f"{mlp}up_proj.{kind}"
            )
        return found


def linear(name: str, rows: int, columns: int, bias: bool) -> Mapping[str, tuple[int, ...]]:
    """Weight and, if there is one, bias of a linear layer."""
    weight = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


def common_config(traits: ModelTraits) -> Mapping[str, object]:
    """Fields of ``config.json`` that all dense Llama-like architectures share."""
    scaling = None
    if traits.rope_scaling_factor is not None:
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
    from_config=lambda config: LlamaFamily(traits_from_config(config, flag(config, "mlp_bias"))),
)
