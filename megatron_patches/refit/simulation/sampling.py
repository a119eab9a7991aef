"""Chooses layers of a model that is too large to be moved in memory: as many as fit, first one of every kind."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.simulation.cluster import Cluster
from megatron_patches.refit.simulation.oracle import COPIES_OF_DESTINATIONS

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def sample_layers(cluster: Cluster, most_bytes: int, seed: int) -> tuple[Cluster, int, int]:
    """Chooses as many layers as fit, and the tensors outside layers.

    Args:
        cluster: both sides.
        most_bytes: memory that :func:`megatron_patches.refit.simulation.oracle.verify_in_memory` may use.
        seed: seed of the random choice.

    Returns:
        Both sides with only these layers; the number of these layers, and of all layers.

    Raises:
        RefitError: if not one layer fits.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for spec in cluster.tensors:
        groups[_group(spec.name)].append(spec.name)
    layers = [group for group in groups if group.isdecimal()]
    needed = _memory_by_group(cluster)
    left, chosen = most_bytes, set[str]()
    for group in _in_order(cluster, groups, layers, seed):
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
    return _only(cluster, names), count, len(layers)


def _group(name: str) -> str:
    """The layer of a tensor; the tensor's own name if it is outside all layers."""
    found = _LAYER.search(name)
    return found[0] if found else name


def _in_order(cluster: Cluster, groups: dict[str, list[str]], layers: Sequence[str], seed: int) -> list[str]:
    """One layer of each kind, what is outside of layers, and then the other layers in random order."""
    shapes = {spec.name: spec.shape for spec in cluster.tensors}
    kinds: dict[frozenset[tuple[str, tuple[int, ...]]], list[str]] = defaultdict(list)
    for layer in layers:
        kinds[frozenset((_LAYER.sub("", name, count=1), shapes[name]) for name in groups[layer])].append(layer)
    chooser = random.Random(seed)  # noqa: S311 - repeatable, not secret
    firsts = [chooser.choice(alike) for alike in kinds.values()]
    others = [layer for layer in layers if layer not in firsts]
    chooser.shuffle(others)
    return [*firsts, *(group for group in groups if group not in layers), *others]


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
