"""Random ways to spread a random model over sources and destinations, for tests of refit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.grids import fold, split_name
from megatron_patches.refit.planning.layouts import Region, Views
from megatron_patches.refit.planning.plan import PlanOptions
from megatron_patches.refit.planning.transfers import Moves, Transfer

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


def random_templates(seed: int) -> Case:
    """Experts of several layers, spread regularly, so that each rank has few templates, but for one odd tensor or two.

    An odd tensor has another shape, or lies elsewhere in memory than its place in the grid says.
    """
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    rows, columns = 2 * int(rng.integers(1, 4)), 2 * int(rng.integers(1, 4))
    names = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    tall, astray = ({names[int(at)] for at in rng.integers(0, len(names), int(rng.integers(0, 2)))} for _ in range(2))
    tensors = {
        key: TensorSpec(f"layers.{key[0]}.experts.{key[1]}.w", (rows + 2 * (key in tall), columns), "float32")
        for key in names
    }

    def rank(number: int, held: list[tuple[int, int]], dim: int, part: int, fused: bool) -> Manifest:
        used: dict[str, int] = defaultdict(int)
        placements = []
        for layer, expert in held:
            whole = tensors[layer, expert].box
            box = whole.split(2, dim)[part] if part < 2 else whole
            name = f"layer{layer}" if fused else f"layer{layer}.local{expert}.w"
            used[name] += int(rng.integers(1, 9)) if (layer, expert) in astray else 0
            strides = (box.shape[1], 1)
            placements.append(Placement(box, View(name, used[name], box.shape, strides)))
            used[name] += box.volume
        storages = tuple(Storage(name, "float32", size + 3, size) for name, size in used.items())
        return Manifest(number, f"host{number // 2}", storages, tuple(placements))

    stages, groups = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    cut, fused = int(rng.integers(0, 2)), [bool(one) for one in rng.integers(0, 2, 2)]
    shares = [
        [(layer, expert) for layer, expert in names if layer % stages == stage and expert % groups == group]
        for stage in range(stages)
        for group in range(groups)
    ]
    senders = [(share, part) for share in shares for part in (0, 1) for _ in range(int(rng.integers(1, 3)))]
    sources = [rank(number, share, cut, part, fused[0]) for number, (share, part) in enumerate(senders)]
    wanted = [
        rank(number, names, int(rng.integers(0, 2)), number, fused[1]) for number in range(int(rng.integers(1, 4)))
    ]
    dense = {spec.name: rng.permutation(spec.numel).reshape(spec.shape) for spec in tensors.values()}
    return Case(list(tensors.values()), sources, wanted, dense)


def folded(transfers: Iterable[Transfer]) -> tuple[Moves, ...]:
    """Transfers as few grids, right or wrong. The inverse of what a plan does when bytes are to move."""
    alike: dict[object, list[Transfer]] = defaultdict(list)
    for item in transfers:
        read, write = split_name(item.read.storage)[0], split_name(item.write.storage)[0]
        ends = item.source, item.destination, item.source_dtype, item.dtype
        tensor = split_name(item.box.tensor)[0]
        same = (*ends, tensor, item.box.start, item.box.stop, read, item.read.strides, write, item.write.strides)
        alike[same].append(item)
    return tuple(moves for same in alike.values() for moves in _folded(same))


def _folded(alike: Sequence[Transfer]) -> Iterator[Moves]:
    rest: Sequence[Transfer] = alike
    while rest:  # the names of a grid are unique, so what occurs again is in a grid of its own
        once: dict[str, Transfer] = {}
        later = []
        for item in rest:
            if item.box.tensor in once:
                later.append(item)
            else:
                once[item.box.tensor] = item
        rest = later
        first = next(iter(once.values()))
        reads, (write, _) = split_name(first.read.storage), split_name(first.write.storage)
        rows = []
        for name, item in once.items():
            inside = (*split_name(item.read.storage)[1], *split_name(item.write.storage)[1])
            rows.append((split_name(name)[1], (item.read.offset, item.write.offset, *inside)))
        for axes, (begin, end, *holes) in fold(rows):
            of_read = len(reads[1])
            yield Moves(
                first.source,
                first.destination,
                Region(split_name(first.box.tensor)[0], axes, first.box.start, first.box.stop),
                Views(reads[0], tuple(holes[:of_read]), begin, first.read.strides),
                Views(write, tuple(holes[of_read:]), end, first.write.strides),
                first.source_dtype,
                first.dtype,
            )


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
