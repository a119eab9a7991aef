"""Describes what a trainer rank would hold, from the model's traits and the mesh alone: no Megatron, no tensor.

The counterpart of ``describe``, which looks at a live model; a test holds the two against each other, rank by rank.
It is what plans for clusters that are not here are made from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from etp.layout import ShardLayout
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.manifest import Manifest, Placement, Storage
from megatron_patches.refit.source.family import ModelFamily
from megatron_patches.refit.source.mesh import TrainerMesh, TrainerRank
from megatron_patches.refit.source.shard import ParamShard, placements
from megatron_patches.refit.source.traits import ModelTraits


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How the training run keeps its weights.

    Attributes:
        dtype: element type of every parameter.
        vocab_multiple: Megatron's ``--make-vocab-size-divisible-by``.
        pad_for_alignment: rows of a shard are a multiple of this, as in ``EtpConfig``.
        fused_norms: whether layers are Transformer Engine's: norms lie inside the linear layer that follows, and the
            down projections of multi-latent attention are repeated, not cut.
        grouped_experts: whether a rank's experts are one grouped module, not one module each.
    """

    dtype: str = "bfloat16"
    vocab_multiple: int = 128
    pad_for_alignment: int = 16
    fused_norms: bool = False
    grouped_experts: bool = False


@dataclass(frozen=True, slots=True)
class _Param:
    """One parameter of a module: its name within the chunk, its shape before any cut, and the cuts."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None  # that tensor parallelism cuts
    expert: bool = False
    dtype: str | None = None  # where it is not the model's

    @property
    def sharded(self) -> bool:
        """Weights of linear layers and embeddings are cut along their rows; the router, norms and biases are not."""
        return self.dim is not None and len(self.shape) == 2


def trainer_manifest(
    family: ModelFamily,
    mesh: TrainerMesh,
    rank: int,
    options: TrainerOptions = TrainerOptions(),
    host: str = "",
) -> Manifest:
    """What ``rank`` holds, in boxes. Arguments as in :func:`param_shards`; ``host`` is the name of its machine."""
    storages: list[Storage] = []
    held: list[Placement] = []
    for shard in param_shards(family.traits, mesh, rank, options):
        storages.append(shard.as_storage())
        held.extend(placements(shard, family.pieces(shard)))
    return Manifest(rank, host, tuple(storages), tuple(held))


def param_shards(
    traits: ModelTraits, mesh: TrainerMesh, rank: int, options: TrainerOptions = TrainerOptions()
) -> Iterator[ParamShard]:
    """Every parameter that ``rank`` holds, as ``describe_model`` would describe it; the order may differ.

    Args:
        traits: the model.
        mesh: sizes of the parallel axes.
        rank: which rank.
        options: padding, names and element type.

    Raises:
        UnsupportedModelError: if an axis does not divide what it cuts; names both.
        ValueError: if the mesh has no such rank.
    """
    _check_divides(traits, mesh, options)
    where = mesh.coordinates(rank)
    chunks = [count // mesh.vpp for count in _stage_layers(traits, mesh)]  # layers of a chunk, by stage
    for chunk in range(mesh.vpp):
        first, last = chunk == 0 and where.pp == 0, chunk == mesh.vpp - 1 and where.pp == mesh.pp - 1
        offset = chunk * sum(chunks) + sum(chunks[: where.pp])
        found: list[tuple[_Param, str]] = [
            (param, param.name) for param in _outer_params(traits, mesh, options, first, last)
        ]
        for layer in range(chunks[where.pp]):
            for param, name in _layer_params(traits, mesh, where, options, offset + layer):
                local = replace(param, name=f"decoder.layers.{layer}.{param.name}")
                found.append((local, f"decoder.layers.{offset + layer}.{name}"))
        if last:
            found.extend(_mtp_params(traits, mesh, where, options))
        for param, name in found:
            yield _shard(param, name, f"chunk{chunk}.{param.name}", mesh, where, options)


def _stage_layers(traits: ModelTraits, mesh: TrainerMesh) -> list[int]:
    try:
        return mesh.stage_layers(traits.num_layers)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error


def _outer_params(
    traits: ModelTraits, mesh: TrainerMesh, options: TrainerOptions, first: bool, last: bool
) -> Iterator[_Param]:
    multiple = options.vocab_multiple * mesh.tp
    table = (-(-traits.vocab_size // multiple) * multiple, traits.hidden_size)
    if first or (last and traits.mtp_layers):
        yield _Param("embedding.word_embeddings.weight", table, 0)
    if last:
        name = "decoder.final_norm.weight" if traits.layer_kinds else "decoder.final_layernorm.weight"
        yield _Param(name, (traits.hidden_size,))
        if not (first and traits.tied_embeddings):  # a tied table is kept on both the first and the last stage
            yield _Param("output_layer.weight", table, 0)


def _mtp_params(
    traits: ModelTraits, mesh: TrainerMesh, where: TrainerRank, options: TrainerOptions
) -> Iterator[tuple[_Param, str]]:
    """Layers that predict further tokens: Megatron keeps them on the last stage, with the embedding."""
    hidden = traits.hidden_size
    for number in range(traits.mtp_layers):
        prefix = f"mtp.layers.{number}."
        for param in (
            _Param(prefix + "enorm.weight", (hidden,)),
            _Param(prefix + "hnorm.weight", (hidden,)),
            _Param(prefix + "eh_proj.weight", (hidden, 2 * hidden), 0),
            _Param(prefix + "final_layernorm.weight", (hidden,)),
        ):
            yield param, param.name
        prefix += "mtp_model_layer."
        for param, name in _layer_params(traits, mesh, where, options, traits.num_layers + number):
            yield replace(param, name=prefix + param.name), prefix + name


def _layer_params(
    traits: ModelTraits, mesh: TrainerMesh, where: TrainerRank, options: TrainerOptions, layer: int
) -> Iterator[tuple[_Param, str]]:
    """Parameters of a layer, and their names with the whole model's expert numbers."""
    for param in _shared_params(traits, options, layer):
        yield param, param.name
    if not traits.has_experts(layer):
        return
    local = traits.num_experts // mesh.ep
    gated = 1 if traits.layer_kinds else 2
    for index in range(local):
        number = where.ep * local + index
        for kind, shape, dim in (
            ("linear_fc1", (gated * traits.moe_ffn_hidden_size, traits.hidden_size), 0),
            ("linear_fc2", (traits.hidden_size, traits.moe_ffn_hidden_size), 1),
        ):
            pattern = f"mlp.experts.{kind}.weight{{}}" if options.grouped_experts else f"{_SEQUENTIAL}.{kind}.weight"
            yield _Param(pattern.format(index), shape, dim, expert=True), pattern.format(number)


