"""NIXL: weights are read where they lie, whatever moves between versions, and nothing polls between pushes."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import NamedTuple

import numpy as np
import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Reach, Terms, cut_into_loads
from megatron_patches.refit.memory.ports import Bits
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.transports.nixl import NixlTransport, RegisteredStorages
from megatron_patches.refit.transports.nixl_agent import MemoryRange, NixlAgent, range_of
from tests.unit.refit.link_ends import SLOT, Ends
from tests.unit.refit.test_parties import coverable, memory, values
from tests.unit.refit.transport_cases import NEEDS

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in NEEDS[TransportName.NIXL]), reason="NIXL is not installed"
)


@needs_nixl
@pytest.mark.parametrize("seed", range(6))
def test_versions_arrive_and_nothing_polls_meanwhile(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some storages NIXL refuses; some move from version to version, and the places that they leave are used again."""
    case = coverable(seed)
    plan = make_plan(*case.sides)
    register, refused = NixlAgent.register, set[MemoryRange]()

    def choosy(agent: NixlAgent, region: MemoryRange) -> None:
        if region in refused:
            raise PartyFailedError("refused")
        register(agent, region)

    monkeypatch.setattr(NixlAgent, "register", choosy)
    held = [memory(manifest, values(case, 1)) for manifest in case.sources]
    arenas = [np.zeros(4 * sum(bits.size for bits in part.values()) + 4, dtype=np.uint32) for part in held]
    refused.update(range_of(bits) for part in held for index, bits in enumerate(part.values()) if index % 3 == seed % 4)

    def settled(rank: int, version: int) -> dict[str, Bits]:
        """The first version lies as it was made; of every later one, what was not refused lies elsewhere, or before."""
        now, start = memory(case.sources[rank], values(case, version)), version % 2
        found: dict[str, Bits] = {}
        for name, first in held[rank].items():
            elsewhere = arenas[rank][start : start + first.size]
            start += first.size
            found[name] = first if range_of(first) in refused or version in (1, 4) else elsewhere
            found[name][...] = now[name]
        return found

    ends = Ends(plan, held, len(case.destinations), "cpu", NixlTransport)
    assert [offer.reach for offer in ends.offers] == [Reach.CONTIGUOUS] * len(ends.ends)
    hidden = [frozenset(offer.hidden) for offer in ends.offers]
    assert any(hidden) == bool(refused)
    assert set(ends.connect()) == {None}
    terms = {link: Terms(SLOT, Reach.CONTIGUOUS, hidden[link[0]], direct_bytes=8) for link in plan.by_link}
    ends.move(case, terms, (1, 2, 3, 4, 5), settled)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1
    ends.close()


def test_some_of_the_cases_go_directly_and_some_do_not() -> None:
    found = set()
    for seed in range(6):
        plan = make_plan(*coverable(seed).sides)
        terms = dict.fromkeys(plan.by_link, Terms(SLOT, Reach.CONTIGUOUS, direct_bytes=8))
        found |= {load.direct for loads in cut_into_loads(plan.transfers, terms).values() for load in loads}
    assert found == {True, False}


class Registrar:
    """What storages need of an agent."""

    def __init__(self) -> None:
        self.registered: list[MemoryRange] = []
        self.refused: set[MemoryRange] = set()

    def register(self, region: MemoryRange) -> None:
        if region in self.refused:
            raise PartyFailedError("refused")
        assert all(
            region.address + region.nbytes <= other.address or other.address + other.nbytes <= region.address
            for other in self.registered
        )
        self.registered.append(region)

    def forget(self, region: MemoryRange) -> None:
        self.registered.remove(region)


class Storages(NamedTuple):
    registrar: Registrar
    registered: RegisteredStorages


@pytest.fixture
def storages() -> Storages:
    registrar = Registrar()
    return Storages(registrar, RegisteredStorages(registrar))  # type: ignore[arg-type]


def test_storages_that_overlap_are_registered_once(storages: Storages) -> None:
    whole = np.zeros(40, dtype=np.uint16)
    held: dict[str, Bits] = {"a": whole[:10], "b": whole[5:20], "c": whole[20:30], "d": whole[22:24], "none": whole[:0]}
    assert storages.registered.hide(held) == {"none"}
    start = range_of(whole).address
    # The third only touches the second, and may be another allocation.
    assert storages.registrar.registered == [MemoryRange(start, 40), MemoryRange(start + 40, 20)]
    found = storages.registered.locate(held)
    assert found == {"a": start, "b": start + 10, "c": start + 40, "d": start + 44}


def test_registrations_last_until_storages_move(storages: Storages) -> None:
    whole = np.zeros(40, dtype=np.uint16)
    held: dict[str, Bits] = {"a": whole[:10], "b": whole[10:20]}
    assert not storages.registered.hide(held)
    before = list(storages.registrar.registered)
    storages.registered.locate({"a": whole[:10], "b": whole[10:20]})
    assert storages.registrar.registered == before
    assert storages.registered.generation == 0
    found = storages.registered.locate({"a": whole[:10], "b": whole[15:25]})
    assert found["b"] == range_of(whole).address + 30
    assert storages.registrar.registered == [before[0], range_of(whole[15:25])]
    assert storages.registered.generation == 1


def test_memory_that_can_no_longer_be_registered_is_named(storages: Storages) -> None:
    first, second = np.zeros(8, dtype=np.uint16), np.zeros(8, dtype=np.uint16)
    storages.registrar.refused = {range_of(second)}
    assert storages.registered.hide({"a": first, "b": second}) == {"b"}
    assert set(storages.registered.locate({"a": first, "b": second})) == {"a"}
    with pytest.raises(PartyFailedError, match=r"a \(and 0 more\) has moved into memory that NIXL cannot register"):
        storages.registered.locate({"a": second, "b": first})


def test_a_storage_in_pieces_is_refused() -> None:
    with pytest.raises(PartyFailedError, match="not contiguous"):
        range_of(np.zeros((4, 4), dtype=np.uint16)[:, :2])


@needs_nixl
def test_what_cannot_be_registered_says_how_to_go_on() -> None:
    agent = NixlAgent(0, "cpu", "127.0.0.1")
    agent._agent.register_memory = lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))
    with pytest.raises(
        PartyFailedError, match=r"cannot register 64 bytes of DRAM \(RuntimeError: no memory\).*ulimit -l"
    ):
        agent.register(MemoryRange(4096, 64))
    agent.close()


@needs_nixl
@pytest.mark.parametrize(
    ("device", "before", "after"), [("cuda:0", None, "on"), ("cuda:0", "off", "off"), ("cpu", None, None)]
)
def test_gpus_are_read_where_there_is_no_nvlink(
    device: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.setenv(variable, before or "")  # what is set here is undone after the test
    if before is None:
        monkeypatch.delenv(variable)
    NixlAgent(0, device, "127.0.0.1", "all").close()
    assert os.environ.get(variable) == after
