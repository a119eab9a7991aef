"""Describes a trainer and an engine offline: the manifests of both sides, from a configuration and the mesh sizes.

If a model is too large to be moved in memory, :func:`sample_layers` chooses layers: one of every kind, and then as many
as fit.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from megatron_patches.refit.errors import RefitError, UnsupportedModelError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.models.family import ModelFamily
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions, trainer_manifest
from megatron_patches.refit.planning.plan import PartOf, Plan, PlanOptions, make_part, make_plan
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.simulation.oracle import COPIES_OF_DESTINATIONS
from megatron_patches.refit.target.vllm_layout import EngineMesh, engine_manifest, is_left_out


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """How ranks are spread over machines.

    Attributes:
        ranks_per_host: consecutive ranks of a side that share a machine.
        colocated: whether equal ranks of both sides share a machine; otherwise no machine has ranks of both sides.
    """

    ranks_per_host: int = 8
    colocated: bool = False

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host is {self.ranks_per_host}; it must be at least 1")

    def name(self, side: Literal["trainer", "engine"], rank: int) -> str:
        """The machine of a rank."""
        return f"{'' if self.colocated else side}host{rank // self.ranks_per_host}"


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The two sides of a refit.

    Attributes:
        family: the model.
        trainer: sizes of the trainer's axes.
        engine: sizes of one engine's axes.
        engines: number of such engines. Their workers are numbered one engine after another.
        options: how the trainer keeps its weights.
        hosts: how ranks are spread over machines.

    Raises:
        ValueError: if there is no engine.
    """

    family: ModelFamily
    trainer: TrainerMesh
    engine: EngineMesh
    engines: int = 1
    options: TrainerOptions = field(default_factory=TrainerOptions)
    hosts: Hosts = field(default_factory=Hosts)

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ValueError(f"there are {self.engines} engines; there must be at least one")

    @property
    def workers(self) -> int:
        """Number of workers of all engines."""
        return self.engines * self.engine.size

    def host_of(self, worker: int) -> str:
        """The machine of an engine worker."""
        return self.hosts.name("engine", worker)

    def held_by(self, rank: int) -> Manifest:
        """What a trainer rank holds.

        Raises:
            RefitError: if an axis does not divide what it cuts.
        """
        return trainer_manifest(self.family, self.trainer, rank, self.options, self.hosts.name("trainer", rank))

    def wanted_by(self, worker: int) -> Manifest:
        """What an engine worker wants.

        Raises:
            RefitError: if an axis does not divide what it cuts.
        """
        place = worker % self.engine.size
        manifest = engine_manifest(
            self.family.traits, self.engine, place, self.options.dtype, host=self.host_of(worker)
        )
        return replace(manifest, rank=worker)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Both sides, described.

    Attributes:
        tensors: all tensors of the model.
        sources: what each trainer rank holds.
        destinations: what each engine rank wants.
    """

    tensors: Sequence[TensorSpec]
    sources: Sequence[Manifest]
    destinations: Sequence[Manifest]

    def plan(self, options: PlanOptions, part: PartOf | None = None) -> Plan:
        """The whole plan, or the part of one rank.

        Raises:
            RefitError: if the two sides do not match, or the rank does not exist.
        """
        if part is None:
            return make_plan(self.tensors, self.sources, self.destinations, options)
        count = len(self.sources if part.side == "source" else self.destinations)
        if part.rank >= count:
            raise UnsupportedModelError(f"there is no {part}; that side has {count} ranks, from 0")
        return make_part(self.tensors, self.sources, self.destinations, part, options)


def describe_cluster(sides: Sides) -> Cluster:
    """Describes every rank of both sides.

    Raises:
        RefitError: if a mesh does not fit the model (names axis and size), or the engine's layout lacks a tensor.
    """
    family = sides.family
    sources = [sides.held_by(rank) for rank in range(sides.trainer.size)]
    tensors = agree_on_tensors(family.shapes(), sources)
    dtypes = {spec.name: spec.dtype for spec in tensors}
    destinations = [sides.wanted_by(worker) for worker in range(sides.workers)]
    _check_dtypes(dtypes, destinations)
    wanted = {placement.box.tensor for manifest in destinations for placement in manifest.placements}
    missing = [name for name in dtypes if name not in wanted and not is_left_out(family.traits, name)]
    if missing:
        raise UnsupportedModelError(
            f"the engine's layout has no place for {missing[0]} (and {len(missing) - 1} more tensors) of this "
            f"{family.architecture}; add it to {engine_manifest.__module__}"
        )
    return Cluster(tensors=tensors, sources=sources, destinations=destinations)


def _check_dtypes(dtypes: Mapping[str, str], destinations: Sequence[Manifest]) -> None:
    for manifest in destinations:
        for placement in manifest.placements:
            name, dtype = placement.box.tensor, manifest.storage[placement.view.storage].dtype
            if dtypes.get(name) != dtype:
                raise UnsupportedModelError(
                    f"{name} is {dtypes.get(name, 'nowhere')} in the trainer and {dtype} on engine rank {manifest.rank}"
                )


def trainer_mesh(text: str) -> TrainerMesh:
    """The mesh that ``tp=2,etp=2,pp=2`` describes; axes that are not named are 1.

    Raises:
        ValueError: if the text or the mesh is invalid.
    """
    return TrainerMesh(**_sizes(text, tuple(item.name for item in fields(TrainerMesh))))


def engine_mesh(text: str) -> EngineMesh:
    """The mesh that ``tp=4,ep=4,dp=1`` describes; axes that are not named are 1.

    With expert parallelism, each expert lies whole on one of the ``tp x dp`` ranks, so ``ep`` must be that product.
    Without it, experts are cut and ``ep`` is 1.

    Raises:
        ValueError: if the text or the mesh is invalid.
    """
    sizes = _sizes(text, ("tp", "pp", "dp", "ep"))
    experts = sizes.pop("ep", 1)
    mesh = EngineMesh(**sizes, expert_parallel=experts > 1)
    if experts not in {1, mesh.tp * mesh.dp}:
        raise ValueError(
            f"ep is {experts}; the engine spreads experts over all tp x dp = {mesh.tp * mesh.dp} ranks, or cuts each "
            "(leave ep out)"
        )
    return mesh


def _sizes(text: str, known: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        if name not in known or not value.isdecimal():
            raise ValueError(f"{item!r} is not an axis and its size; write for example tp=2,pp=2 ({', '.join(known)})")
        if name in found:
            raise ValueError(f"{name} is given twice in {text!r}")
        found[name] = int(value)
    return found


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Sample:
    """Some layers of a model.

    Attributes:
        cluster: both sides with only these layers.
        layers: number of these layers.
        of_layers: number of all layers.
        left_out: every kind of layer of which there is none, and every tensor outside layers that is not there.
    """

    cluster: Cluster
    layers: int
    of_layers: int
    left_out: tuple[str, ...]


def sample_layers(cluster: Cluster, most_bytes: int, seed: int) -> Sample:
    """Chooses one layer of every kind, the tensors outside layers, and then other layers, each if it still fits.

    Args:
        cluster: both sides.
        most_bytes: memory that :func:`megatron_patches.refit.simulation.oracle.verify_in_memory` may use.
        seed: seed of the random choice.

    Raises:
        RefitError: if not one layer fits.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for spec in cluster.tensors:
        groups[_group(spec.name)].append(spec.name)
    layers = [group for group in groups if group.isdecimal()]
    outside = [group for group in groups if not group.isdecimal()]
    kinds = _kinds(cluster, groups, layers)
    needed = _memory_by_group(cluster)
    chooser = random.Random(seed)  # noqa: S311 - repeatable, not secret
    firsts = [chooser.choice(alike) for alike in kinds]
    others = [layer for layer in layers if layer not in firsts]
    chooser.shuffle(others)
    left, chosen = most_bytes, set[str]()
    for group in (*firsts, *outside, *others):
        if needed[group] <= left:
            chosen.add(group)
            left -= needed[group]
    count = len(chosen.intersection(layers))
    if not count:
        least = min(needed[group] for group in layers or groups)
        raise RefitError(
            f"carrying out one layer of this plan in memory takes {least / 1e6:.3g} MB and --max-memory is "
            f"{most_bytes / 1e6:.3g} MB; allow more, or use the command plan"
        )
    names = {name for group in chosen for name in groups[group]}
    left_out = [
        f"layer {alike[0]}{f' and {len(alike) - 1} like it' if len(alike) > 1 else ''}"
        for alike in kinds
        if chosen.isdisjoint(alike)
    ]
    left_out += [name for name in outside if name not in chosen]
    return Sample(_only(cluster, names), count, len(layers), tuple(left_out))


