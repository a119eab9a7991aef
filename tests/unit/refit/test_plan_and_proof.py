"""Random layouts through plan and proof, against a dense oracle that shares no code with either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.boxes import Box, TensorSpec, View
from megatron_patches.refit.errors import CoverageError, ProofError, RefitError
from megatron_patches.refit.manifest import Manifest, Placement, Storage
from megatron_patches.refit.plan import DEFAULT_OPTIONS, Plan, PlanOptions, make_plan
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.planning.transfers import Transfer
from megatron_patches.refit.proof import prove
from tests.support.quick import examples
from tests.support.refit_cases import Case, elements, memory_of, random_case, random_options, region

# A seed does not shrink, and without the phase that explains failures nothing is traced: three times as fast.
RANDOM_CASES = settings(deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])


def simulate(case: Case, transfers: Sequence[Transfer]) -> bool:
    """Moves every element by hand; whether each wanted one is written exactly once, rightly, and nothing else is."""
    sent = {m.rank: memory_of(m, lambda box: case.dense[box.tensor][region(box)]) for m in case.sources}
    received = {m.rank: memory_of(m, None) for m in case.destinations}
    writes = {m.rank: {s.name: np.zeros(s.numel, dtype=np.int64) for s in m.storages} for m in case.destinations}
    for item in transfers:
        values = sent[item.source][item.read.storage][elements(item.read)]
        target = elements(item.write)
        received[item.destination][item.write.storage][target] = values
        np.add.at(writes[item.destination][item.write.storage], target, 1)
    good = True
    for manifest in case.destinations:
        expected = {s.name: np.zeros(s.numel, dtype=np.int64) for s in manifest.storages}
        for placement in manifest.placements:
            where = elements(placement.view)
            got = received[manifest.rank][placement.view.storage][where]
            good &= np.array_equal(got, case.dense[placement.box.tensor][region(placement.box)])
            expected[placement.view.storage][where] = 1
        good &= all(np.array_equal(expected[name], writes[manifest.rank][name]) for name in expected)
    return good


@settings(RANDOM_CASES, max_examples=examples(2000))
@given(st.integers(0, 2**32))
def test_any_layout_arrives_exactly(seed: int) -> None:
    case, options = random_case(seed), random_options(seed)
    plan = make_plan(*case.sides, options)
    verdict = prove(plan, case.sources, case.destinations, options)
    assert simulate(case, plan.transfers)
    wanted = [placement.box.volume for manifest in case.destinations for placement in manifest.placements]
    assert (verdict.elements, verdict.boxes) == (sum(wanted), len(wanted))
    assert plan.nbytes == 4 * sum(wanted)
    shuffled = make_plan(
        list(reversed(case.tensors)), list(reversed(case.sources)), list(reversed(case.destinations)), options
    )
    assert shuffled.digest == plan.digest


def mutations(case: Case, plan: Plan, rng: np.random.Generator) -> Iterator[tuple[Transfer, ...]]:
    """Plans with one mistake each."""
    transfers = plan.transfers
    index = int(rng.integers(0, len(transfers)))
    item = transfers[index]
    others = transfers[:index] + transfers[index + 1 :]
    yield others  # one left out
    yield (*transfers, item)  # one sent twice
    yield (*others, replace(item, read=replace(item.read, offset=item.read.offset + 1)))
    yield (*others, replace(item, write=replace(item.write, offset=item.write.offset + 1)))
    yield (*others, replace(item, source=item.source + 100))
    other = transfers[int(rng.integers(0, len(transfers)))]
    if other is not item and other.box.shape == item.box.shape:  # two boxes swapped on arrival
        rest = [t for t in transfers if t is not item and t is not other]
        yield (*rest, replace(item, write=other.write), replace(other, write=item.write))
    dims = [dim for dim, extent in enumerate(item.box.shape) if extent > 1]
    if dims:  # one row short
        smaller = item.box.with_range(dims[0], item.box.start[dims[0]], item.box.stop[dims[0]] - 1)
        yield (
            *others,
            replace(item, box=smaller, read=item.read.cut(item.box, smaller), write=item.write.cut(item.box, smaller)),
        )


@settings(RANDOM_CASES, max_examples=examples(400))
@given(st.integers(0, 2**32))
def test_the_proof_refuses_every_mistake(seed: int) -> None:
    case = random_case(seed)
    plan = make_plan(*case.sides)
    rng = np.random.default_rng(seed + 1)
    for broken in mutations(case, plan, rng) if plan.transfers else ():
        if not harmless(case, broken):
            with pytest.raises(ProofError, match="rank"):
                prove(Plan(plan.tensors, broken), case.sources, case.destinations)


def harmless(case: Case, transfers: Sequence[Transfer]) -> bool:
    """Whether a change made no difference, such as swapping two equal places on two ranks."""
    try:
        return simulate(case, transfers)
    except (IndexError, KeyError):  # outside a storage, or on a rank that is not there
        return False


def holding(rank: int, *boxes: Box, dtype: str = "float32", padding: int = 0, host: str = "") -> Manifest:
    """A rank with one contiguous storage a box."""
    storages, placements = [], []
    for number, box in enumerate(boxes):
        strides = tuple(int(np.prod(box.shape[dim + 1 :])) for dim in range(len(box.shape)))
        storages.append(Storage(f"{box.tensor}/{number}", dtype, box.volume + padding, box.volume))
        placements.append(Placement(box, View(f"{box.tensor}/{number}", 0, box.shape, strides)))
    return Manifest(rank, host, tuple(storages), tuple(placements))


WEIGHT = TensorSpec("w", (64, 32), "float32")


def test_replicas_share_the_work_evenly() -> None:
    sources = [holding(rank, WEIGHT.box) for rank in range(4)]
    plan = make_plan([WEIGHT], sources, [holding(0, WEIGHT.box)], PlanOptions(split_bytes=256))
    assert plan.bytes_by_source() == dict.fromkeys(range(4), WEIGHT.nbytes // 4)
    assert [item.box.start[0] for item in plan.transfers] == [0, 16, 32, 48]


def test_small_tensors_are_not_cut_but_spread() -> None:
    norms = [TensorSpec(f"norm{index}", (32,), "float32") for index in range(8)]
    sources = [holding(rank, *(spec.box for spec in norms)) for rank in range(4)]
    plan = make_plan(norms, sources, [holding(0, *(spec.box for spec in norms))])
    assert plan.bytes_by_source() == dict.fromkeys(range(4), 2 * 32 * 4)
    assert len(plan.transfers) == 8


def test_a_replica_on_the_same_host_comes_first() -> None:
    sources = [holding(0, WEIGHT.box, host="a"), holding(1, WEIGHT.box, host="b")]
    wanted = [holding(0, WEIGHT.box, host="b"), holding(1, WEIGHT.box, host="a")]
    plan = make_plan([WEIGHT], sources, wanted)
    assert {(item.source, item.destination) for item in plan.transfers} == {(1, 0), (0, 1)}


class Counted(tuple[Transfer, ...]):
    """Transfers that know how often all of them were looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Transfer]:
        self.looks += 1
        return super().__iter__()


