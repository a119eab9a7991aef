"""Counts one runtime's collectives, and the bytes that they moved, by weight group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from etp.group import WeightGroup


class TrafficCounters:
    """How often each group was gathered and reduced, and the bytes that this rank received and sent for it.

    All counts are keyed by the group's name; those of groups with the same name are added.

    Args:
        groups: the runtime's own list of groups, shared so that later additions are seen.
    """

    def __init__(self, groups: Sequence[WeightGroup]) -> None:
        self._groups = groups

    @property
    def gathers(self) -> dict[str, int]:
        """Number of gathers."""
        return self._totals(lambda group: group.gathers, lambda group: group.gathers)

    @property
    def gather_bytes(self) -> dict[str, int]:
        """Bytes received: (N - 1) / N of what was gathered comes from peers."""
        return self._totals(lambda group: group.gathers, lambda group: _from_peers(group, group.gathered_bytes))

    @property
    def reductions(self) -> dict[str, int]:
        """Number of reductions."""
        return self._totals(lambda group: group.reductions, lambda group: group.reductions)

    @property
    def reduce_bytes(self) -> dict[str, int]:
        """Bytes sent: (N - 1) / N of each gradient goes to peers.

        In the gradient's dtype, even if ``hierarchical`` sends sums in fp32 between hosts.
        """
        return self._totals(lambda group: group.reductions, lambda group: _from_peers(group, group.reduced_bytes))

    def reset(self) -> None:
        """Start from zero."""
        for group in self._groups:
            group.reset_counts()

    def _totals(self, times: Callable[[WeightGroup], int], total: Callable[[WeightGroup], int]) -> dict[str, int]:
        """``total`` by name, for the groups whose ``times`` is not 0."""
        totals: Counter[str] = Counter()
        for group in self._groups:
            if times(group):
                totals[group.name] += total(group)
        return dict(totals)


def _from_peers(group: WeightGroup, nbytes: int) -> int:
    return nbytes * (group.size - 1) // group.size
