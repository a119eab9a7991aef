"""Counts the collectives of one runtime, and the bytes that they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from etp.group import WeightGroup


class TrafficCounters:
    """How often each group was gathered and reduced, and the bytes that this rank received and sent for it."""

    def __init__(self) -> None:
        self._gathers: Counter[WeightGroup] = Counter()
        self._gathered: Counter[WeightGroup] = Counter()
        self._reductions: Counter[WeightGroup] = Counter()
        self._reduced: Counter[WeightGroup] = Counter()

    def gathered(self, group: WeightGroup) -> None:
        """Count one gather."""
        self._gathers[group] += 1
        self._gathered[group] += group.nbytes

    def reduced(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> None:
        """Count one reduction."""
        self._reductions[group] += 1
        self._reduced[group] += sum(wgrad.nbytes for wgrad in wgrads)

    def forget(self, group: WeightGroup) -> None:
        """Another runtime drives ``group`` from now on, and counts what it moves."""
        for counts in self._all():
            counts.pop(group, None)

    @property
    def gathers(self) -> dict[str, int]:
        """Number of gathers by group name; groups of the same name are added up."""
        return _by_name((group, count) for group, count in self._gathers.items())

    @property
    def gather_bytes(self) -> dict[str, int]:
        """Bytes received, by the group's name: (N - 1) / N of what was gathered comes from peers."""
        return _by_name((group, _from_peers(group, nbytes)) for group, nbytes in self._gathered.items())

    @property
    def reductions(self) -> dict[str, int]:
        """Number of reductions by group name."""
        return _by_name((group, count) for group, count in self._reductions.items())

    @property
    def reduce_bytes(self) -> dict[str, int]:
        """Bytes sent, by the group's name: (N - 1) / N of each gradient goes to peers."""
        return _by_name((group, _from_peers(group, nbytes)) for group, nbytes in self._reduced.items())

    def reset(self) -> None:
        """Start from zero."""
        for counts in self._all():
            counts.clear()

    def _all(self) -> tuple[Counter[WeightGroup], ...]:
        return self._gathers, self._gathered, self._reductions, self._reduced


def _by_name(counts: Iterable[tuple[WeightGroup, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for group, count in counts:
        totals[group.name] += count
    return dict(totals)


def _from_peers(group: WeightGroup, nbytes: int) -> int:
    return nbytes * (group.size - 1) // group.size
