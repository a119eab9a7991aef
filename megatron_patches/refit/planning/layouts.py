"""What a party holds or wants, in compact form: boxes of tensors whose names form a grid are one template."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.errors import ProofError
from megatron_patches.refit.manifest import Manifest, Storage
from megatron_patches.refit.planning.grids import (
    Axes,
    Linear,
    Numbers,
    extremes,
    fits,
    fold,
    is_within,
    join_name,
    split_name,
    value_at,
)

Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop of a box in each dimension."""


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """A storage without its name; see :class:`megatron_patches.refit.manifest.Storage`."""

    dtype: str
    numel: int
    logical_numel: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One box of each tensor of a grid.

    Attributes:
        tensor: pattern of the tensors' names.
        axes: numbers in the holes of the pattern.
        start: of the box, in each tensor.
        stop: likewise.
    """

    tensor: str
    axes: Axes
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box, with the pattern as the tensor's name."""
        return Box(self.tensor, self.start, self.stop)


class Template(msgspec.Struct, frozen=True, array_like=True):
    """Where a party has the boxes of a region.

    Attributes:
        number: of the template in its layout.
        region: the boxes.
        storage: pattern of the storages' names.
        numbers: for each hole of that pattern, its number as a function of the place in the region's grid.
        offset: of the box's view, also as a function of the place.
        strides: of the box's view.
        kind: number of the storages' kind in the layout.
    """

    number: int
    region: Region
    storage: str
    numbers: tuple[Linear, ...]
    offset: Linear
    strides: tuple[int, ...]
    kind: int

    def view_at(self, numbers: Numbers) -> View:
        """The view of the box of one tensor."""
        axes = self.region.axes
        name = join_name(self.storage, [value_at(one, axes, numbers) for one in self.numbers])
        return View(name, value_at(self.offset, axes, numbers), self.region.box.shape, self.strides)


class Layout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All that a party holds, or a part of it."""

    templates: tuple[Template, ...]
    kinds: tuple[Kind, ...]

    @cached_property
    def by_number(self) -> Mapping[int, Template]:
        """The templates by number."""
        return {template.number: template for template in self.templates}

    @cached_property
    def by_tensor(self) -> Mapping[str, Sequence[Template]]:
        """The templates by pattern."""
        found: dict[str, list[Template]] = defaultdict(list)
        for template in self.templates:
            found[template.region.tensor].append(template)
        return found

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the layout. Equal layouts have equal digests."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()

    def kind(self, template: Template) -> Kind:
        """The kind of the storages that hold a template's boxes."""
        return self.kinds[template.kind]

    def views_of(self, box: Box) -> Iterator[tuple[View, Kind]]:
        """Every place at which the party has all of ``box``."""
        pattern, numbers = split_name(box.tensor)
        single = tuple((number, 1, 1) for number in numbers)
        for template in self.by_tensor.get(pattern, ()):
            region = template.region
            if is_within(single, region.axes):
                whole = Box(box.tensor, region.start, region.stop)
                if whole.contains(box):
                    yield template.view_at(numbers).cut(whole, box), self.kind(template)


@dataclass(frozen=True, slots=True)
class Holder:
    """A source, as destinations see it.

    Attributes:
        rank: its rank among the sources.
        host: name of its machine.
        layout: what it holds, or only the part that overlaps what the destination wants.
    """

    rank: int
    host: str
    layout: Layout


class _Alike(NamedTuple):
    """What placements of one template have in common."""

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    storage: str
    strides: tuple[int, ...]
    kind: int


def layout_of(manifest: Manifest) -> Layout:
    """A manifest in compact form. Conversion rules are left out, as only their destination needs them."""
    kinds: dict[Kind, int] = {}
    rows: dict[tuple[_Alike, int], list[tuple[Numbers, Numbers]]] = defaultdict(list)
    names = {storage.name: (*split_name(storage.name), _kind_of(storage, kinds)) for storage in manifest.storages}
    times: dict[tuple[_Alike, Numbers], int] = defaultdict(int)
    for placement in manifest.placements:
        box, view = placement.box, placement.view
        pattern, numbers = split_name(box.tensor)
        storage, inside, kind = names[view.storage]
        key = _Alike(pattern, box.start, box.stop, storage, view.strides, kind)
        repeated = times[key, numbers]  # a box may occur more than once, but the names of a grid are unique
        times[key, numbers] += 1
        rows[key, repeated].append((numbers, (view.offset, *inside)))
    templates: list[Template] = []
    for (key, _), same in rows.items():
        for axes, (offset, *functions) in fold(same):
            region = Region(key.tensor, axes, key.start, key.stop)
            templates.append(
                Template(len(templates), region, key.storage, tuple(functions), offset, key.strides, key.kind)
            )
    return Layout(tuple(templates), tuple(kinds))


def _kind_of(storage: Storage, kinds: dict[Kind, int]) -> int:
    return kinds.setdefault(Kind(storage.dtype, storage.numel, storage.logical_numel), len(kinds))


def holder_of(manifest: Manifest) -> Holder:
    """A source, from its manifest.

    Raises:
        ProofError: if one of its storages has a conversion rule: only destinations convert.
    """
    for item in manifest.conversions:
        raise ProofError(f"source rank {item.rank} has a rule for {item.storage}; only destinations convert")
    return Holder(manifest.rank, manifest.host, layout_of(manifest))


def check_layout(layout: Layout, rank: int) -> None:
    """Checks a source's layout: views are within their storages, and reach no padding.

    Raises:
        ProofError: naming rank, tensor and storage.
    """
    for template in layout.templates:
        region = template.region
        if not _is_sound(template, len(layout.kinds)):
            raise ProofError(f"source rank {rank} describes {region.tensor} in {template.storage} by no template")
        kind = layout.kind(template)
        low, high = View("", 0, region.box.shape, template.strides).span
        least, most = extremes(template.offset, region.axes)
        if least + low < 0 or most + high > kind.logical_numel or kind.logical_numel > kind.numel:
            first = tuple(begin for begin, _, _ in region.axes)
            box = Box(join_name(region.tensor, first), region.start, region.stop)
            raise ProofError(
                f"source rank {rank}: {box} spans elements {least + low} to {most + high} of "
                f"{template.view_at(first).storage}, of which {kind.logical_numel} of {kind.numel} are not padding"
            )


def check_region(region: Region) -> None:
    """Checks a region that a destination wants.

    Raises:
        ProofError: naming the tensor.
    """
    if not _is_region(region):
        raise ProofError(f"a destination wants {region.start} to {region.stop} of {region.tensor}, which is no region")


def _is_region(region: Region) -> bool:
    corners = len(region.start) == len(region.stop) and all(
        0 <= low < high for low, high in zip(region.start, region.stop, strict=False)
    )
    grid = all(step >= 1 and count >= 1 for _, step, count in region.axes)
    return corners and grid and fits(region.tensor, len(region.axes))


def _is_sound(template: Template, kinds: int) -> bool:
    region = template.region
    functions = all(len(one) == len(region.axes) + 1 for one in (template.offset, *template.numbers))
    names = fits(template.storage, len(template.numbers))
    strided = len(template.strides) == len(region.start)
    return _is_region(region) and functions and names and strided and 0 <= template.kind < kinds
