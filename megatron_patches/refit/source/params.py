"""Megatron's parameters without Megatron: the names and shapes in a layer, for families that can be planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_patches.refit.source import rules
from megatron_patches.refit.source.shard import ParamShard, RowSpan
from megatron_patches.refit.source.traits import ModelTraits

Rule = Callable[[ParamShard], Sequence[RowSpan]]
"""The boxes that a parameter holds."""


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: its name within its module, its shape before any cut, and the cuts.

    Attributes:
        name: Megatron's name.
        shape: shape before tensor parallelism.
        dim: dimension that tensor parallelism cuts; None for none.
        expert: whether it belongs to a routed expert, which has its own parallel axes.
        dtype: dtype, if it differs from the model's.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    expert: bool = False
    dtype: str | None = None

    @property
    def sharded(self) -> bool:
        """Whether ETP cuts its rows: those of linear layers and embeddings, but not of router, norms and biases."""
        return self.dim is not None and len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a layer, if it is one tensor of the checkpoint and one parameter of Megatron.

    Attributes:
        tensor: name of the tensor within its module.
        name: Megatron's name within the corresponding module.
        shape: shape of the tensor, and of the parameter before tensor parallelism.
        dim: dimension that tensor parallelism cuts; None for none.
        layout: the function of :mod:`megatron_patches.refit.source.rules`, if it is not the one for ``dim``.
    """

    tensor: str
    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    layout: Callable[..., Sequence[RowSpan]] | None = None

    def rule(self, prefix: str) -> Rule:
        """Which boxes of the tensor, whose full name begins with ``prefix``, a parameter holds."""
        by_dim = {None: rules.replicated, 0: rules.column_parallel, 1: rules.row_parallel}
        return partial(self.layout or by_dim[self.dim], tensor=prefix + self.tensor)


Cut = tuple[str, int]
"""A dimension that tensor parallelism must divide: its name for messages, and its size."""


def attention_params(traits: ModelTraits, fused_norms: bool) -> Iterator[Param]:
    """Attention with separate heads, and the norm before it."""
    t = traits
    query, key = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    yield Param(norm, (t.hidden_size,))
    yield Param("self_attention.linear_qkv.weight", (query + 2 * key, t.hidden_size), 0)
    if t.qkv_bias:
        yield Param("self_attention.linear_qkv.bias", (query + 2 * key,), 0)
    yield Param("self_attention.linear_proj.weight", (t.hidden_size, query), 1)
    if t.linear_bias:
        yield Param("self_attention.linear_proj.bias", (t.hidden_size,))
    if t.qk_norm:
        yield Param("self_attention.q_layernorm.weight", (t.head_dim,))
        yield Param("self_attention.k_layernorm.weight", (t.head_dim,))


def attention_cuts(traits: ModelTraits) -> Iterator[Cut]:
    """Dimensions of attention that tensor parallelism must divide."""
    yield "rows of query, key and value", (traits.num_heads + 2 * traits.num_kv_heads) * traits.head_dim


def feed_forward_params(traits: ModelTraits, fused_norms: bool, *, experts: bool, gated: bool) -> Iterator[Param]:
    """The feed-forward of a dense layer, or what a layer with experts has besides them; and the norm before it."""
    t, stacked = traits, 2 if gated else 1
    fused = fused_norms and not experts
    yield Param("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight", (t.hidden_size,))
    if experts:
        yield Param("mlp.router.weight", (t.num_experts, t.hidden_size))
        if t.router_bias:
            yield Param("mlp.router.expert_bias", (t.num_experts,), dtype="float32")
        if t.moe_latent_size:
            yield Param("mlp.fc1_latent_proj.weight", (t.moe_latent_size, t.hidden_size))
            yield Param("mlp.fc2_latent_proj.weight", (t.hidden_size, t.moe_latent_size))
        if t.shared_ffn_hidden_size:
            yield Param("mlp.shared_experts.linear_fc1.weight", (stacked * t.shared_ffn_hidden_size, t.hidden_size), 0)
            yield Param("mlp.shared_experts.linear_fc2.weight", (t.hidden_size, t.shared_ffn_hidden_size), 1)
        return
    yield Param("mlp.linear_fc1.weight", (stacked * t.ffn_hidden_size, t.hidden_size), 0)
    yield Param("mlp.linear_fc2.weight", (t.hidden_size, t.ffn_hidden_size), 1)
    if t.linear_bias:
        yield Param("mlp.linear_fc1.bias", (stacked * t.ffn_hidden_size,), 0)
        yield Param("mlp.linear_fc2.bias", (t.hidden_size,))


def expert_params(traits: ModelTraits, *, gated: bool) -> Sequence[Param]:
    """One routed expert."""
    stacked = 2 if gated else 1
    return (
        Param("linear_fc1", (stacked * traits.moe_ffn_hidden_size, traits.expert_hidden_size), 0, expert=True),
        Param("linear_fc2", (traits.expert_hidden_size, traits.moe_ffn_hidden_size), 1, expert=True),
    )
