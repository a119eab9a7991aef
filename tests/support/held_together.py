"""What all ranks of a trainer hold together, from a configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.models.family import ModelFamily
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions, trainer_manifest
from megatron_patches.refit.planning.tensors import agree_on_tensors


def boxes_held(family: ModelFamily, mesh: TrainerMesh, options: TrainerOptions) -> dict[str, set[Box]]:
    """Boxes by tensor, replicas once; fails unless the ranks agree on tensors that are those of the family."""
    manifests = [trainer_manifest(family, mesh, rank, options) for rank in range(mesh.size)]
    agree_on_tensors(family.shapes(), manifests)
    held: dict[str, set[Box]] = {name: set() for name in family.shapes()}
    for manifest in manifests:
        for placement in manifest.placements:
            held[placement.box.tensor].add(placement.box)
    return held


def assert_whole(held: Mapping[str, set[Box]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The boxes have as many elements as the model's tensors, each of them."""
    sizes = {name: sum(box.volume for box in boxes) for name, boxes in held.items()}
    assert sizes == {name: prod(shape) for name, shape in shapes.items()}
