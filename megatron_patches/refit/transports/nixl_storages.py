"""A source's storages as NIXL has registered them, so that others can read them where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.ports import Memory
from megatron_patches.refit.transports.nixl_agent import NixlAgent, Region, region_of


class RegisteredStorages:
    """Keeps registered what the storages lie in, from version to version as long as they stay where they are.

    Memory that was freed in between, and is now used for other weights at the same address, may be read as it was
    where NIXL has pinned it; digests tell, as for whatever else arrives otherwise than it was sent.

    Args:
        agent: the source's.

    Attributes:
        generation: how often something that was registered has been forgotten.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._registered: set[Region] = set()
        self._hidden: frozenset[str] = frozenset()
        self._located: tuple[Memory, Mapping[str, int]] = {}, {}
        self.generation = 0

    def hide(self, memory: Memory) -> frozenset[str]:
        """Registers storages; those that NIXL cannot register count as hidden from now on.

        Args:
            memory: the storages by name.
        """
        self._hidden = frozenset(memory) - frozenset(self._register(memory))
        return self._hidden

    def locate(self, memory: Memory) -> Mapping[str, int]:
        """Address of each storage that others can read; registered anew if it has moved.

        Args:
            memory: the storages by name.

        Raises:
            PartyFailedError: if one can no longer be registered.
        """
        if self._located[0] is not memory:
            found = self._register(memory)
            lost = sorted(frozenset(memory) - frozenset(found) - self._hidden)
            if lost:
                raise PartyFailedError(
                    f"{lost[0]} (and {len(lost) - 1} more) has moved into memory that NIXL cannot register; the next "
                    "push finds another way for it"
                )
            self._located = memory, found
        return self._located[1]

    def _register(self, memory: Memory) -> dict[str, int]:
        regions = {name: region_of(storage) for name, storage in memory.items()}
        homes = _merge(region for region in regions.values() if region.nbytes)
        wanted = set(homes.values())
        gone = self._registered - wanted
        for region in gone:
            self._agent.forget(region)
        self.generation += bool(gone)
        self._registered &= wanted
        for region in sorted(wanted - self._registered):
            try:
                self._agent.register(region)
            except PartyFailedError:
                continue  # its storages are packed instead
            self._registered.add(region)
        return {name: region.address for name, region in regions.items() if homes.get(region) in self._registered}


def _merge(regions: Iterable[Region]) -> dict[Region, Region]:
    """For each region the union of all that it overlaps with; neighbours may be of different allocations."""
    found: dict[Region, Region] = {}
    group: list[Region] = []
    begin = end = 0
    for region in sorted(set(regions)):
        if group and region.address >= end:
            found |= dict.fromkeys(group, Region(begin, end - begin))
            group = []
        if not group:
            begin = end = region.address
        group.append(region)
        end = max(end, region.address + region.nbytes)
    return found | dict.fromkeys(group, Region(begin, end - begin))
