"""Wraps a source so that it also gives scales of the KV cache; see [Note: KV scales]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.manifest import Placement, Storage

if TYPE_CHECKING:
    from megatron_patches.refit.control.messages import Held
    from megatron_patches.refit.memory.ports import FlatMemory
    from megatron_patches.refit.source.weight_source import WeightSource

_STORAGE = "kv_scales"


class KVScaleSource:
    """Another source's weights, and scales; a :class:`megatron_patches.refit.source.weight_source.WeightSource`.

    Args:
        source: the weights.

    Attributes:
        values: the scales that this rank gives, by name of the tensor; the first rank gives all. They, and their order,
            may change between two pushes, their names only before :meth:`describe`.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.values: Mapping[str, float] = {}
        self._names: list[str] = []  # of the scales as they lie in memory
        self._scales = torch.empty(0)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._source.device

    def describe(self, rank: int) -> Held:
        """Describes the other source's weights, and the scales.

        Raises:
            RefitError: as the other source.
        """
        held = self._source.describe(rank)
        self._names = names = list(self.values)
        self._scales = torch.empty(len(names), dtype=torch.float32, device=self.device)
        if not names:
            return held
        storage = Storage(_STORAGE, "float32", len(names), len(names))
        placements = (
            Placement(Box(name, (0,), (1,)), View(_STORAGE, place, (1,), (1,))) for place, name in enumerate(names)
        )
        shapes = {**held.shapes, **dict.fromkeys(names, (1,))}
        return replace(held, shapes=shapes, manifest=held.manifest.with_more([storage], placements))

    def settle(self) -> None:
        """Settles the other source, and takes over the scales that :attr:`values` has now."""
        self._source.settle()
        if self._scales.numel():
            self._scales.copy_(torch.tensor([self.values[name] for name in self._names], dtype=torch.float32))

    def look_up(self) -> FlatMemory:
        """The memory of the other source, and of the scales.

        Raises:
            RefitError: as the other source.
        """
        memory = self._source.look_up()
        if not self._scales.numel():
            return memory
        return {**memory, _STORAGE: self._scales}
