"""Builds a destination's manifest from copies recorded while the engine's own loader ran. Integers only.

A recorded copy says that certain elements of a Hugging Face tensor went to certain places of a parameter; each side is
given by offset, shape and strides. If the loader only narrowed, split, transposed or flattened the tensor, the source
side is a box of the tensor, and the copy becomes a :class:`Placement`. Operations that the loader applied to each
element become the rule of the storage in which the elements arrive. This storage is laid out like the parameter, in
the trainer's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_patches.refit.errors import UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View, contiguous_runs, row_major_strides
from megatron_patches.refit.layout.conversion import ElementOp, Rule
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements of one flat memory, as torch describes them.

    Attributes:
        offset: index of the first element.
        shape: extents.
        strides: distance in elements from one index to the next, by dimension; 0 for a repeated element.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """One copy of the loader.

    Attributes:
        tensor: name of the Hugging Face tensor.
        read: elements of the tensor, in its row-major memory.
        storage: name of the parameter.
        write: where the elements went; of the same shape.
        steps: operations applied to each element; empty if the parameter holds the tensor's own elements.
    """

    tensor: str
    read: Strided
    storage: str
    write: Strided
    steps: tuple[ElementOp, ...] = ()


@dataclass(frozen=True, slots=True)
class FillRecord:
    """Elements of a parameter that the loader set to one value, such as the padding of a vocabulary.

    Attributes:
        storage: name of the parameter.
        write: the elements.
        value: their value.
    """

    storage: str
    write: Strided
    value: float


@dataclass(frozen=True, slots=True)
class RecordedParameter:
    """A parameter that the loader wrote to.

    Attributes:
        name: module path and attribute.
        dtype: torch's name of the dtype.
        numel: number of elements of its memory.
    """

    name: str
    dtype: str
    numel: int


@dataclass
class Recording:
    """What a loader did.

    Attributes:
        parameters: the parameters that it wrote to.
        copies: its copies, in order.
        fills: its fills, in order.
    """

    parameters: list[RecordedParameter] = field(default_factory=list)
    copies: list[CopyRecord] = field(default_factory=list)
    fills: list[FillRecord] = field(default_factory=list)


def recorded_manifest(rank: int, host: str, recording: Recording, tensors: Mapping[str, TensorSpec]) -> Manifest:
    """What an engine worker wants, derived from what its loader did.

    Args:
        rank: destination rank.
        host: name of its machine.
        recording: what the loader did.
        tensors: the model's tensors, by name.

    Raises:
        UnsupportedModelError: if a copy does not read a box of a tensor; names both.
        UnmappedParameterError: if some element of a parameter was neither copied nor filled.
    """
    # The last of several copies to one place counts: a loader may copy again, or change what it has copied.
    # A copy of no elements counts for nothing, such as that of a rank whose part of the vocabulary is all padding.
    last = {(record.storage, record.write): record for record in recording.copies if math.prod(record.write.shape)}
    wanted: dict[Placement, None] = {}  # an ordered set, as a loader may copy the same elements again
    arrivals = _Arrivals(recording.parameters)
    by_parameter: dict[str, list[Placement]] = {}
    for record in last.values():
        spec = tensors[record.tensor]
        storage = arrivals.storage(record.storage, spec.dtype, record.steps)
        for placement in _placements(record, spec, storage):
            if placement not in wanted:
                by_parameter.setdefault(record.storage, []).append(placement)
            wanted[placement] = None
    filled: dict[str, list[FillRecord]] = {}
    for fill in recording.fills:
        filled.setdefault(fill.storage, []).append(fill)
    for parameter in recording.parameters:
        if parameter.name not in by_parameter:  # only padding
            arrivals.storage(parameter.name, parameter.dtype, ())
        _check_written(parameter, by_parameter.get(parameter.name, []), filled.get(parameter.name, []))
    return Manifest(rank, host, tuple(arrivals.storages), tuple(wanted))


class _Arrivals:
    """The storages in which a rank's elements arrive: one per parameter, or one per dtype and rule of a parameter."""

    def __init__(self, parameters: Sequence[RecordedParameter]) -> None:
        self.storages: list[Storage] = []
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._names: dict[tuple[str, str, tuple[ElementOp, ...]], str] = {}

    def storage(self, parameter: str, dtype: str, steps: tuple[ElementOp, ...]) -> str:
        """Name of the storage for elements of a parameter that arrive as ``dtype`` and are converted by ``steps``."""
        name = self._names.get((parameter, dtype, steps))
        if name is None:
            name = parameter
            if steps:
                others = sum(key[:2] == (parameter, dtype) and bool(key[2]) for key in self._names)
                name = arrival_name(parameter, dtype) + (f".{others + 1}" if others else "")
            numel = self._parameters[parameter].numel
            self._names[parameter, dtype, steps] = name
            self.storages.append(Storage(name, dtype, numel, numel, Rule(parameter, steps) if steps else None))
        return name