_SEQUENTIAL = "mlp.experts.local_experts.{}"


def _shared_params(traits: ModelTraits, options: TrainerOptions, layer: int) -> Iterator[_Param]:
    """Parameters of a layer that are not an expert's."""
    experts = traits.has_experts(layer)
    kind = traits.layer_kinds[layer] if traits.layer_kinds else ""
    if kind == "mamba":
        yield from _mamba_params(traits, options)
    if kind in {"", "attention"}:
        yield from (_latent_params if traits.latent else _attention_params)(traits, options)
    if kind in {"", "mlp", "experts"}:
        yield from _mlp_params(traits, options, experts)


def _mamba_params(traits: ModelTraits, options: TrainerOptions) -> Iterator[_Param]:
    mamba, hidden = traits.mamba, traits.hidden_size
    if mamba is None:
        raise ValueError("the model has no Mamba layers")
    yield _Param("mixer.in_proj.layer_norm_weight" if options.fused_norms else "norm.weight", (hidden,))
    yield _Param("mixer.in_proj.weight", (mamba.inner + mamba.convolved + mamba.heads, hidden), 0)
    yield _Param("mixer.conv1d_weight", (mamba.convolved, 1, mamba.kernel), 0)
    yield _Param("mixer.conv1d_bias", (mamba.convolved,), 0)
    for name in ("dt_bias", "A_log", "D"):
        yield _Param(f"mixer.{name}", (mamba.heads,), 0)
    yield _Param("mixer.norm.weight", (mamba.inner,), 0)
    yield _Param("mixer.out_proj.weight", (hidden, mamba.inner), 1)


