"""What destinations are told of sources: all that overlaps what they want, nothing else, and nothing twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.control.messages import Asked, Moved, Orders, Registered, Step, Wanted
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box, TensorSpec
from megatron_patches.refit.parties.choosing import Locality
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.planning.grids import Axes, join_name, meet, numbers_of
from megatron_patches.refit.planning.layouts import Holder, Layout, Region, Template, Views, holder_of, receiver_of
from megatron_patches.refit.planning.local import OverlapIndex, SourceIndex
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, plan_for
from megatron_patches.refit.planning.tensors import agree, fold_tensors, unfold_tensors
from megatron_patches.refit.planning.transfers import Request
from megatron_patches.refit.transports.base import Offer, TransportName
from tests.support.quick import examples
from tests.support.refit_cases import random_case

RANDOM = settings(deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
AXIS = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5))


def boxes(region: Region) -> list[Box]:
    return [Box(join_name(region.tensor, numbers), region.start, region.stop) for numbers in numbers_of(region.axes)]


def share_an_element(left: Region, right: Region) -> bool:
    return any(a.intersect(b) is not None for a in boxes(left) for b in boxes(right))


@settings(RANDOM, max_examples=examples(500))
@given(st.tuples(AXIS, AXIS), st.tuples(AXIS, AXIS))
def test_grids_meet_where_they_have_a_name_in_common(left: Axes, right: Axes) -> None:
    assert meet(left, right) == bool(set(numbers_of(left)) & set(numbers_of(right)))
    assert not meet(left, right[:1])


@settings(RANDOM, max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_a_destination_is_told_exactly_what_overlaps_and_plans_the_same(seed: int) -> None:
    case = random_case(seed)
    holders = [holder_of(manifest) for manifest in case.sources]
    index = OverlapIndex(holders)
    for wanted in case.destinations:
        receiver = receiver_of(wanted)
        regions = [template.region for template in receiver.layout.templates]
        layouts, told = index.overlapping(regions)
        assert len(set(layouts)) == len(layouts)
        assert {number for _, _, number in told} == set(range(len(layouts)))
        parts = {rank: layouts[number].templates for rank, _, number in told}
        for holder in holders:
            near: list[Template] = [
                template
                for template in holder.layout.templates
                if any(share_an_element(template.region, region) for region in regions)
            ]
            assert list(parts.get(holder.rank, ())) == near
        heard = [Holder(rank, host, layouts[number]) for rank, host, number in told]
        grids = fold_tensors(case.tensors)
        assert plan_for(grids, SourceIndex(heard), receiver, DEFAULT_OPTIONS) == plan_for(
            grids, SourceIndex(holders), receiver, DEFAULT_OPTIONS
        )


def test_sources_that_differ_only_in_what_is_not_wanted_are_one_layout() -> None:
    def holder(rank: int, expert: int) -> Holder:
        dense = Region("layers.{}.w", ((0, 1, 4),), (0, 0), (4, 6))
        own = Region("layers.{}.experts.{}.w", ((0, 1, 4), (expert, 1, 1)), (0, 0), (4, 6))
        templates = tuple(
            Template(n, region, Views(f"s{n}", (), (0,) * 3, (6, 1)), 0) for n, region in enumerate((dense, own))
        )
        return Holder(rank, f"host{rank}", Layout(templates, ()))

    index = OverlapIndex([holder(rank, rank) for rank in range(8)])
    layouts, told = index.overlapping(
        [
            Region("layers.{}.w", ((0, 1, 4),), (2, 0), (4, 6)),
            Region("layers.{}.experts.{}.w", ((0, 1, 4), (5, 1, 1)), (0, 0), (4, 6)),
        ]
    )
    assert [len(layout.templates) for layout in layouts] == [1, 2]
    assert told == [(rank, f"host{rank}", int(rank == 5)) for rank in range(8)]


def registry() -> Registry:
    found = Registry(1)
    case = random_case(3)
    (held, *_) = case.sources
    layout = holder_of(held).layout
    names = {placement.box.tensor for placement in held.placements}
    tensors = fold_tensors([spec for spec in case.tensors if spec.name in names])
    mine = Registered(0, "host", {}, tensors, layout, allow_narrowing=False)
    found.answer(Step.DESCRIBING, [msgspec.msgpack.encode(mine), msgspec.msgpack.encode(None)])
    return found


@pytest.mark.parametrize(
    "region",
    [
        Region("w{}", ((0, 0, 3),), (0,), (1,)),
        Region("w{}", ((0, 1, 0),), (0,), (1,)),
        Region("w{}", ((0, 1, 1), (0, 1, 1)), (0,), (1,)),
        Region("w", (), (0,), (1, 2)),
        Region("w", (), (3,), (3,)),
    ],
)
def test_what_is_no_region_is_refused_by_name(region: Region) -> None:
    with pytest.raises(RefitError, match=r"a destination wants .* of w.*, which is no region"):
        registry().answer(Step.RECORDING, [msgspec.msgpack.encode(Wanted((region,)))])


def test_requests_reach_their_source_as_they_were_sent() -> None:
    request = Request(0, ((0, 1, 2),), (0,), (4,), Views("s", (), (0, 4), (1,)), "bfloat16")
    parts = [Asked[list[Request]]({}, ""), Asked({0: [request]}, "ab")]
    (first, last) = registry().answer(Step.PLANNING, [msgspec.msgpack.encode(part) for part in parts]) or []
    orders = msgspec.msgpack.decode(first, type=Orders[list[Request]])
    assert orders.requests == [(0, [request])]
    assert msgspec.msgpack.decode(last, type=Orders[list[Request]]).requests == []


def test_a_source_that_sends_nothing_does_not_count_for_the_transport() -> None:
    gpu, host = Locality("a", "13", nixl=False), Locality("b", "", nixl=False)
    localities = [msgspec.msgpack.encode(locality) for locality in (host, gpu, gpu)]  # two sources and a destination
    parts = [Asked[list[Request]]({}, ""), Asked({}, ""), Asked({1: []}, "")]
    found = Registry(2)
    assert found.answer(Step.CHOOSING, localities) == [msgspec.msgpack.encode(TransportName.TCP)] * 3
    found.answer(Step.PLANNING, [msgspec.msgpack.encode(part) for part in parts])
    assert found.answer(Step.CHOOSING, localities) == [msgspec.msgpack.encode(TransportName.CUDA_IPC)] * 3


def test_tensors_that_nobody_holds_are_left_out_where_the_first_source_says_so() -> None:
    case = random_case(3)
    holders = [holder_of(manifest) for manifest in case.sources]
    specs = [TensorSpec("nobody.has.1", (3,), ""), *(replace(spec, dtype="") for spec in case.tensors)]
    with pytest.raises(RefitError, match=r"no rank holds nobody\.has\.1"):
        agree(fold_tensors(specs), holders)
    found = agree(fold_tensors(specs), holders, partial=True)
    assert set(unfold_tensors(found)) == set(case.tensors)


def test_requests_to_a_source_that_is_not_there_are_refused() -> None:
    parts = [Asked[list[Request]]({}, ""), Asked[list[Request]]({1: []}, "")]
    with pytest.raises(RefitError, match="destination rank 0 asks source rank 1, which is not there"):
        registry().answer(Step.PLANNING, [msgspec.msgpack.encode(part) for part in parts])


def answers(found: Registry, what: str, parts: list[Any], kind: Any) -> list[Any]:
    """What the registry tells each party."""
    told = found.answer(what, [msgspec.msgpack.encode(part) for part in parts]) or []
    return [msgspec.msgpack.decode(one, type=kind) for one in told]


@pytest.mark.parametrize("to_all", [False, True])
def test_a_party_learns_of_those_with_which_it_links(to_all: bool) -> None:
    """Two sources, three destinations: the first draws from both, the second from one, the last from none."""
    found = Registry(2)
    nothing: Asked[list[Request]] = Asked({}, "")
    answers(found, Step.PLANNING, [nothing, nothing, Asked({0: [], 1: []}, ""), Asked({1: []}, ""), nothing], Any)
    offers = [
        Offer(address=f"at {party}", slot_bytes=8, memory="cpu", reach=0, to_all=to_all and party == 4)
        for party in range(5)
    ]
    told = answers(found, Step.LISTENING, offers, dict[int, Offer])
    for_all = {4} if to_all else set()
    assert [set(one) for one in told] == [{2} | for_all, {2, 3} | for_all, {0, 1} | for_all, {1} | for_all, for_all]
    assert all(offer == offers[peer] for one in told for peer, offer in one.items())


def test_parties_hear_what_was_chosen_and_how_all_moved_a_version() -> None:
    found = Registry(1)
    here, there = Locality("a", "12", nixl=True), Locality("b", "", nixl=True)
    assert answers(found, Step.CHOOSING, [here, here, there], TransportName) == [TransportName.NIXL] * 3
    moved = [
        Moved({"look_up": 1.0}, 3, bytes_by_source=(70,)),
        Moved({"move": 2.0}, 5),
        Moved({"move": 4.0, "verify": 1.0}, 4),
    ]
    told = answers(found, f"{Step.SENDING} 7", moved, Moved)
    assert told == [Moved({"look_up": 1.0, "move": 4.0, "verify": 1.0}, 5, bytes_by_source=(70,))] * 3
    assert (
        answers(found, Step.CHECKING, [None] * 3, None) == answers(found, Step.LINKING, [None] * 3, None) == [None] * 3
    )
