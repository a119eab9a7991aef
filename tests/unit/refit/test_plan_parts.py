"""Parts of plans: together they are the whole plan, each is proved alone, and mistakes in them are found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import ProofError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, PartOf, Plan, PlanOptions, make_part, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.planning.transfers import Transfer
from tests.support.quick import examples
from tests.support.refit_cases import folded, random_case, random_options

RANDOM_CASES = settings(deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])


@settings(RANDOM_CASES, max_examples=examples(500))
@given(st.integers(0, 2**32))
def test_parts_are_the_whole_plan(seed: int) -> None:
    case, options = random_case(seed), random_options(seed)
    whole = make_plan(*case.sides, options)
    sent: Counter[Transfer] = Counter()
    received: Counter[Transfer] = Counter()
    elements = 0
    for side, manifests, found in (("source", case.sources, sent), ("destination", case.destinations, received)):
        for manifest in manifests:
            part = make_part(*case.sides, PartOf(side, manifest.rank), options)  # type: ignore[arg-type]
            assert part.digests == {
                link: digest for link, digest in whole.digests.items() if link[side == "destination"] == manifest.rank
            }
            found.update(part.transfers)
            elements += prove(part, case.sources, case.destinations, options).elements
    assert sent == received == Counter(whole.transfers)
    assert elements == prove(whole, case.sources, case.destinations, options).elements


SPECS = [TensorSpec(name, (8, 4), "float32") for name in ("a", "b", "c", "d")]


def rank_with(rank: int, specs: list[TensorSpec]) -> Manifest:
    storages = tuple(Storage(spec.name, "float32", 32, 32) for spec in specs)
    return Manifest(
        rank, "", storages, tuple(Placement(spec.box, View(spec.name, 0, (8, 4), (4, 1))) for spec in specs)
    )


def part_for(of: PartOf, options: PlanOptions = DEFAULT_OPTIONS) -> tuple[Plan, list[Manifest], list[Manifest]]:
    """Two stages of two tensors each, two destinations that want all."""
    sources = [rank_with(0, SPECS[:2]), rank_with(1, SPECS[2:])]
    wanted = [rank_with(0, SPECS), rank_with(1, SPECS)]
    return make_part(SPECS, sources, wanted, of, options), sources, wanted


def test_a_transfer_too_few_or_of_another_rank_is_found() -> None:
    plan, sources, wanted = part_for(PartOf("destination", 1))
    with pytest.raises(ProofError, match=r"destination rank 1 never receives d\[0:8, 0:4\]"):
        prove(replace(plan, moves=folded(plan.transfers[:-1])), sources, wanted)
    with pytest.raises(ProofError, match=r"a\[0:8, 0:4\] goes from .* in the part of destination rank 0"):
        prove(replace(plan, part=PartOf("destination", 0)), sources, wanted)
    plan, sources, wanted = part_for(PartOf("source", 0))
    assert prove(plan, sources, wanted).transfers == 4
    moved = replace(plan.transfers[0], write=replace(plan.transfers[0].write, offset=1))
    with pytest.raises(ProofError, match=r"destination rank 0 does not want a\[0:8, 0:4\]"):
        prove(replace(plan, moves=folded([moved, *plan.transfers[1:]])), sources, wanted)


def test_ranks_that_have_nothing_to_do_with_a_part_are_not_looked_at() -> None:
    """A worker knows none of them."""
    plan, sources, wanted = part_for(PartOf("destination", 1))
    outside = Placement(Box("a", (0, 0), (9, 4)), View("a", 0, (9, 4), (4, 1)))
    assert prove(plan, sources, [replace(wanted[0], placements=(outside,)), wanted[1]]).boxes == 4
    assert prove(plan, sources, wanted[1:]).boxes == 4
    plan, sources, wanted = part_for(PartOf("source", 0))
    padded = replace(sources[1], storages=tuple(replace(one, logical_numel=0) for one in sources[1].storages))
    assert prove(plan, [sources[0], padded], wanted).transfers == 4


def test_what_many_hold_is_shared_evenly_by_as_many() -> None:
    spec = TensorSpec("w", (64, 64), "float32")
    storage = Storage("w", "float32", 4096, 4096)
    place = Placement(spec.box, View("w", 0, (64, 64), (64, 1)))
    everyone = [Manifest(rank, "", (storage,), (place,)) for rank in range(4)]
    options = PlanOptions(split_bytes=1024)
    for wanters in (1, 2, 4):
        plan = make_plan([spec], everyone, everyone[:wanters], options)
        assert len(plan.transfers) == wanters * 4
        assert set(plan.bytes_by_source().values()) == {spec.nbytes * wanters // 4}


def test_what_only_one_rank_has_counts_before_anything_is_shared() -> None:
    """Rank 1 alone has three small tensors; of four larger ones that both have, it is given fewer."""
    large = [TensorSpec(f"large{index}", (10,), "float32") for index in range(4)]
    small = [TensorSpec(f"small{index}", (7,), "float32") for index in range(3)]

    def having(rank: int, specs: list[TensorSpec]) -> Manifest:
        storages = tuple(Storage(spec.name, "float32", spec.numel, spec.numel) for spec in specs)
        places = tuple(Placement(spec.box, View(spec.name, 0, spec.shape, (1,))) for spec in specs)
        return Manifest(rank, "", storages, places)

    sources = [having(0, large), having(1, large + small)]
    plan = make_plan(large + small, sources, [having(0, large + small)])
    assert plan.bytes_by_source() == {0: 120, 1: 124}


def test_the_worked_example_of_the_documentation() -> None:
    spec = TensorSpec("w", (6, 2), "float32")
    first, second = spec.box.with_range(0, 0, 4), spec.box.with_range(0, 4, 6)

    def rank(number: int, box: Box, row: int = 0, rows: int = 4) -> Manifest:
        end = 2 * (row + box.shape[0])
        place = Placement(box, View("p", 2 * row, box.shape, (2, 1)))
        return Manifest(number, "", (Storage("p", "float32", 2 * rows, end),), (place,))

    sources = [rank(0, first), rank(1, second), rank(2, first), rank(3, second)]
    wanted = [rank(0, spec.box.with_range(0, 0, 3)), rank(1, spec.box.with_range(0, 3, 6), row=3, rows=6)]
    plan = make_plan([spec], sources, wanted)
    assert prove(plan, sources, wanted).elements == 12
    found = [
        (
            item.box.start[0],
            item.box.stop[0],
            item.source,
            item.destination,
            item.read.offset // 2,
            item.write.offset // 2,
        )
        for item in plan.transfers
    ]
    assert found == [(0, 3, 0, 0, 0, 0), (3, 4, 2, 1, 3, 3), (4, 6, 3, 1, 0, 4)]