def _latent_params(traits: ModelTraits, options: TrainerOptions) -> Iterator[_Param]:
    """Multi-latent attention. Its down projections are cut like others in Megatron's own layers only."""
    t, latent, prefix, fused = traits, traits.latent, "self_attention.", options.fused_norms
    if latent is None:
        raise ValueError("the model has no multi-latent attention")
    query = t.num_heads * (latent.nope_dim + latent.rope_dim)
    down = None if fused else 0
    yield _Param("input_layernorm.weight", (t.hidden_size,))
    if latent.q_rank:
        norm = "linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight"
        yield _Param(prefix + "linear_q_down_proj.weight", (latent.q_rank, t.hidden_size), down)
        yield _Param(prefix + norm, (latent.q_rank,))
        yield _Param(prefix + "linear_q_up_proj.weight", (query, latent.q_rank), 0)
    else:
        yield _Param(prefix + "linear_q_proj.weight", (query, t.hidden_size), 0)
    norm = "linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight"
    key_value = t.num_heads * (latent.nope_dim + latent.v_dim)
    yield _Param(prefix + "linear_kv_down_proj.weight", (latent.kv_rank + latent.rope_dim, t.hidden_size), down)
    yield _Param(prefix + norm, (latent.kv_rank,))
    yield _Param(prefix + "linear_kv_up_proj.weight", (key_value, latent.kv_rank), 0)
    yield _Param(prefix + "linear_proj.weight", (t.hidden_size, t.num_heads * latent.v_dim), 1)


def _attention_params(traits: ModelTraits, options: TrainerOptions) -> Iterator[_Param]:
    t = traits
    query, key = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    norm = "self_attention.linear_qkv.layer_norm_weight" if options.fused_norms else "input_layernorm.weight"
    yield _Param(norm, (t.hidden_size,))
    yield _Param("self_attention.linear_qkv.weight", (query + 2 * key, t.hidden_size), 0)
    if t.qkv_bias:
        yield _Param("self_attention.linear_qkv.bias", (query + 2 * key,), 0)
    yield _Param("self_attention.linear_proj.weight", (t.hidden_size, query), 1)
    if t.linear_bias:
        yield _Param("self_attention.linear_proj.bias", (t.hidden_size,))
    if t.qk_norm:
        yield _Param("self_attention.q_layernorm.weight", (t.head_dim,))
        yield _Param("self_attention.k_layernorm.weight", (t.head_dim,))


def _mlp_params(traits: ModelTraits, options: TrainerOptions, experts: bool) -> Iterator[_Param]:
    """The feed-forward of a dense layer; of a layer with experts what is not theirs."""
    t, gated = traits, 1 if traits.layer_kinds else 2
    fused = options.fused_norms and not experts
    yield _Param("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight", (t.hidden_size,))
    if experts:
        yield _Param("mlp.router.weight", (t.num_experts, t.hidden_size))
        if t.router_bias:
            yield _Param("mlp.router.expert_bias", (t.num_experts,), dtype="float32")
        if t.shared_ffn_hidden_size:
            yield _Param("mlp.shared_experts.linear_fc1.weight", (gated * t.shared_ffn_hidden_size, t.hidden_size), 0)
            yield _Param("mlp.shared_experts.linear_fc2.weight", (t.hidden_size, t.shared_ffn_hidden_size), 1)
        return
    yield _Param("mlp.linear_fc1.weight", (gated * t.ffn_hidden_size, t.hidden_size), 0)
    yield _Param("mlp.linear_fc2.weight", (t.hidden_size, t.ffn_hidden_size), 1)
    if t.linear_bias:
        yield _Param("mlp.linear_fc1.bias", (gated * t.ffn_hidden_size,), 0)
        yield _Param("mlp.linear_fc2.bias", (t.hidden_size,))


