"""The transport that parties take where nobody names one: the fastest that reaches all, and the same for all."""

from __future__ import annotations

import msgspec
import pytest

from megatron_patches.refit.control.messages import Asked, Step
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.loads import Reach
from megatron_patches.refit.parties.choosing import Locality, choose, locality_of
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.terms import LinkOptions, MemoryMode, terms_of
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.planning.transfers import Request
from megatron_patches.refit.trainer.session import RefitOptions
from megatron_patches.refit.transports.base import Offer, TransportName
from tests.unit.refit.test_parties import coverable, scene

HERE_GPU, HERE = Locality("a", "13", nixl=False), Locality("a", "", nixl=True)


@pytest.mark.parametrize(
    ("localities", "chosen"),
    [
        ([HERE, HERE], TransportName.SHM),
        ([HERE_GPU] * 3, TransportName.CUDA_IPC),
        ([HERE_GPU, HERE], TransportName.SHM),
        ([HERE_GPU, Locality("a", "12", nixl=False)], TransportName.SHM),
        ([HERE, Locality("b", "", nixl=True)], TransportName.NIXL),
        ([Locality("a", "13", nixl=True), Locality("b", "13", nixl=True)], TransportName.NIXL),
        ([HERE, Locality("b", "", nixl=False)], TransportName.TCP),
        ([HERE_GPU, Locality("b", "13", nixl=False)], TransportName.TCP),
    ],
)
def test_the_fastest_that_reaches_all(localities: list[Locality], chosen: TransportName) -> None:
    assert choose(localities) is chosen
    assert choose(localities[::-1]) is chosen


@pytest.mark.parametrize(
    ("sources_of", "chosen"),
    [
        ([[0], [0]], TransportName.SHM),  # the other host sends nothing
        ([[0], [0, 1]], TransportName.NIXL),
        ([[1], [1]], TransportName.NIXL),
    ],
)
def test_all_pairs_of_an_engine_take_one_transport(sources_of: list[list[int]], chosen: TransportName) -> None:
    """Of two trainer ranks, one is on the host of the engine's two workers, whose requests decide."""
    registry, encode = Registry(2), msgspec.msgpack.encode
    nothing = Asked[list[Request]]({}, "")
    asked = [Asked[list[Request]]({rank: [] for rank in ranks}, "") for ranks in sources_of]
    registry.answer(Step.PLANNING, [encode(part) for part in (nothing, nothing, *asked)])
    localities = [HERE, Locality("b", "", nixl=True), HERE, HERE]
    answers = registry.answer(Step.CHOOSING, [encode(locality) for locality in localities])
    assert {msgspec.msgpack.decode(answer, type=TransportName) for answer in answers} == {chosen}


def test_processes_of_one_machine_know_that_they_are() -> None:
    assert locality_of("cpu").host == locality_of("cpu").host != ""
    assert locality_of("cpu").cuda == ""


@pytest.mark.parametrize("named", [None, TransportName.TCP])
def test_parties_take_what_is_named_and_choose_otherwise(named: TransportName | None) -> None:
    case = coverable(3)
    with scene(case, named) as parties:
        parties.prepare()
        taken = {party.transport for party in parties.everybody}
        assert taken == {named or TransportName.SHM}
        parties.check(1, parties.move(1))


def test_what_is_not_named_is_chosen_by_default() -> None:
    assert RefitOptions().transport is None


@pytest.mark.parametrize(
    ("memory", "transport", "kind", "expected"),
    [
        (MemoryMode.BESIDE, TransportName.NIXL, "cuda", Reach.ROWS),
        (MemoryMode.IN_PLACE, TransportName.NIXL, "cuda", Reach.NONE),
        (MemoryMode.IN_PLACE, TransportName.C10D, "cuda", Reach.ROWS),
        (MemoryMode.IN_PLACE, TransportName.CUDA_IPC, "cuda", Reach.ROWS),
    ],
)
def test_memory_that_serves_is_written_directly_only_where_the_end_can_be_awaited(
    memory: MemoryMode, transport: TransportName, kind: str, expected: Reach
) -> None:
    case = coverable(3)
    plan = make_plan(case.tensors, case.sources, case.destinations)
    parties = len(case.sources) + len(case.destinations)
    offers = {party: Offer(address="", slot_bytes=64, memory=kind, reach=Reach.ROWS.value) for party in range(parties)}
    options = LinkOptions(transport=None, staging_bytes=512, sources=len(case.sources), memory=memory)
    terms = terms_of(plan, list(plan.by_link), offers, options, transport)
    assert {term.reach for term in terms.values()} == {expected}


@pytest.mark.parametrize(("to_all", "expected"), [(False, [Reach.NONE, Reach.ROWS]), (True, [Reach.NONE, Reach.NONE])])
def test_a_link_between_host_and_gpu_is_packed(to_all: bool, expected: list[Reach]) -> None:
    """And so are those of all parties if they share one group."""
    spec = TensorSpec("w", (4, 6), "float32")
    place = Placement(spec.box, View("w", 0, (4, 6), (6, 1)))
    sides = [Manifest(rank, "", (Storage("w", "float32", 24, 24),), (place,)) for rank in range(2)]
    plan = make_plan([spec], sides[:1], sides)
    offers = {
        party: Offer(address="", slot_bytes=64, memory=memory, reach=Reach.ROWS.value, to_all=to_all)
        for party, memory in enumerate(("cuda", "cpu", "cuda"))
    }
    options = LinkOptions(transport=None, staging_bytes=512, sources=1)
    terms = terms_of(plan, list(plan.by_link), offers, options, TransportName.NIXL)
    assert [terms[0, destination].reach for destination in (0, 1)] == expected
