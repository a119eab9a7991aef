"""What a party holds or wants, in compact form: boxes of tensors whose names form a grid are one template.

Whatever is true of a template is checked once for all of its tensors.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ge, le
from typing import NamedTuple

import msgspec

from megatron_patches.refit.errors import ProofError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.manifest import Manifest, Storage
from megatron_patches.refit.planning.grids import (
    Affine,
    Axes,
    Numbers,
    corner,
    extremes,
    fits,
    fold,
    is_within,
    join_name,
    numbers_of,
    restrict,
    single,
    size_of,
    split_name,
    value_at,
    values_over,
)

Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop of a box in each dimension."""


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """A storage without its name; see :class:`megatron_patches.refit.layout.manifest.Storage`."""

    dtype: str
    numel: int
    logical_numel: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One box of each tensor of a grid.

    Attributes:
        tensor: pattern of the tensors' names.
        axes: numbers in the holes of the pattern.
        start: first index of the box in each dimension, equal in all tensors.
        stop: end of the box in each dimension, equal in all tensors.
    """

    tensor: str
    axes: Axes
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box, with the pattern as the tensor's name."""
        return Box(self.tensor, self.start, self.stop)

    @property
    def volume(self) -> int:
        """Elements of all boxes."""
        return size_of(self.axes) * self.box.volume

    @property
    def first(self) -> Box:
        """The box of the first tensor."""
        return self.box_of(tuple([begin for begin, _, _ in self.axes]))

    def box_of(self, numbers: Numbers) -> Box:
        """The box of one tensor."""
        return Box(join_name(self.tensor, numbers), self.start, self.stop)

    def of_each(self) -> Iterator[Region]:
        """The region of each tensor alone."""
        for numbers in numbers_of(self.axes):
            yield Region(self.tensor, single(numbers), self.start, self.stop)

    def contains(self, other: Region) -> bool:
        """Whether every box of ``other`` lies in a box of this region."""
        return (
            self.tensor == other.tensor
            and len(self.start) == len(other.start)
            and all(map(le, self.start, other.start))
            and all(map(ge, self.stop, other.stop))
            and is_within(other.axes, self.axes)
        )


class Views(msgspec.Struct, frozen=True, array_like=True):
    """Where a party has the boxes of a region: their views, whose shape is the box's.

    Attributes:
        storage: pattern of the storages' names.
        numbers: for each hole of that pattern, its number as a function of the place in the region's grid.
        offset: of the view, also as a function of the place.
        strides: of the view.
    """

    storage: str
    numbers: tuple[Affine, ...]
    offset: Affine
    strides: tuple[int, ...]

    def at(self, region: Region, numbers: Numbers) -> View:
        """The view of one box of the region."""
        name = join_name(self.storage, [value_at(one, region.axes, numbers) for one in self.numbers])
        return View(name, value_at(self.offset, region.axes, numbers), region.box.shape, self.strides)

    def over(self, region: Region) -> Iterator[View]:
        """The views of all boxes of the region, in the order of :func:`numbers_of`."""
        shape, (names, repeated) = region.box.shape, self.storages(region.axes)
        offsets = values_over(self.offset, region.axes)
        for name in names:
            for offset in itertools.islice(offsets, repeated):
                yield View(name, offset, shape, self.strides)

    def storages(self, axes: Axes) -> tuple[list[str], int]:
        """Names of the storages of a grid's boxes, and how many boxes in a row each has, as :func:`numbers_of` goes."""
        used = max((dim for one in self.numbers for dim, slope in enumerate(one) if slope and dim), default=0)
        columns = [values_over(one[: used + 1], axes[:used]) for one in self.numbers]
        rows = zip(*columns, strict=True) if columns else [()]
        return [join_name(self.storage, row) for row in rows], size_of(axes[used:])

    def part(self, whole: Region, part: Region) -> Views:
        """The views of a part of the region ``whole``."""
        ahead = sum(
            [(low - base) * step for low, base, step in zip(part.start, whole.start, self.strides, strict=True)]
        )
        offset = restrict(self.offset, whole.axes, part.axes)
        numbers = tuple([restrict(one, whole.axes, part.axes) for one in self.numbers])
        return Views(self.storage, numbers, (offset[0] + ahead, *offset[1:]), self.strides)

    def is_sound(self, region: Region) -> bool:
        """Whether these are views of the boxes of a region."""
        functions = all(len(one) == len(region.axes) + 1 for one in (self.offset, *self.numbers))
        return functions and fits(self.storage, len(self.numbers)) and len(self.strides) == len(region.start)


class Template(msgspec.Struct, frozen=True, array_like=True):
    """Boxes that a party holds or wants.

    Attributes:
        number: of the template in its layout.
        region: the boxes.
        views: where they lie.
        kind: number of the storages' kind in the layout.
    """

    number: int
    region: Region
    views: Views
    kind: int


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

    def home_of(self, part: Region, views: Views) -> Template | None:
        """The template that has ``part`` at ``views``, or None."""
        for template in self.by_tensor.get(part.tensor, ()):
            if template.region.contains(part) and template.views.part(template.region, part) == views:
                return template
        return None


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


@dataclass(frozen=True, slots=True)
class Receiver:
    """A destination.

    Attributes:
        manifest: what it wants.
        layout: the same in compact form.
    """

    manifest: Manifest
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
    # A box may occur more than once, but the names of a grid are unique.
    groups: dict[_Alike, dict[Numbers, list[Numbers]]] = defaultdict(lambda: defaultdict(list))
    names = {storage.name: (*split_name(storage.name), _kind_of(storage, kinds)) for storage in manifest.storages}
    for placement in manifest.placements:
        box, view = placement.box, placement.view
        pattern, numbers = split_name(box.tensor)
        storage, inside, kind = names[view.storage]
        key = _Alike(pattern, box.start, box.stop, storage, view.strides, kind)
        groups[key][numbers].append((view.offset, *inside))
    templates: list[Template] = []
    for key, group in groups.items():
        for time in range(max(map(len, group.values()))):
            rows = [(numbers, found[time]) for numbers, found in group.items() if time < len(found)]
            for axes, (offset, *functions) in fold(rows):
                region = Region(key.tensor, axes, key.start, key.stop)
                views = Views(key.storage, tuple(functions), offset, key.strides)
                templates.append(Template(len(templates), region, views, key.kind))
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


def receiver_of(manifest: Manifest) -> Receiver:
    """A destination, from its manifest."""
    return Receiver(manifest, layout_of(manifest))


def check_layout(layout: Layout, party: str) -> None:
    """Checks a party's layout: views are within their storages, and reach no padding.

    Args:
        layout: the layout.
        party: whose it is, such as ``source rank 3``.

    Raises:
        ProofError: naming party, tensor and storage.
    """
    for template in layout.templates:
        region, views = template.region, template.views
        if not (_is_region(region) and views.is_sound(region) and 0 <= template.kind < len(layout.kinds)):
            raise ProofError(f"{party} describes {region.tensor} in {views.storage} by no template")
        kind = layout.kind(template)
        low, high = View("", 0, region.box.shape, views.strides).span
        least, most = extremes(views.offset, region.axes)
        if least + low < 0 or most + high > kind.logical_numel or kind.logical_numel > kind.numel:
            numbers = corner(views.offset, region.axes, largest=least + low >= 0)
            view = views.at(region, numbers)
            raise ProofError(
                f"{party}: {region.box_of(numbers)} spans elements {view.span[0]} to {view.span[1]} of {view.storage}, "
                f"of which {kind.logical_numel} of {kind.numel} are not padding"
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
