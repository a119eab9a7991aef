"""Random layouts through plan and proof, against a dense oracle that shares no code with either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import CoverageError, ProofError, RefitError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, Plan, PlanOptions, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.planning.tensors import agree_on_tensors, fold_tensors
from megatron_patches.refit.planning.transfers import Transfer, canonical
from tests.support.quick import examples
from tests.support.refit_cases import (
    Case,
    elements,
    folded,
    memory_of,
    random_case,
    random_options,
    random_templates,
    region,
)

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


@pytest.mark.parametrize("make_case", [random_case, random_templates])
@settings(RANDOM_CASES, max_examples=examples(2000))
@given(st.integers(0, 2**32))
def test_any_layout_arrives_exactly(make_case: Callable[[int], Case], seed: int) -> None:
    case, options = make_case(seed), random_options(seed)
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
    again = replace(plan, moves=folded(plan.transfers))  # other grids of the same transfers
    assert again.transfers == plan.transfers
    verdict = replace(verdict, plan_digest=again.digest)
    assert prove(again, case.sources, case.destinations, options) == verdict


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


@pytest.mark.parametrize("make_case", [random_case, random_templates])
@settings(RANDOM_CASES, max_examples=examples(400))
@given(st.integers(0, 2**32))
def test_the_proof_refuses_every_mistake(make_case: Callable[[int], Case], seed: int) -> None:
    case = make_case(seed)
    plan = make_plan(*case.sides)
    rng = np.random.default_rng(seed + 1)
    for broken in mutations(case, plan, rng) if plan.transfers else ():
        if not harmless(case, broken):
            with pytest.raises(ProofError, match="rank"):
                prove(Plan(plan.grids, folded(broken)), case.sources, case.destinations)


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
    digests = {Plan(plan.grids, folded([other])).digest for other in changed}
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
    plan = Plan(fold_tensors([WEIGHT]), ())
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


def of_experts(rank: int, change: Callable[[Placement], Placement | None] = lambda place: place) -> Manifest:
    """A rank with 6 experts of 5 layers, each layer in one storage; one expert's placement changed, or left out."""
    placements = []
    for layer in range(5):
        for expert in range(6):
            box = Box(f"layers.{layer}.experts.{expert}.w", (0, 0), (4, 6))
            place = Placement(box, View(f"layer{layer}", 24 * expert, (4, 6), (6, 1)))
            changed = change(place) if (layer, expert) == (2, 3) else place
            placements += [] if changed is None else [changed]
    return Manifest(
        rank, "", tuple(Storage(f"layer{layer}", "bfloat16", 152, 144) for layer in range(5)), tuple(placements)
    )


EXPERTS = [
    TensorSpec(f"layers.{layer}.experts.{expert}.w", (4, 6), "bfloat16") for layer in range(5) for expert in range(6)
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _: [],
            r"destination rank 0 never receives layers\.2\.experts\.3\.w\[0:4, 0:6\], part of .* in layer2",
        ),
        (
            lambda item: [item, item],
            r"receives layers\.2\.experts\.3\.w\[0:4, 0:6\] in layer2 twice, from source ranks 0",
        ),
        (
            lambda item: [replace(item, read=replace(item.read, offset=item.read.offset + 6))],
            r"source rank 0 does not hold layers\.2\.experts\.3\.w\[0:4, 0:6\] at .*layer2', offset=78,",
        ),
        (
            lambda item: [replace(item, write=replace(item.write, offset=item.write.offset + 6))],
            r"destination rank 0 does not want layers\.2\.experts\.3\.w\[0:4, 0:6\] at .*layer2', offset=78,",
        ),
        (
            lambda item: [replace(item, read=replace(item.read, storage="layer3"))],
            r"source rank 0 does not hold layers\.2\.experts\.3\.w\[0:4, 0:6\] at View\(storage='layer3'",
        ),
        (
            lambda item: [replace(item, source_dtype="float32")],
            r"layers\.2\.experts\.3\.w\[0:4, 0:6\] from .* is planned as float32 to bfloat16 but is bfloat16 to",
        ),
        (lambda item: [replace(item, source=9)], r"source rank 9 does not hold layers\.2\.experts\.3\.w\[0:4, 0:6\]"),
    ],
)
def test_one_tensor_of_a_grid_that_moves_otherwise_is_named(
    change: Callable[[Transfer], list[Transfer]], message: str
) -> None:
    sources, wanted = [of_experts(0)], [of_experts(0)]
    plan = make_plan(EXPERTS, sources, wanted)
    assert len(plan.moves) == 1
    name = "layers.2.experts.3.w"
    transfers = [one for item in plan.transfers for one in (change(item) if item.box.tensor == name else [item])]
    broken = replace(plan, moves=folded(transfers))
    assert broken.transfers == tuple(sorted(transfers, key=canonical))
    with pytest.raises(ProofError, match=message):
        prove(broken, sources, wanted)


