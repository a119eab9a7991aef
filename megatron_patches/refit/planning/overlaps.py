"""What each destination needs to know of the sources: the parts of their layouts that overlap what it wants.

Each distinct region of the sources is compared once, however many sources hold it, and only with wanted regions of the
same pattern. Sources that hold the same part of what is wanted share one layout, even if they differ elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_patches.refit.planning.grids import Axes, meet
from megatron_patches.refit.planning.layouts import Corners, Holder, Kind, Layout, Region, Template


class OverlapIndex:
    """Layouts of sources, indexed by the patterns of the tensors' names.

    Args:
        holders: sources, in the order in which destinations receive them.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._templates: list[Template] = []
        self._kinds: list[tuple[Kind, ...]] = []
        self._regions: dict[str, dict[Axes, dict[Corners, int]]] = {}
        self._met: dict[Region, frozenset[int]] = {}
        # For each holder: the number of its kinds, and the numbers of each template's region and of the template.
        self._held: list[tuple[int, list[tuple[int, int]]]] = []
        regions: dict[Region, int] = {}
        templates: dict[Template, int] = {}
        kinds: dict[tuple[Kind, ...], int] = {}
        for holder in holders:
            mine = []
            for template in holder.layout.templates:
                number = regions.setdefault(template.region, len(regions))
                mine.append((number, templates.setdefault(template, len(templates))))
            self._held.append((kinds.setdefault(holder.layout.kinds, len(kinds)), mine))
        self._templates, self._kinds = list(templates), list(kinds)
        for region, number in regions.items():
            corners = self._regions.setdefault(region.tensor, {}).setdefault(region.axes, {})
            corners[region.start, region.stop] = number

    def overlapping(self, wanted: Iterable[Region]) -> tuple[list[Layout], list[tuple[int, str, int]]]:
        """The sources that overlap what a destination wants.

        Args:
            wanted: regions that it wants.

        Returns:
            Distinct layouts, without templates that do not overlap; rank and host of each overlapping source, and the
            index of its layout.
        """
        met = frozenset[int]().union(*map(self._meeting, wanted))
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        layouts: list[Layout] = []
        holders: list[tuple[int, str, int]] = []
        for holder, (kinds, held) in zip(self._holders, self._held, strict=True):
            part = tuple([template for region, template in held if region in met])
            if not part:
                continue
            if (kinds, part) not in numbers:
                numbers[kinds, part] = len(layouts)
                layouts.append(Layout(tuple(self._templates[number] for number in part), self._kinds[kinds]))
            holders.append((holder.rank, holder.host, numbers[kinds, part]))
        return layouts, holders

    def _meeting(self, wanted: Region) -> frozenset[int]:
        """Numbers of the held regions that overlap a wanted one. Cached, as many destinations want the same."""
        if wanted not in self._met:
            self._met[wanted] = frozenset(
                number
                for axes, corners in self._regions.get(wanted.tensor, {}).items()
                if meet(wanted.axes, axes)
                for (start, stop), number in corners.items()
                if all(map(_overlap, wanted.start, wanted.stop, start, stop))
            )
        return self._met[wanted]


def _overlap(start: int, stop: int, other: int, end: int) -> bool:
    return max(start, other) < min(stop, end)