def _shard(
    param: _Param, name: str, storage: str, mesh: TrainerMesh, where: TrainerRank, options: TrainerOptions
) -> ParamShard:
    """Cuts a parameter by tensor parallelism, then its rows over the shard group."""
    tp_rank, tp_size = (where.expert_tp, mesh.expert_tp) if param.expert else (where.tp, mesh.tp)
    etp_rank, etp_size = (where.expert_etp, mesh.expert_etp) if param.expert else (where.etp, mesh.etp)
    shape = tuple(size // tp_size if dim == param.dim else size for dim, size in enumerate(param.shape))
    rows, held = (0, shape[0]), shape
    if param.sharded and etp_size > 1:
        layout = ShardLayout(shape, etp_size, options.pad_for_alignment)
        rows, held = layout.logical_range(etp_rank), layout.shard_shape
    return ParamShard(
        name=name,
        storage=storage,
        shape=shape,
        rows=rows,
        held_shape=held,
        dtype=param.dtype or options.dtype,
        tp_rank=tp_rank,
        tp_size=tp_size,
        partition_dim=param.dim,
    )


def _check_divides(traits: ModelTraits, mesh: TrainerMesh, options: TrainerOptions) -> None:
    """Megatron refuses these too, when it builds the model."""
    cuts: list[tuple[str, int, str, int]] = [("attention heads", traits.num_heads, "tp", mesh.tp)]
    if mesh.first or mesh.last:
        cuts.extend(("layers of a stage", count, "vpp", mesh.vpp) for count in _stage_layers(traits, mesh))
    else:
        cuts.append(("num_layers", traits.num_layers, "pp x vpp", mesh.pp * mesh.vpp))
    if traits.latent is None:
        fused = (traits.num_heads + 2 * traits.num_kv_heads) * traits.head_dim
        cuts.append(("rows of query, key and value", fused, "tp", mesh.tp))
    elif not options.fused_norms:
        rows = traits.latent.kv_rank + traits.latent.rope_dim
        cuts.append(("rows of the compressed query", traits.latent.q_rank, "tp", mesh.tp))
        cuts.append(("rows of the compressed key and value", rows, "tp", mesh.tp))
    if traits.mtp_layers:
        cuts.append(("hidden size, for layers that predict further tokens,", traits.hidden_size, "tp", mesh.tp))
    if traits.mamba is not None:
        cuts.append(("heads of a Mamba mixer", traits.mamba.heads, "tp", mesh.tp))
        cuts.append(("groups of a Mamba mixer", traits.mamba.groups, "tp", mesh.tp))
    if traits.num_experts:
        cuts.append(("experts", traits.num_experts, "ep", mesh.ep))
        cuts.append(("width of an expert", traits.moe_ffn_hidden_size, "expert_tp", mesh.expert_tp))
        cuts.append(("width of shared experts", traits.shared_ffn_hidden_size, "tp", mesh.tp))
    elif mesh.ep * mesh.expert_tp * mesh.expert_etp > 1:
        raise UnsupportedModelError(
            f"ep is {mesh.ep}, expert_tp {mesh.expert_tp} and expert_etp {mesh.expert_etp}, but the model has no "
            "experts; leave them at 1"
        )
    if not traits.num_experts or traits.first_dense_layers or "mlp" in traits.layer_kinds:
        cuts.append(("width of the feed-forward", traits.ffn_hidden_size, "tp", mesh.tp))
    for what, size, axis, parts in cuts:
        if size % parts:
            raise UnsupportedModelError(f"{axis} of {parts} does not divide {what} ({size})")