def arrival_name(parameter: str, dtype: str) -> str:
    """Name of the storage for elements that arrive as ``dtype`` and are then converted for ``parameter``."""
    return f"{parameter}@{dtype}"


def _check_written(parameter: RecordedParameter, placements: Sequence[Placement], fills: Sequence[FillRecord]) -> None:
    seen = np.zeros(parameter.numel, dtype=np.uint8)
    for placement in placements:
        _mark(seen, placement.view)
    for fill in fills:
        _mark(seen, View(parameter.name, fill.write.offset, fill.write.shape, fill.write.strides))
    missing = int(parameter.numel - np.count_nonzero(seen))
    if missing:
        raise UnmappedParameterError(
            f"the engine's loader left {missing} of the {parameter.numel} elements of {parameter.name} as they were, "
            f"the first at {int(np.argmin(seen))}; no tensor of the trainer's model would ever reach them"
        )


def _mark(seen: np.ndarray, view: View) -> None:
    length, starts = contiguous_runs(view)
    for start in starts.tolist():
        seen[start : start + length] = 1


def _placements(record: CopyRecord, spec: TensorSpec, storage: str) -> Iterator[Placement]:
    """The placements of one copy: one, unless elements are repeated."""
    dims = [
        (extent, read, write)
        for extent, read, write in zip(record.read.shape, record.read.strides, record.write.strides, strict=True)
        if extent > 1
    ]
    repeated = [(extent, write) for extent, read, write in dims if read == 0]
    kept = [(extent, read, write) for extent, read, write in dims if read != 0]
    box, strides = _box(record, spec, kept)
    for index in np.ndindex(*(extent for extent, _ in repeated)):
        shift = sum(position * step for position, (_, step) in zip(index, repeated, strict=True))
        yield Placement(box, View(storage, record.write.offset + shift, box.shape, strides))


def _box(record: CopyRecord, spec: TensorSpec, dims: Sequence[tuple[int, int, int]]) -> tuple[Box, tuple[int, ...]]:
    """The box that is read, and the strides with which it is written, by dimension of the tensor."""
    steps = row_major_strides(spec.shape)
    start, rest = [], record.read.offset
    for extent, step in zip(spec.shape, steps, strict=True):
        position = rest // step if extent > 1 else 0
        start.append(position)
        rest -= position * step
    extents, strides = [1] * len(spec.shape), [1] * len(spec.shape)
    open_dims = list(dims)
    while open_dims:
        extent, read, write = open_dims.pop()
        dim = next((d for d, step in enumerate(steps) if step == read and spec.shape[d] > 1 and extents[d] == 1), None)
        if dim is None:
            raise _not_a_box(record, spec)
        room = spec.shape[dim] - start[dim]
        if extent > room:
            # The loader flattened this dimension together with the one before it.
            if start[dim] or extent % spec.shape[dim]:
                raise _not_a_box(record, spec)
            open_dims.append((extent // spec.shape[dim], read * spec.shape[dim], write * spec.shape[dim]))
            extent = spec.shape[dim]
        extents[dim], strides[dim] = extent, write
    stop = tuple(low + extent for low, extent in zip(start, extents, strict=True))
    box = Box(spec.name, tuple(start), stop)
    if rest or box.volume != math.prod(extent for extent, _, _ in dims):
        raise _not_a_box(record, spec)
    return box, tuple(strides)


def _not_a_box(record: CopyRecord, spec: TensorSpec) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the engine's loader takes elements of {spec.name}, of shape {spec.shape}, that are no box of it (offset "
        f"{record.read.offset}, shape {record.read.shape}, strides {record.read.strides}) to {record.storage}"
    )
