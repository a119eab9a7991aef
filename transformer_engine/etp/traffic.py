"""Counts what one runtime's collectives move: how often, and how many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etp.group import WeightGroup


class TrafficCounters:
    """How often each group was gathered and reduced, and the bytes that this rank received and sent for it."""

    def __init__(self) -> None:
        self.gathers: dict[str, int] = {}
        self.gather_bytes: dict[str, int] = {}
        self.reductions: dict[str, int] = {}
        self.reduce_bytes: dict[str, int] = {}

    def gathered(self, group: WeightGroup) -> None:
        """Count one gather: (N - 1) / N of the gathered bytes come from peers."""
        self._add(self.gathers, self.gather_bytes, group, group.nbytes)

    def reduced(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> None:
        """Count one reduction: (N - 1) / N of the gradient's bytes go to peers."""
        self._add(self.reductions, self.reduce_bytes, group, sum(w.numel() * w.dtype.itemsize for w in wgrads))

    def reset(self) -> None:
        """Start from zero."""
        for counts in (self.gathers, self.gather_bytes, self.reductions, self.reduce_bytes):
            counts.clear()

    @staticmethod
    def _add(counts: dict[str, int], nbytes: dict[str, int], group: WeightGroup, total: int) -> None:
        counts[group.name] = counts.get(group.name, 0) + 1
        nbytes[group.name] = nbytes.get(group.name, 0) + total * (group.size - 1) // group.size
