"""A source's storages, registered with NIXL so that other parties can read them in place."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.transports.nixl_agent import MemoryRange, NixlAgent, range_of


class RegisteredStorages:
    """Keeps the memory of storages registered from version to version while it does not move.

    Memory that was freed in between and reused for other weights at the same address may be read with its old content
    if NIXL has pinned it. Digests detect this like any other corruption.

    Args:
        agent: the source's agent.

    Attributes:
        generation: number of times that registered memory was deregistered.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._registered: set[MemoryRange] = set()
        self._hidden: frozenset[str] = frozenset()
        self.generation = 0

    def hide(self, memory: Memory) -> frozenset[str]:
        """Registers storages. Those that NIXL cannot register count as hidden from now on.

        Args:
            memory: the storages by name.
        """
        self._hidden = frozenset(memory) - frozenset(self._register(memory))
        return self._hidden

    def locate(self, memory: Memory) -> dict[str, int]:
        """Address of each storage that other parties can read. Registers moved storages again.

        Args:
            memory: the storages by name.

        Raises:
            PartyFailedError: if a storage can no longer be registered.
        """
        found = self._register(memory)
        lost = sorted(frozenset(memory) - frozenset(found) - self._hidden)
        if lost:
            raise PartyFailedError(
                f"{lost[0]} (and {len(lost) - 1} more) has moved into memory that NIXL cannot register; the next push "
                "finds another way for it"
            )
        return found

    def _register(self, memory: Memory) -> dict[str, int]:
        regions = {name: range_of(storage) for name, storage in memory.items()}
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


def _merge(regions: Iterable[MemoryRange]) -> dict[MemoryRange, MemoryRange]:
    """For each region, the union of all regions that it overlaps. Adjacent regions may be separate allocations."""
    found: dict[MemoryRange, MemoryRange] = {}
    group: list[MemoryRange] = []
    begin = end = 0
    for region in sorted(set(regions)):
        if group and region.address >= end:
            found |= dict.fromkeys(group, MemoryRange(begin, end - begin))
            group = []
        if not group:
            begin = end = region.address
        group.append(region)
        end = max(end, region.address + region.nbytes)
    return found | dict.fromkeys(group, MemoryRange(begin, end - begin))