def test_the_bytes_of_a_plan_are_added_up_once() -> None:
    plan = make_plan([WEIGHT], [holding(0, WEIGHT.box)], [holding(0, WEIGHT.box)])
    transfers = Counted(plan.transfers)
    plan = replace(plan, transfers=transfers)
    assert [plan.nbytes for _ in range(3)] == [WEIGHT.nbytes] * 3
    assert transfers.looks == 1


def test_what_nobody_holds_is_named() -> None:
    top = WEIGHT.box.with_range(0, 0, 60)
    with pytest.raises(CoverageError, match=r"no source holds w\[60:64, 0:32\], which destination rank 3 wants"):
        make_plan([WEIGHT], [holding(0, top)], [holding(3, WEIGHT.box)])


def test_the_digest_covers_places_and_dtypes() -> None:
    plan = make_plan([WEIGHT], [holding(0, WEIGHT.box)], [holding(0, WEIGHT.box)])
    item = plan.transfers[0]
    changed = [
        replace(item, source=1),
        replace(item, read=replace(item.read, offset=1)),
        replace(item, write=replace(item.write, strides=(33, 1))),
        replace(item, dtype="bfloat16"),
    ]
    digests = {Plan(plan.tensors, (other,)).digest for other in changed}
    assert len(digests | {plan.digest}) == 5


def proved(sources: list[Manifest], wanted: list[Manifest], options: PlanOptions = DEFAULT_OPTIONS) -> None:
    plan = make_plan([WEIGHT], sources, wanted, options)
    prove(plan, sources, wanted, options)


def test_a_source_view_that_reaches_into_padding_is_refused() -> None:
    good = holding(2, WEIGHT.box, padding=64)
    proved([good], [holding(0, WEIGHT.box)])
    shifted = Placement(WEIGHT.box, View("w/0", 32, (64, 32), (32, 1)))
    with pytest.raises(
        ProofError, match=r"source rank 2: w\[0:64, 0:32\] spans elements 32 to 2080 of w/0, of which 2048"
    ):
        proved([replace(good, placements=(shifted,))], [holding(0, WEIGHT.box)])


