"""Megatron's parameters without Megatron, with the tensors that they hold: tables for the families to build on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_patches.refit.models import rules
from megatron_patches.refit.models.shard import ParamShard, RowSpan
from megatron_patches.refit.models.traits import ModelTraits

ROUTER_BIAS = "gate.e_score_correction_bias"
"""Tensor of a router's bias within its feed-forward: float32, whatever type a model has."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter, and the tensors of the checkpoint that it holds.

    Attributes:
        name: Megatron's name within its module.
        shape: shape of the parameter before tensor parallelism.
        tensors: shapes of the tensors, by name within the corresponding module.
        dim: dimension that tensor parallelism cuts; None for none.
        layout: the function of :mod:`megatron_patches.refit.models.rules` that takes the shard and the tensors' names,
            if it is not the one for ``dim``.
        dtype: dtype, if it differs from the model's.
        expert: whether it belongs to a routed expert, which has its own parallel axes.
    """

    name: str
    shape: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]
    dim: int | None = None
    layout: Callable[..., Sequence[RowSpan]] | None = None
    dtype: str | None = None
    expert: bool = False

    @property
    def sharded(self) -> bool:
        """Whether ETP cuts its rows: those of linear layers and embeddings, but not of router, norms and biases."""
        return self.dim is not None and len(self.shape) == 2

    def pieces(self, shard: ParamShard, prefix: str = "") -> Sequence[RowSpan]:
        """Which boxes of the tensors, whose full names begin with ``prefix``, a shard of the parameter holds."""
        by_dim = {None: rules.replicated, 0: rules.column_parallel, 1: rules.row_parallel}
        layout: Callable[..., Sequence[RowSpan]] = self.layout or by_dim[self.dim]
        return layout(shard, *(prefix + tensor for tensor in self.tensors))


TpDim = tuple[str, int]
"""A dimension that tensor parallelism must divide: its name for messages, and its size."""


def alike(
    name: str,
    tensor: str,
    shape: tuple[int, ...],
    dim: int | None = None,
    layout: Callable[..., Sequence[RowSpan]] | None = None,
) -> Weight:
    """A parameter that is one tensor, of the same shape; arguments as of :class:`Weight`."""
    return Weight(name, shape, {tensor: shape}, dim, layout)


def attention(traits: ModelTraits, theirs: str, norm: str, fused_norms: bool) -> Iterator[Weight]:
    """Attention with separate heads, and the norm before it.

    Args:
        traits: the model.
        theirs: prefix of the tensors of attention within the layer.
        norm: the norm's tensor within the layer.
        fused_norms: whether layers are Transformer Engine's.
    """
    t = traits
    query, key = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim

    def fused(shard: ParamShard, *names: str) -> Sequence[RowSpan]:
        return rules.fused_qkv(shard, names, heads=t.num_heads, kv_heads=t.num_kv_heads, head_dim=t.head_dim)

    mine = "self_attention."
    yield alike(
        mine + "linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight", norm, (t.hidden_size,)
    )
    for kind, rest in _kinds(t.hidden_size, t.qkv_bias):
        heads = {"q_proj": query, "k_proj": key, "v_proj": key}
        tensors = {f"{theirs}{name}.{kind}": (rows, *rest) for name, rows in heads.items()}
        yield Weight(f"{mine}linear_qkv.{kind}", (query + 2 * key, *rest), tensors, 0, fused)
    yield alike(mine + "linear_proj.weight", theirs + "o_proj.weight", (t.hidden_size, query), 1)
    if t.linear_bias:
        yield alike(mine + "linear_proj.bias", theirs + "o_proj.bias", (t.hidden_size,))
    if t.qk_norm:
        for name in "qk":
            yield alike(f"{mine}{name}_layernorm.weight", f"{theirs}{name}_norm.weight", (t.head_dim,))


def feed_forward(
    traits: ModelTraits, theirs: str, norm: str, fused_norms: bool, *, experts: bool, gated: bool
) -> Iterator[Weight]:
    """The feed-forward of a dense layer, or what a layer with experts has besides them; and the norm before it.

    Args:
        traits: the model.
        theirs: prefix of the tensors of the feed-forward within the layer.
        norm: the norm's tensor within the layer.
        fused_norms: whether layers are Transformer Engine's.
        experts: whether the layer has experts.
        gated: whether there is a gate projection.
    """
    t, hidden = traits, (traits.hidden_size,)
    fused = fused_norms and not experts
    yield alike("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight", norm, hidden)
    if not experts:
        yield from two_layers("mlp.", theirs, t.hidden_size, t.ffn_hidden_size, gated=gated, bias=t.linear_bias)
        return
    yield alike("mlp.router.weight", theirs + "gate.weight", (t.num_experts, *hidden))
    if t.router_bias:
        yield replace(alike("mlp.router.expert_bias", theirs + ROUTER_BIAS, (t.num_experts,)), dtype="float32")
    if t.moe_latent_size:
        for name, shape in (("fc1", (t.moe_latent_size, *hidden)), ("fc2", (*hidden, t.moe_latent_size))):
            yield alike(f"mlp.{name}_latent_proj.weight", f"{theirs}{name}_latent_proj.weight", shape)
    if t.shared_ffn_hidden_size:
        shared = "shared_experts."
        yield from two_layers(
            f"mlp.{shared}", theirs + shared, t.hidden_size, t.shared_ffn_hidden_size, gated=gated, bias=t.linear_bias
        )


def two_layers(mine: str, theirs: str, hidden: int, width: int, *, gated: bool, bias: bool) -> Iterator[Weight]:
    """The linear layers of a feed-forward, or of an expert.

    Args:
        mine: prefix of the parameters' names.
        theirs: prefix of the tensors' names.
        hidden: width of the input and the output.
        width: width between the layers.
        gated: whether the first one is gate and up projection.
        bias: whether both have biases.
    """
    first = ("gate_proj", "up_proj") if gated else ("up_proj",)
    for kind, rest in _kinds(hidden, bias):
        tensors = {f"{theirs}{name}.{kind}": (width, *rest) for name in first}
        shape = (len(first) * width, *rest)
        yield Weight(f"{mine}linear_fc1.{kind}", shape, tensors, 0, rules.gated if gated else None)
    yield alike(mine + "linear_fc2.weight", theirs + "down_proj.weight", (hidden, width), 1)
    if bias:
        yield alike(mine + "linear_fc2.bias", theirs + "down_proj.bias", (hidden,))


def _kinds(columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kinds of a linear layer's parameters, and their dimensions after the first."""
    yield "weight", (columns,)
    if bias:
        yield "bias", ()


def mtp_parts(number: int, hidden: int, first: str, norm: str) -> Iterator[Weight]:
    """The parts of a multi-token prediction layer around its inner layers.

    Args:
        number: number of the layer, from 0.
        hidden: width of the residual stream.
        first: prefix of the tensors of its first inner layer.
        norm: the tensor of the norm at its end.
    """
    mine = f"mtp.layers.{number}."
    yield alike(mine + "enorm.weight", first + "enorm.weight", (hidden,))
    yield alike(mine + "hnorm.weight", first + "hnorm.weight", (hidden,))
    yield alike(mine + "eh_proj.weight", first + "eh_proj.weight", (hidden, 2 * hidden), 0)
    yield alike(mine + "final_layernorm.weight", norm, (hidden,))