def _group(name: str) -> str:
    """The layer of a tensor; the tensor's own name if it is outside all layers."""
    found = _LAYER.search(name)
    return found[0] if found else name


def _kinds(cluster: Cluster, groups: Mapping[str, Sequence[str]], layers: Sequence[str]) -> list[list[str]]:
    """The layers by kind: those of a kind have tensors of the same names and shapes."""
    shapes = {spec.name: spec.shape for spec in cluster.tensors}
    kinds: dict[frozenset[tuple[str, tuple[int, ...]]], list[str]] = defaultdict(list)
    for layer in layers:
        kinds[frozenset((_LAYER.sub("", name, count=1), shapes[name]) for name in groups[layer])].append(layer)
    return list(kinds.values())


def _memory_by_group(cluster: Cluster) -> dict[str, int]:
    """Memory as in :func:`megatron_patches.refit.simulation.oracle.memory_needed`, by group."""
    found: dict[str, int] = defaultdict(int)
    for spec in cluster.tensors:
        found[_group(spec.name)] += spec.nbytes
    for side, copies in ((cluster.sources, 1), (cluster.destinations, COPIES_OF_DESTINATIONS)):
        for manifest in side:
            groups = {placement.view.storage: _group(placement.box.tensor) for placement in manifest.placements}
            for storage, group in groups.items():
                held = manifest.storage[storage]
                found[group] += copies * held.numel * itemsize(held.dtype)
    return found


def _only(cluster: Cluster, names: set[str]) -> Cluster:
    """Both sides with only some tensors."""
    return Cluster(
        tensors=[spec for spec in cluster.tensors if spec.name in names],
        sources=[_part(manifest, names) for manifest in cluster.sources],
        destinations=[_part(manifest, names) for manifest in cluster.destinations],
    )


def _part(manifest: Manifest, names: set[str]) -> Manifest:
    held = tuple(placement for placement in manifest.placements if placement.box.tensor in names)
    used = {placement.view.storage for placement in held}
    storages = tuple(storage for storage in manifest.storages if storage.name in used)
    return Manifest(manifest.rank, manifest.host, storages, held)
