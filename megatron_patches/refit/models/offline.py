"""Describes what a trainer rank would hold, from a model's family and the mesh: no Megatron, no tensors.

The counterpart of :mod:`megatron_patches.refit.source.describe`, which examines a live model; a test compares the two,
rank by rank. Plans for clusters that do not exist are made from these descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from etp.layout import ShardLayout
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.models.family import ModelFamily
from megatron_patches.refit.models.mesh import TrainerMesh, TrainerRank
from megatron_patches.refit.models.params import Weight
from megatron_patches.refit.models.shard import ParamShard, placements
from megatron_patches.refit.models.traits import ModelTraits


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How the training run keeps its weights.

    Attributes:
        dtype: dtype of every parameter.
        vocab_multiple: Megatron's ``--make-vocab-size-divisible-by``.
        pad_for_alignment: multiple to which the rows of a shard are padded, as in ``EtpConfig``.
        transformer_engine: whether layers are Transformer Engine's: norms lie inside the linear layer that follows, a
            rank's experts are one grouped module, and the down projections of multi-latent attention are not cut.
    """

    dtype: str = "bfloat16"
    vocab_multiple: int = 128
    pad_for_alignment: int = 16
    transformer_engine: bool = False


def trainer_manifest(
    family: ModelFamily,
    mesh: TrainerMesh,
    rank: int,
    options: TrainerOptions = TrainerOptions(),
    host: str = "",
) -> Manifest:
    """What ``rank`` holds, as boxes. Arguments as for :func:`param_shards`; ``host`` is the name of its machine."""
    storages: list[Storage] = []
    held: list[Placement] = []
    for shard in param_shards(family, mesh, rank, options):
        storages.append(shard.as_storage())
        held.extend(placements(shard, family.pieces(shard)))
    return Manifest(rank, host, tuple(storages), tuple(held))