def moved_by(elements_on: int) -> Callable[[Placement], Placement]:
    """Moves a placement by so many elements."""
    return lambda place: replace(place, view=replace(place.view, offset=place.view.offset + elements_on))


def one_row_less(place: Placement) -> Placement:
    box = place.box.with_range(0, 0, 3)
    return Placement(box, place.view.cut(place.box, box))


def in_float32(manifest: Manifest) -> Manifest:
    """With the odd tensor in a storage of its own, of another dtype."""
    own = Storage("own", "float32", 24, 24)
    places = tuple(
        Placement(place.box, View("own", 0, (4, 6), (6, 1))) if place.box.tensor == "layers.2.experts.3.w" else place
        for place in manifest.placements
    )
    return replace(manifest, storages=(*manifest.storages, own), placements=places)


NAMED = r"layers\.2\.experts\.3\.w\["


@pytest.mark.parametrize(
    ("source", "wanted", "message"),
    [
        (
            of_experts(4, lambda _: None),
            of_experts(5),
            f"no source holds {NAMED}0:4, 0:6\\], which destination rank 5",
        ),
        (of_experts(4, one_row_less), of_experts(5), f"no source holds {NAMED}3:4, 0:6\\], which destination rank 5"),
        (in_float32(of_experts(4)), of_experts(5), f"{NAMED}0:4, 0:6\\] is float32 on source rank 4 and bfloat16 on"),
        (of_experts(4), in_float32(of_experts(5)), f"{NAMED}0:4, 0:6\\] is bfloat16 on source rank 4 and float32 on"),
        (of_experts(4), of_experts(5, moved_by(6)), f"destination rank 5: {NAMED}.* and layers.2.experts.4.w.* share"),
        (of_experts(4), of_experts(5, moved_by(1000)), f"destination rank 5: {NAMED}.* spans elements 1072 to 1096 of"),
        (
            of_experts(4, moved_by(1000)),
            of_experts(5),
            f"source rank 4: {NAMED}.* spans elements 1072 to 1096 of layer2",
        ),
    ],
)
def test_one_tensor_of_a_template_that_lies_otherwise_is_named(
    source: Manifest, wanted: Manifest, message: str
) -> None:
    with pytest.raises((ProofError, CoverageError), match=message):
        prove(make_plan(EXPERTS, [source], [wanted]), [source], [wanted])


def test_one_tensor_of_a_template_that_the_model_does_not_have_is_named() -> None:
    sides = [of_experts(0)], [of_experts(0)]
    model = [replace(spec, shape=(3, 6)) if spec.name == "layers.2.experts.3.w" else spec for spec in EXPERTS]
    for tensors, shape in ((model, r"\(3, 6\)"), (EXPERTS[:15] + EXPERTS[16:], "any tensor")):
        with pytest.raises(
            ProofError, match=f"destination rank 0 lists {NAMED}0:4, 0:6\\], outside {shape} of the model"
        ):
            prove(make_plan(tensors, *sides), *sides)


@settings(RANDOM_CASES, max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_the_tensor_that_a_mistake_is_in_is_named(seed: int) -> None:
    """All but one transfer are right, so an error that names another tensor's would be wrong."""
    case = random_templates(seed)
    plan = make_plan(*case.sides)
    rng = np.random.default_rng(seed)
    for broken in mutations(case, plan, rng):
        odd = {item.box.tensor for item in set(plan.transfers) ^ set(broken)}
        if len(broken) <= len(plan.transfers) and len(odd) == 1 and not harmless(case, broken):
            with pytest.raises(ProofError) as caught:
                prove(Plan(plan.grids, folded(broken)), case.sources, case.destinations)
            assert f"{next(iter(odd))}[" in str(caught.value)


def test_a_view_has_the_shape_of_its_box() -> None:
    storage = Storage("w", "float32", 4096, 4096)
    with pytest.raises(RefitError, match=r"rank 3 shows w\[0:64, 0:32\] through a view of shape \(64, 33\)"):
        Manifest(3, "", (storage,), (Placement(WEIGHT.box, View("w", 0, (64, 33), (33, 1))),))
