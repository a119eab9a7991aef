"""Random ways to spread a random model over sources and destinations, for tests of refit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_patches.refit.boxes import Box, TensorSpec, View
from megatron_patches.refit.manifest import Manifest, Placement, Storage
from megatron_patches.refit.plan import PlanOptions

PADDING = -1


@dataclass
class Case:
    """A model spread over sources one way, wanted by destinations another way."""

    tensors: list[TensorSpec]
    sources: list[Manifest]
    destinations: list[Manifest]
    dense: dict[str, np.ndarray]

    @property
    def sides(self) -> tuple[list[TensorSpec], list[Manifest], list[Manifest]]:
        return self.tensors, self.sources, self.destinations


def grid(rng: np.random.Generator, spec: TensorSpec) -> list[Box]:
    """Cuts a tensor at random places in every dimension: uneven, as TP x ETP x anything would."""
    ranges = []
    for extent in spec.shape:
        count = int(rng.integers(0, min(3, extent)))
        cuts = sorted(
            {0, extent, *rng.choice(np.arange(1, extent), count, replace=False).tolist()} if count else {0, extent}
        )
        ranges.append(list(itertools.pairwise(cuts)))
    return [
        Box(spec.name, tuple(low for low, _ in cell), tuple(high for _, high in cell))
        for cell in itertools.product(*ranges)
    ]


class Memory:
    """Places boxes in storages of a rank: strided, transposed, with gaps, padding at the tail."""

    def __init__(self, rng: np.random.Generator, rank: int) -> None:
        self.rng, self.rank = rng, rank
        self.placements: list[Placement] = []
        self.used: dict[str, int] = defaultdict(int)

    def place(self, box: Box) -> None:
        storage = f"s{int(self.rng.integers(0, 2))}"
        dims = len(box.shape)
        room = [extent + int(self.rng.integers(0, 2)) for extent in box.shape]
        strides, step = [0] * dims, 1
        for dim in self.rng.permutation(dims).tolist():
            strides[dim] = step
            step *= room[dim]
        self.placements.append(Placement(box, View(storage, self.used[storage], box.shape, tuple(strides))))
        self.used[storage] += step

    def manifest(self) -> Manifest:
        storages = tuple(
            Storage(name, "float32", size + int(self.rng.integers(0, 5)), size) for name, size in self.used.items()
        )
        return Manifest(self.rank, f"host{self.rank // 2}", storages, tuple(self.placements))


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    tensors = [
        TensorSpec(f"t{index}", tuple(rng.integers(1, 8, int(rng.integers(1, 4))).tolist()), "float32")
        for index in range(int(rng.integers(1, 4)))
    ]
    senders = [Memory(rng, rank) for rank in range(int(rng.integers(1, 6)))]
    receivers = [Memory(rng, rank) for rank in range(int(rng.integers(1, 5)))]
    for spec in tensors:
        for cut in range(int(rng.integers(1, 3))):  # a second cut overlaps the first; it need not be complete
            for box in grid(rng, spec):
                if cut == 0 or rng.random() < 0.5:
                    copies = int(rng.integers(1, len(senders) + 1))
                    for index in rng.choice(len(senders), copies, replace=False).tolist():
                        senders[index].place(box)
        for receiver in receivers:
            for box in grid(rng, spec):
                if rng.random() < 0.7:
                    receiver.place(box)
    dense = {spec.name: rng.permutation(spec.numel).reshape(spec.shape) for spec in tensors}
    return Case(tensors, [m.manifest() for m in senders], [m.manifest() for m in receivers], dense)


def random_options(seed: int) -> PlanOptions:
    rng = np.random.default_rng(seed)
    return PlanOptions(split_bytes=int(rng.integers(1, 200)))


def elements(view: View) -> np.ndarray:
    index = np.full(view.shape, view.offset, dtype=np.int64)
    for dim, step in enumerate(view.strides):
        index += (np.arange(view.shape[dim]) * step).reshape([-1 if d == dim else 1 for d in range(len(view.shape))])
    return index


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))


def memory_of(manifest: Manifest, fill: Callable[[Box], np.ndarray] | None) -> dict[str, np.ndarray]:
    arrays = {storage.name: np.full(storage.numel, PADDING, dtype=np.int64) for storage in manifest.storages}
    if fill is not None:
        for placement in manifest.placements:
            arrays[placement.view.storage][elements(placement.view)] = fill(placement.box)
    return arrays