def param_shards(
    family: ModelFamily, mesh: TrainerMesh, rank: int, options: TrainerOptions = TrainerOptions()
) -> Iterator[ParamShard]:
    """Every parameter that ``rank`` holds, as ``describe_model`` would describe it; the order may differ.

    Args:
        family: the model.
        mesh: sizes of the parallel axes.
        rank: the rank.
        options: padding, names and dtype.

    Raises:
        UnsupportedModelError: if an axis does not divide what it cuts; names both.
        ValueError: if the mesh has no such rank.
    """
    _check_divides(family, mesh, options)
    where = mesh.coordinates(rank)
    chunks = [count // mesh.vpp for count in _stage_layers(family.traits, mesh)]  # layers of a chunk, by stage
    for chunk in range(mesh.vpp):
        first, last = chunk == 0 and where.pp == 0, chunk == mesh.vpp - 1 and where.pp == mesh.pp - 1
        offset = chunk * sum(chunks) + sum(chunks[: where.pp])
        found = [(weight, weight.name) for weight in _outer_weights(family, mesh, options, first, last)]
        for layer in range(chunks[where.pp]):
            for weight, name in _layer_weights(family, mesh, where, options, offset + layer):
                local = replace(weight, name=f"decoder.layers.{layer}.{weight.name}")
                found.append((local, f"decoder.layers.{offset + layer}.{name}"))
        if last:
            found.extend(_mtp_weights(family, mesh, where, options))
        for weight, name in found:
            yield _shard(weight, name, f"chunk{chunk}.{weight.name}", mesh, where, options)


def _stage_layers(traits: ModelTraits, mesh: TrainerMesh) -> list[int]:
    try:
        return mesh.stage_layers(traits.num_layers)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error


def _outer_weights(
    family: ModelFamily, mesh: TrainerMesh, options: TrainerOptions, first: bool, last: bool
) -> Iterator[Weight]:
    """Embedding and output layer, with their padding, and the norm between them."""
    traits = family.traits
    multiple = options.vocab_multiple * mesh.tp
    table = (-(-traits.vocab_size // multiple) * multiple, traits.hidden_size)
    has_embedding = first or (last and traits.mtp_layers > 0)
    if has_embedding:
        yield Weight("embedding.word_embeddings.weight", table, {}, 0)
    if last:
        yield Weight(family.final_norm, (traits.hidden_size,), {})
        if not (has_embedding and traits.tied_embeddings):  # if tied, the first and the last stage each keep one table
            yield Weight("output_layer.weight", table, {}, 0)


def _mtp_weights(
    family: ModelFamily, mesh: TrainerMesh, where: TrainerRank, options: TrainerOptions
) -> Iterator[tuple[Weight, str]]:
    """Multi-token prediction layers. Megatron keeps them on the last stage, together with the embedding."""
    for number in range(family.traits.mtp_layers):
        prefix = f"mtp.layers.{number}."
        for weight in family.outer():
            if weight.name.startswith(prefix):
                yield weight, weight.name
        prefix += "mtp_model_layer."
        for inner, layer in _mtp_inner_layers(family.traits, number):
            for weight, name in _layer_weights(family, mesh, where, options, layer):
                yield replace(weight, name=prefix + inner + weight.name), prefix + inner + name


def _mtp_inner_layers(traits: ModelTraits, number: int) -> Iterator[tuple[str, int]]:
    """Prefix and number of each layer that a multi-token prediction layer consists of: several in a hybrid."""
    if not traits.layer_kinds:
        yield "", traits.num_layers + number
        return
    width = len(traits.mtp_layer_kinds)
    for index in range(width):
        yield f"layers.{index}.", traits.num_layers + number * width + index


def _layer_weights(
    family: ModelFamily, mesh: TrainerMesh, where: TrainerRank, options: TrainerOptions, layer: int
) -> Iterator[tuple[Weight, str]]:
    """Weights of a layer, each with its name with global expert numbers."""
    for weight in family.weights(layer, options.transformer_engine):
        yield weight, weight.name
    if not family.traits.has_experts(layer):
        return
    local = family.traits.num_experts // mesh.ep
    for index in range(local):
        number = where.ep * local + index
        for weight in family.expert_weights.values():
            grouped, sequential = f"mlp.experts.{weight.name}{{}}", f"mlp.experts.local_experts.{{}}.{weight.name}"
            pattern = grouped if options.transformer_engine else sequential
            yield replace(weight, name=pattern.format(index)), pattern.format(number)


def _shard(
    weight: Weight, name: str, storage: str, mesh: TrainerMesh, where: TrainerRank, options: TrainerOptions
) -> ParamShard:
    """Cuts a weight by tensor parallelism, then its rows over the shard group."""
    tp_rank, tp_size = (where.expert_tp, mesh.expert_tp) if weight.expert else (where.tp, mesh.tp)
    etp_rank, etp_size = (where.expert_etp, mesh.expert_etp) if weight.expert else (where.etp, mesh.etp)
    shape = tuple(size // tp_size if dim == weight.dim else size for dim, size in enumerate(weight.shape))
    rows, held = (0, shape[0]), shape
    if weight.sharded and etp_size > 1:
        layout = ShardLayout(shape, etp_size, options.pad_for_alignment)
        rows, held = layout.logical_range(etp_rank), layout.shard_shape
    return ParamShard(
        name=name,
        storage=storage,
        shape=shape,
        rows=rows,
        held_shape=held,
        dtype=weight.dtype or options.dtype,
        tp_rank=tp_rank,
        tp_size=tp_size,
        partition_dim=weight.dim,
    )


def _check_divides(family: ModelFamily, mesh: TrainerMesh, options: TrainerOptions) -> None:
    """Checks that axes divide what they cut, as Megatron does when it builds the model."""
    traits = family.traits
    if traits.num_kv_heads % mesh.tp and mesh.tp % traits.num_kv_heads:
        raise UnsupportedModelError(
            f"tp is {mesh.tp} and the model has {traits.num_kv_heads} KV heads; one must be a multiple of the other"
        )
    cuts: list[tuple[str, int, str, int]] = [("attention heads", traits.num_heads, "tp", mesh.tp)]
    if mesh.first or mesh.last:
        cuts.extend(("layers of a stage", count, "vpp", mesh.vpp) for count in _stage_layers(traits, mesh))
    else:
        cuts.append(("num_layers", traits.num_layers, "pp x vpp", mesh.pp * mesh.vpp))
    cuts.extend((what, size, "tp", mesh.tp) for what, size in family.tp_dims(options.transformer_engine))
    if traits.mtp_layers:
        cuts.append(("hidden size, for layers that predict further tokens,", traits.hidden_size, "tp", mesh.tp))
    if traits.num_experts:
        cuts.append(("experts", traits.num_experts, "ep", mesh.ep))
        cuts.append(("width of an expert", traits.moe_ffn_hidden_size, "expert_tp", mesh.expert_tp))
        cuts.append(("width of shared experts", traits.shared_ffn_hidden_size, "tp", mesh.tp))
    elif mesh.ep * mesh.expert_tp * mesh.expert_etp > 1:
        raise UnsupportedModelError(
            f"ep is {mesh.ep}, expert_tp {mesh.expert_tp} and expert_etp {mesh.expert_etp}, but the model has no "
            "experts; leave them at 1"
        )
    if traits.has_dense_feed_forward():
        cuts.append(("width of the feed-forward", traits.ffn_hidden_size, "tp", mesh.tp))
    for what, size, axis, parts in cuts:
        if size % parts:
            raise UnsupportedModelError(f"{axis} of {parts} does not divide {what} ({size})")
