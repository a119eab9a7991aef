"""Compact layouts, plans of single destinations, and what sources make of requests."""

from __future__ import annotations

import cProfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import PlanMismatchError, ProofError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.grids import (
    fold,
    is_within,
    join_name,
    numbers_of,
    size_of,
    split_name,
    values_over,
)
from megatron_patches.refit.planning.layouts import (
    Layout,
    check_layout,
    holder_of,
    layout_of,
    receiver_of,
)
from megatron_patches.refit.planning.local import SourceIndex, even_shares, plan_destination
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, PartOf, make_part, plan_for
from megatron_patches.refit.planning.proof import prove_with
from megatron_patches.refit.planning.tensors import TensorGrid, fold_tensors, unfold_tensors
from megatron_patches.refit.planning.transfers import MOST_COPIES, Request, check_requests, moves_of
from tests.support.quick import examples
from tests.support.refit_cases import Case, random_case, random_options, random_templates

RANDOM = settings(deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])


@given(st.text(alphabet="ab.{}_0123456789\u0663", max_size=30))  # the last one is a digit too
def test_a_name_comes_back_from_its_pattern(name: str) -> None:
    assert join_name(*split_name(name)) == name


def test_experts_are_one_pattern() -> None:
    assert split_name("model.layers.3.mlp.experts.17.up_proj.weight") == (
        "model.layers.{}.mlp.experts.{}.up_proj.weight",
        (3, 17),
    )


@settings(RANDOM, max_examples=examples(300))
@given(st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.tuples(st.integers(0, 3)), max_size=30))
def test_grids_have_every_row_once(rows: dict[tuple[int, int], tuple[int]]) -> None:
    found = [
        (numbers, (value,))
        for axes, (function,) in fold(rows.items())
        for numbers, value in zip(numbers_of(axes), values_over(function, axes), strict=True)
    ]
    assert sorted(found) == sorted(rows.items())


def test_a_product_is_one_grid() -> None:
    rows = [((layer, expert), (100 * layer + 7 * expert,)) for layer in range(3, 60) for expert in range(8, 16)]
    assert fold(rows) == [(((3, 1, 57), (8, 1, 8)), ((356, 100, 7),))]


def test_what_is_within_a_grid() -> None:
    grid = ((3, 2, 5), (0, 1, 8))  # 3, 5, 7, 9, 11
    assert is_within(((5, 4, 2), (7, 1, 1)), grid)
    assert not is_within(((5, 3, 2), (0, 1, 1)), grid)
    assert not is_within(((5, 2, 5), (0, 1, 1)), grid)
    assert not is_within(((5, 2, 2),), grid)


def placements_of(layout: Layout) -> Iterator[Placement]:
    """Every box of a layout and where it lies."""
    for template in layout.templates:
        region = template.region
        for numbers, view in zip(numbers_of(region.axes), template.views.over(region), strict=True):
            assert template.views.at(region, numbers) == view
            yield Placement(region.box_of(numbers), view)


@pytest.mark.parametrize("make_case", [random_case, random_templates])
@settings(RANDOM, max_examples=examples(500))
@given(st.integers(0, 2**32))
def test_a_layout_says_what_its_manifest_does(make_case: Callable[[int], Case], seed: int) -> None:
    case = make_case(seed)
    for manifest in [*case.sources, *case.destinations]:
        layout = layout_of(manifest)
        check_layout(layout, f"rank {manifest.rank}")
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
        assert again == layout
        assert sorted(placements_of(again), key=repr) == sorted(manifest.placements, key=repr)
    assert sorted(unfold_tensors(fold_tensors(case.tensors))) == sorted(case.tensors)


@pytest.mark.parametrize("make_case", [random_case, random_templates])
@settings(RANDOM, max_examples=examples(500))
@given(st.integers(0, 2**32))
def test_both_ends_make_the_same_of_requests(make_case: Callable[[int], Case], seed: int) -> None:
    """The source from its own layout and the message, the destination from what overlaps what it wants."""
    case, options = make_case(seed), random_options(seed)
    holders = [holder_of(manifest) for manifest in case.sources]
    for wanted in case.destinations:
        tensors = {placement.box.tensor for placement in wanted.placements}
        plan, asked = plan_for(fold_tensors(case.tensors), SourceIndex(holders), receiver_of(wanted), options)
        assert {item.box.tensor for item in plan.transfers} == tensors
        for holder in holders:
            requests = msgspec.msgpack.decode(msgspec.msgpack.encode(asked.get(holder.rank, [])), type=list[Request])
            check_requests(requests, holder.layout, holder.rank, wanted.rank)
            sent = list(moves_of(requests, holder.layout, holder.rank, wanted.rank))
            assert sent == list(plan.by_link.get((holder.rank, wanted.rank), []))