def test_destinations_that_share_memory_are_refused() -> None:
    storage = Storage("fused", "float32", 2048, 2048)
    first, second = WEIGHT.box.split(2, 1)
    aliased = Manifest(
        1,
        "",
        (storage,),
        (
            Placement(first, View("fused", 0, (64, 16), (32, 1))),
            Placement(second, View("fused", 15, (64, 16), (32, 1))),
        ),
    )
    with pytest.raises(ProofError, match=r"destination rank 1: w\[0:64, 0:16\] and w\[0:64, 16:32\] share element 15"):
        proved([holding(0, WEIGHT.box)], [aliased])
    folded = Manifest(1, "", (storage,), (Placement(WEIGHT.box, View("fused", 0, (64, 32), (0, 1))),))
    with pytest.raises(ProofError, match="share element 0 of fused"):
        proved([holding(0, WEIGHT.box)], [folded])


def test_dtypes_must_be_equal_or_convert_by_a_rule() -> None:
    source, wanted = holding(4, WEIGHT.box), holding(5, WEIGHT.box, dtype="bfloat16")
    with pytest.raises(ProofError, match="is float32 on source rank 4 and bfloat16 on destination rank 5"):
        proved([source], [wanted])
    proved([source], [wanted], PlanOptions(conversions=frozenset({("float32", "bfloat16")})))


def test_a_box_outside_the_model_is_refused() -> None:
    outside = Box("w", (0, 0), (65, 32))
    plan = Plan((WEIGHT,), ())
    with pytest.raises(ProofError, match=r"destination rank 0 lists w\[0:65, 0:32\], outside \(64, 32\)"):
        prove(plan, [], [holding(0, outside)])


def test_holders_agree_on_dtypes_and_hold_everything() -> None:
    shapes = {"w": (64, 32)}
    assert agree_on_tensors(shapes, [holding(0, WEIGHT.box)]) == [WEIGHT]
    with pytest.raises(RefitError, match="w is float32 on rank 0 and bfloat16 on rank 1"):
        agree_on_tensors(shapes, [holding(0, WEIGHT.box), holding(1, WEIGHT.box, dtype="bfloat16")])
    with pytest.raises(RefitError, match="no rank holds bias"):
        agree_on_tensors({**shapes, "bias": (64,)}, [holding(0, WEIGHT.box)])
    with pytest.raises(
        RefitError, match=r"rank 0 holds w\[0:64, 0:32\] in w/0, but the model's w has shape \(64, 31\)"
    ):
        agree_on_tensors({"w": (64, 31)}, [holding(0, WEIGHT.box)])


def test_a_manifest_lists_the_storages_that_it_uses() -> None:
    with pytest.raises(RefitError, match="which it does not list"):
        Manifest(0, "", (), (Placement(WEIGHT.box, View("w", 0, (64, 32), (32, 1))),))
    storage = Storage("w", "float32", 1, 1)
    with pytest.raises(RefitError, match="one storage twice"):
        Manifest(0, "", (storage, storage), ())


def test_worked_example_of_the_documentation() -> None:
    """docs/refit.md: ``w`` has 6 rows of 5; trainer ranks 2 and 3 are replicas of 0 and 1."""

    def rows(rank: int, begin: int, end: int, first: int, numel: int) -> Manifest:
        box, view = Box("w", (begin, 0), (end, 5)), View("s", first * 5, (end - begin, 5), (5, 1))
        used = numel if first else (end - begin) * 5
        return Manifest(rank, "", (Storage("s", "bfloat16", numel, used),), (Placement(box, view),))

    sources = [rows(rank, *((0, 4) if rank % 2 == 0 else (4, 6)), 0, 20) for rank in range(4)]
    other = Placement(Box("v", (0, 0), (3, 5)), View("s", 0, (3, 5), (5, 1)))
    second = rows(1, 3, 6, 3, 30)
    wanted = [rows(0, 0, 3, 0, 15), replace(second, placements=(other, *second.placements))]
    held = Manifest(
        4, "", (Storage("v", "bfloat16", 15, 15),), (Placement(other.box, replace(other.view, storage="v")),)
    )
    plan = make_plan(
        [TensorSpec("w", (6, 5), "bfloat16"), TensorSpec("v", (3, 5), "bfloat16")], [*sources, held], wanted
    )
    found = {
        (item.destination, str(item.box), item.source, item.read.offset // 5, item.write.offset // 5)
        for item in plan.transfers
        if item.box.tensor == "w"
    }
    assert found == {(0, "w[0:3, 0:5]", 0, 0, 0), (1, "w[3:4, 0:5]", 2, 3, 3), (1, "w[4:6, 0:5]", 3, 0, 4)}
    assert prove(plan, [*sources, held], wanted).elements == 5 * (3 + 3 + 3)
