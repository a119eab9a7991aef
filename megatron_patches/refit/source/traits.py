"""What a model is, in the terms that Hugging Face configurations share. Read from a Megatron model by `hf_config`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """A decoder, dense or with routed experts, with RMSNorm, rotary positions and a gated SiLU feed-forward.

    Attributes:
        num_layers: transformer layers of the whole model.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of gate and up projection each.
        num_heads: query heads.
        num_kv_heads: KV groups.
        head_dim: rows of one head.
        vocab_size: rows of the embedding without padding.
        max_positions: longest sequence that the model was built for.
        tied_embeddings: whether the output layer is the embedding.
        qkv_bias: bias on query, key and value.
        linear_bias: bias on every other linear layer.
        qk_norm: RMSNorm over each head of query and key.
        num_experts: routed experts in each layer; 0 for a dense feed-forward.
        experts_per_token: experts that the router picks.
        moe_ffn_hidden_size: width of an expert's gate and up projection each.
        norm_topk_prob: whether the scores of the experts that a token gets are made to add up to one.
        norm_eps: epsilon of RMSNorm.
        rope_base: base of the rotary frequencies.
        rope_scaling_factor: factor of Llama 3's frequency scaling; None for plain rotary positions.
        init_std: standard deviation of the initial weights.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    linear_bias: bool
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = True
    norm_eps: float
    rope_base: float
    rope_scaling_factor: float | None = None
    init_std: float = 0.02