@settings(RANDOM, max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_an_even_division_is_of_all_that_is_wanted_among_all_who_may_send(seed: int) -> None:
    case, options = random_case(seed), random_options(seed)
    index = SourceIndex([holder_of(manifest) for manifest in case.sources])
    for wanted in case.destinations:
        layout = layout_of(wanted)
        shares = even_shares(wanted.host, layout, index, options.split_bytes)
        asked = plan_destination(wanted.rank, wanted.host, layout, index, options.split_bytes)
        received = sum(request.nbytes for requests in asked.values() for request in requests)
        assert sum(shares.values()) == pytest.approx(received)
        assert asked.keys() <= shares.keys()


def test_a_replica_on_the_same_machine_has_all_of_an_even_division() -> None:
    index = SourceIndex([holder_of(experts(rank, range(2), range(4), host=f"host{rank}")) for rank in range(4)])
    wanted = layout_of(experts(0, range(2), range(4)))
    nbytes = 2 * 2 * 4 * 4 * 6
    assert even_shares("elsewhere", wanted, index, 1 << 20) == dict.fromkeys(range(4), nbytes / 4)
    assert even_shares("host2", wanted, index, 1 << 20) == {2: nbytes}


def experts(rank: int, layers: range, numbers: range, host: str = "", columns: tuple[int, int] = (0, 6)) -> Manifest:
    """A rank with the experts ``numbers`` of ``layers``, each in a storage of its own."""
    storages, placements = [], []
    for layer in layers:
        for number in numbers:
            name, width = f"chunk0.layers.{layer - layers[0]}.local.{number - numbers[0]}", columns[1] - columns[0]
            storages.append(Storage(name, "bfloat16", 4 * width + 8, 4 * width))
            box = Box(f"model.layers.{layer}.experts.{number}.w", (0, columns[0]), (4, columns[1]))
            placements.append(Placement(box, View(name, 0, (4, width), (width, 1))))
    return Manifest(rank, host, tuple(storages), tuple(placements))


SPECS = [
    TensorSpec(f"model.layers.{layer}.experts.{number}.w", (4, 6), "bfloat16")
    for layer in range(12)
    for number in range(16)
]
GRIDS = fold_tensors(SPECS)


def test_a_layout_of_any_number_of_experts_is_a_few_hundred_bytes() -> None:
    few, many = (len(msgspec.msgpack.encode(layout_of(experts(0, range(2), range(count))))) for count in (4, 64))
    assert many < few + 16 < 200
    assert len(layout_of(experts(0, range(12), range(16))).templates) == 1


def test_a_destination_asks_each_source_for_a_grid() -> None:
    holders = [
        holder_of(experts(4 * stage + part, range(6 * stage, 6 * stage + 6), range(4 * part, 4 * part + 4)))
        for stage in range(2)
        for part in range(4)
    ]
    wanted = receiver_of(experts(0, range(12), range(16), columns=(2, 5)))
    plan, asked = plan_for(GRIDS, SourceIndex(holders), wanted, DEFAULT_OPTIONS)
    assert sorted(asked) == list(range(8))
    assert all(len(requests) == 1 for requests in asked.values())
    assert len(plan.transfers) == 12 * 16


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_many_destinations_load_replicas_evenly(replicas: int) -> None:
    """None knows of another."""
    sources = [experts(rank, range(12), range(16)) for rank in range(replicas)]
    sent: dict[int, int] = defaultdict(int)
    for rank in range(48):
        wanted = [experts(rank, range(12), range(3 * rank % 14, 3 * rank % 14 + 2))]
        for source, nbytes in make_part(SPECS, sources, wanted, PartOf("destination", rank)).bytes_by_source().items():
            sent[source] += nbytes
    assert max(sent.values()) <= 1.1 * sum(sent.values()) / replicas


def test_replicas_of_the_own_host_are_preferred_and_shared() -> None:
    sources = [experts(rank, range(12), range(16), host=f"host{rank // 4}") for rank in range(8)]
    wanted = [experts(0, range(12), range(16), host="host1")]
    sent = make_part(SPECS, sources, wanted, PartOf("destination", 0)).bytes_by_source()
    assert sorted(sent) == [4, 5, 6, 7]
    assert len(set(sent.values())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held": 9}, r"destination rank 3 asks source rank 1 for boxes of its template 9; it has 1"),
        ({"stop": (4, 7)}, r"for model\.layers\.\{\}\.experts\.\{\}\.w\[0:4, 0:7\] of"),
        ({"start": (0, 6)}, "what is no box"),
        ({"axes": ((0, 1, 2), (0, 1, 5))}, r"of \(\(0, 1, 2\), \(0, 1, 5\)\); it holds"),
        ({"axes": ((0, 1, 1 << 40), (0, 1, 4))}, "it holds"),
        ({"axes": ((0, 1, 2),)}, "it holds"),
        ({"axes": ((0, 0, 2), (0, 1, 4))}, "it holds"),
        ({"axes": ((0, 1, -1), (0, 1, 4))}, "it holds"),
        ({"offset": (0, 1)}, "does not say where in chunk"),
        ({"storage": "{:>999999999}{}"}, "does not say where in"),
        ({"strides": (1,)}, "does not say where in chunk"),
        ({"dtype": "float32"}, r"\[0:4, 0:6\] as float32; it holds bfloat16"),
    ],
)
def test_a_source_refuses_what_it_does_not_hold(change: dict[str, object], message: str) -> None:
    holder = holder_of(experts(1, range(2), range(4)))
    wanted = receiver_of(experts(3, range(2), range(4)))
    (request,) = plan_for(GRIDS, SourceIndex([holder]), wanted, DEFAULT_OPTIONS)[1][1]
    check_requests([request], holder.layout, 1, 3)
    of_write = change.keys() & {"offset", "storage", "strides"}
    changed = {"write": msgspec.structs.replace(request.write, **change)} if of_write else change
    with pytest.raises(PlanMismatchError, match=message):
        check_requests([msgspec.structs.replace(request, **changed)], holder.layout, 1, 3)


