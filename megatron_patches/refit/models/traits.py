"""Properties of a model, in the terms that Hugging Face configurations share. Each family reads its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.config_fields import integer, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTraits:
    """Multi-latent attention, as in DeepSeek-V2 and V3.

    Attributes:
        q_rank: width of the compressed query; 0 if it is not compressed.
        kv_rank: width of the compressed key and value.
        nope_dim: rows per head of query and key without rotary positions.
        rope_dim: rows per head of query, and of the one key that all heads share, with rotary positions.
        v_dim: rows per head of value.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnTraits:
    """YaRN's scaling of rotary positions, with DeepSeek's two scales of attention. Does not affect shapes.

    Without latent attention, both scales have their defaults.

    Attributes:
        factor: how many times longer sequences have become; at least 1.
        original_positions: their length before.
        beta_fast: a frequency with more turns than this within that length is left alone.
        beta_slow: a frequency with fewer turns than this is divided by the whole factor.
        mscale: multiple of the factor's logarithm that scales the rotated rows of query and key.
        mscale_all_dim: the same for all rows; its part in the rotated ones is divided out of their scale.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaTraits:
    """A Mamba-2 mixer.

    Attributes:
        heads: number of heads.
        head_dim: rows of one head.
        groups: number of groups of heads that share B and C.
        state: state size: rows of B and of C in a group.
        kernel: width of the convolution.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def inner(self) -> int:
        """Rows of the gate; also those of x."""
        return self.heads * self.head_dim

    @property
    def grouped(self) -> int:
        """Rows of B; also those of C."""
        return self.groups * self.state

    @property
    def convolved(self) -> int:
        """Rows of x, B and C together."""
        return self.inner + 2 * self.grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTraits:
    """A router with sigmoid scores that picks groups of experts first. Does not affect shapes.

    Attributes:
        groups: number of groups of experts.
        groups_per_token: number of groups that a token's experts come from.
        scaling: factor on the scores of the chosen experts.
    """

    groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """A decoder with RMSNorm: dense or with routed experts, with latent attention, or a hybrid with Mamba layers.

    Attributes:
        num_layers: transformer layers of the whole model.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the gate projection; also that of the up projection.
        num_heads: query heads.
        num_kv_heads: KV groups.
        head_dim: rows of one head.
        vocab_size: rows of the embedding without padding.
        max_positions: longest sequence that the model was built for.
        tied_embeddings: whether the output layer is the embedding.
        qkv_bias: bias on query, key and value.
        linear_bias: bias on every other linear layer.
        qk_norm: RMSNorm over each head of query and key.
        num_experts: routed experts per layer; 0 for a dense feed-forward.
        experts_per_token: experts that the router picks per token.
        moe_ffn_hidden_size: width of an expert's gate projection; also that of its up projection.
        moe_latent_size: width of a routed expert's input and output, between two projections that all experts of a
            layer share; 0 if it is that of the residual stream, without projections.
        first_dense_layers: number of layers, from the first, with a dense feed-forward instead of experts.
        shared_ffn_hidden_size: total width of the shared experts; 0 for none.
        router_bias: whether the router has a bias that affects only the choice of experts; kept in float32.
        router: further properties of the router; None for a plain softmax.
        latent: multi-latent attention; None for heads with separate keys and values.
        mamba: the mixers of a hybrid's Mamba layers; None without Mamba layers.
        layer_kinds: in a hybrid, the kind of each layer: ``mamba``, ``attention``, ``mlp`` or ``experts``, whose
            feed-forward is not gated. Empty if every layer is attention and a gated feed-forward.
        mtp_layers: multi-token prediction layers, after the last layer.
        mtp_layer_kinds: in a hybrid, the kinds of the layers that one multi-token prediction layer consists of.
        norm_topk_prob: whether the scores of a token's experts are normalized to a sum of one.
        norm_eps: epsilon of RMSNorm.
        rope_base: base of the rotary frequencies.
        rope_scaling_factor: factor of Llama 3's frequency scaling; None without.
        yarn: YaRN's scaling of rotary positions; None without.
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
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    moe_latent_size: int = 0
    first_dense_layers: int = 0
    shared_ffn_hidden_size: int = 0
    router_bias: bool = False
    router: RouterTraits | None = None
    latent: LatentTraits | None = None
    mamba: MambaTraits | None = None
    layer_kinds: tuple[str, ...] = ()
    mtp_layers: int = 0
    mtp_layer_kinds: tuple[str, ...] = ()
    norm_topk_prob: bool = True
    norm_eps: float
    rope_base: float
    rope_scaling_factor: float | None = None
    yarn: YarnTraits | None = None
    init_std: float = 0.02

    @property
    def all_layer_kinds(self) -> tuple[str, ...]:
        """In a hybrid, the kind of each layer, those of multi-token prediction last."""
        return self.layer_kinds + self.mtp_layers * self.mtp_layer_kinds

    @property
    def expert_hidden_size(self) -> int:
        """Width of a routed expert's input; also that of its output."""
        return self.moe_latent_size or self.hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, from 0, has experts."""
        if self.layer_kinds:
            return self.all_layer_kinds[layer] == "experts"
        return self.num_experts > 0 and layer >= self.first_dense_layers

    def has_dense_feed_forward(self) -> bool:
        """Whether some layer has a feed-forward without experts."""
        if self.layer_kinds:
            return "mlp" in self.all_layer_kinds
        return not all(self.has_experts(layer) for layer in range(self.num_layers))


def common_traits(model: torch.nn.Module, vocab_size: int) -> dict[str, Any]:
    """The traits that all Megatron models expose in the same way, whatever their family, by name.

    Args:
        model: the model, or any pipeline stage of it, without wrappers.
        vocab_size: number of embedding rows that belong to tokens.
    """
    config: Any = model.config
    return {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_heads": config.num_attention_heads,
        "vocab_size": vocab_size,
        "max_positions": int(model.max_sequence_length),  # type: ignore[arg-type]
        "tied_embeddings": bool(model.share_embeddings_and_output_weights),
        "norm_eps": config.layernorm_epsilon,
        "init_std": config.init_method_std,
    }


def sigmoid_router(config: Any) -> RouterTraits:
    """Traits of a router with sigmoid scores, from Megatron's configuration."""
    return RouterTraits(
        groups=config.moe_router_num_groups or 1,
        groups_per_token=config.moe_router_group_topk or 1,
        scaling=float(config.moe_router_topk_scaling_factor or 1.0),
    )


def sigmoid_router_from_config(config: Mapping[str, object]) -> RouterTraits:
    """The same from a ``config.json``.

    Raises:
        UnsupportedModelError: if a field is invalid.
    """
    return RouterTraits(
        groups=integer(config, "n_group", 1),
        groups_per_token=integer(config, "topk_group", 1),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )


def check_ranks_agree(found: Sequence[tuple[str, ModelTraits]], kind: type[RefitError]) -> None:
    """Compares the ranks' architectures and traits.

    Args:
        found: architecture and traits of each rank, by rank.
        kind: the error to raise.

    Raises:
        RefitError: of the given kind, with the first rank and field that differ from rank 0's.
    """
    architecture, first = found[0]
    for rank, (name, traits) in enumerate(found):
        pairs = [("architecture", name, architecture)]
        if name == architecture:
            pairs = [(item.name, getattr(traits, item.name), getattr(first, item.name)) for item in fields(traits)]
        for what, mine, other in pairs:
            if mine != other:
                raise kind(f"rank {rank} describes another model than rank 0: {what} {mine} instead of {other}")
