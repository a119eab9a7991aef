"""What one party holds or wants: its storages, and the placement of boxes in them.

Ranks of an export exchange manifests; parties of a live refit exchange their compact form (``planning/layouts.py``).
Manifests are small and hold no tensor. The same manifests always give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.conversion import Conversion, Rule


@dataclass(frozen=True, slots=True)
class Storage:
    """One flat piece of memory (or of a file) of a party.

    Attributes:
        name: unique within the party.
        dtype: torch's name of the dtype.
        numel: elements allocated, padding included.
        logical_numel: elements that carry values. Padding is always at the end and never read.
        rule: at a destination, how the elements are converted once all have arrived; None for no conversion.
    """

    name: str
    dtype: str
    numel: int
    logical_numel: int
    rule: Rule | None = None

    @property
    def target(self) -> str:
        """Name of the memory that receives the elements."""
        return self.name if self.rule is None else self.rule.target

    @property
    def final_dtype(self) -> str:
        """Dtype of the elements in ``target``."""
        return self.dtype if self.rule is None else self.rule.dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """A box, and where its elements lie in one of the party's storages."""

    box: Box
    view: View


@dataclass(frozen=True)
class Manifest:
    """What party ``rank`` of one side holds (sources) or wants (destinations).

    Attributes:
        rank: index of the party on its side; sources and destinations are numbered separately.
        host: name of the machine; parties on one host are paired first.
        storages: the party's storages.
        placements: the boxes in them. A box may appear more than once (a tied weight).

    Raises:
        RefitError: if two storages share a name, a placement names an unknown storage, or a view has another shape than
            its box.
    """

    rank: int
    host: str
    storages: tuple[Storage, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.storage) != len(self.storages):
            raise RefitError(f"the manifest of rank {self.rank} names one storage twice")
        for placement in self.placements:
            if placement.view.storage not in self.storage:
                raise RefitError(
                    f"the manifest of rank {self.rank} places {placement.box} in {placement.view.storage}, "
                    "which it does not list"
                )
            if placement.view.shape != placement.box.shape:
                raise RefitError(
                    f"the manifest of rank {self.rank} shows {placement.box} through a view of shape "
                    f"{placement.view.shape}"
                )

    @classmethod
    def of_whole(cls, rank: int, host: str, specs: Iterable[TensorSpec]) -> Self:
        """A party with all of some tensors, each in a storage of its own name."""
        storages, placements = [], []
        for spec in specs:
            storages.append(Storage(spec.name, spec.dtype, spec.numel, spec.numel))
            placements.append(Placement(spec.box, View(spec.name, 0, spec.shape, row_major_strides(spec.shape))))
        return cls(rank, host, tuple(storages), tuple(placements))

    def with_more(self, storages: Iterable[Storage], placements: Iterable[Placement]) -> Manifest:
        """The manifest of the same party with further storages, and boxes in them."""
        return replace(self, storages=(*self.storages, *storages), placements=(*self.placements, *placements))

    @cached_property
    def storage(self) -> Mapping[str, Storage]:
        """The storages by name."""
        return {storage.name: storage for storage in self.storages}

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        """The conversion rules of its storages."""
        return tuple(
            Conversion(self.rank, storage.name, storage.dtype, storage.rule)
            for storage in self.storages
            if storage.rule is not None
        )