def test_a_source_refuses_to_send_the_same_without_end() -> None:
    holder = holder_of(experts(1, range(2), range(4)))
    (request,) = plan_for(GRIDS, SourceIndex([holder]), receiver_of(experts(3, range(2), range(4))), DEFAULT_OPTIONS)[
        1
    ][1]
    check_requests([request] * MOST_COPIES, holder.layout, 1, 3)
    with pytest.raises(PlanMismatchError, match=r"destination rank 3 asks source rank 1 .* more than 16 times"):
        check_requests([request] * (MOST_COPIES + 1), holder.layout, 1, 3)


def test_a_layout_that_describes_no_memory_is_refused() -> None:
    layout = layout_of(experts(1, range(2), range(4)))
    (template,) = layout.templates
    for changed in (
        *(
            msgspec.structs.replace(template, views=msgspec.structs.replace(template.views, **change))
            for change in ({"offset": (0, 0, 1)}, {"offset": (0,)}, {"strides": (6,)})
        ),
        msgspec.structs.replace(template, kind=3),
        msgspec.structs.replace(template, region=msgspec.structs.replace(template.region, start=(4, 0))),
    ):
        with pytest.raises(ProofError, match="source rank 1"):
            check_layout(Layout((changed,), layout.kinds), "source rank 1")


def test_the_order_of_sources_does_not_matter() -> None:
    case = random_case(11)
    holders = [holder_of(manifest) for manifest in case.sources]
    for wanted in case.destinations:
        plans = [
            plan_for(fold_tensors(case.tensors), SourceIndex(order), receiver_of(wanted), DEFAULT_OPTIONS)[0]
            for order in (holders, holders[::-1])
        ]
        assert plans[0].digest == plans[1].digest
        assert size_of(()) == 1
        assert replace(plans[0]).transfers == plans[1].transfers
        assert np.sum([item.nbytes for item in plans[0].transfers]) == plans[1].nbytes


def calls_to_plan(count: int) -> int:
    """Python calls of a destination that plans and proves ``count`` experts of 12 layers, each layer in one storage."""
    sources = [
        holder_of(experts(rank, range(12), range(rank * count // 4, (rank + 1) * count // 4))) for rank in range(4)
    ]
    places = [
        Placement(
            Box(f"model.layers.{layer}.experts.{number}.w", (0, 0), (4, 6)),
            View(f"layer{layer}", 24 * number, (4, 6), (6, 1)),
        )
        for layer in range(12)
        for number in range(count)
    ]
    storages = [Storage(f"layer{layer}", "bfloat16", 24 * count, 24 * count) for layer in range(12)]
    wanted = receiver_of(Manifest(0, "", tuple(storages), tuple(places)))
    grids = (TensorGrid("model.layers.{}.experts.{}.w", ((0, 1, 12), (0, 1, count)), (4, 6), "bfloat16"),)
    calls = cProfile.Profile()
    calls.enable()
    plan, _ = plan_for(grids, SourceIndex(sources), wanted, DEFAULT_OPTIONS)
    verdict = prove_with(plan, sources, [wanted])
    calls.disable()
    assert (verdict.boxes, len(plan.moves)) == (12 * count, 4)
    return sum(entry.callcount for entry in calls.getstats())


def test_planning_and_proof_follow_the_number_of_grids_and_not_that_of_tensors() -> None:
    """An expert more costs a few calls to look at its number, whatever the number of layers. Each has 12 tensors."""
    calls_to_plan(8)  # imports
    few, many = calls_to_plan(8), calls_to_plan(128)
    assert few < 2500
    assert many - few < 10 * (128 - 8)
