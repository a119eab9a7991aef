"""Proves, before a byte moves, that a plan writes every wanted element exactly once and reads no padding.

The proof trusts nothing that the planner computed. It derives views again from the manifests, and shows coverage by
volumes and disjointness (parts inside a box, pairwise disjoint, with the box's volume, cover it exactly once). Its cost
grows with the number of transfers and of contiguous stretches, not with the number of elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_patches.refit.boxes import Box, TensorSpec, View, contiguous_runs, overlapping_pair, subtract
from megatron_patches.refit.conversion import Conversion
from megatron_patches.refit.errors import ProofError
from megatron_patches.refit.manifest import Manifest, Placement, Storage
from megatron_patches.refit.plan import DEFAULT_OPTIONS, PartOf, Plan, PlanOptions, conversions_of
from megatron_patches.refit.planning.layouts import Holder, check_layout, holder_of
from megatron_patches.refit.planning.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was proved, in numbers. For a source's part, the first two are 0.

    Attributes:
        elements: elements written, each exactly once.
        boxes: destination boxes covered.
        transfers: transfers checked.
        plan_digest: digest of the proved plan.
        conversions: every rule by which arriving elements are converted; all others keep the source's form.
    """

    elements: int
    boxes: int
    transfers: int
    plan_digest: str
    conversions: tuple[Conversion, ...] = ()


def prove(
    plan: Plan,
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Verdict:
    """Checks a plan against the manifests that it was made from.

    It shows that

    - every read lies in a box that its rank holds, at the place where it holds it, and outside the storage's padding;
    - every wanted box lies in its tensor, and each of its elements is written by exactly one transfer, at the place
      where it is wanted;
    - wanted boxes share no memory, neither where they arrive nor after conversion;
    - dtypes are equal, or converted in transfer by a pair in ``options.conversions``, or converted at the destination
      by a rule that the plan lists and that loses nothing unless ``options.allow_narrowing``.

    For a part, it shows this as far as its rank is concerned: for a destination all that it wants, for a source all
    that it sends. Manifests of uninvolved ranks are ignored. A whole plan is proved once every destination has proved
    its part.

    Raises:
        ProofError: with tensor, box and rank.
    """
    if plan.part is not None:
        used = {item.source for item in plan.transfers}
        sources = [manifest for manifest in sources if manifest.rank in used]
    return prove_with(plan, [holder_of(manifest) for manifest in sources], destinations, options)


def prove_with(
    plan: Plan, holders: Sequence[Holder], destinations: Sequence[Manifest], options: PlanOptions = DEFAULT_OPTIONS
) -> Verdict:
    """:func:`prove` with the layouts of sources. Sources that send nothing may be missing."""
    specs = {spec.name: spec for spec in plan.tensors}
    if plan.part is not None:
        destinations = _concerned(plan, plan.part, destinations)
    for holder in holders:
        check_layout(holder.layout, holder.rank)
    for manifest in destinations:
        for placement in manifest.placements:
            _check_placement(manifest.rank, placement, manifest.storage[placement.view.storage], specs)
    _check_owner(plan)
    _check_reads(plan.transfers, holders, destinations, options)
    covered = [manifest for manifest in destinations if _is_covered(plan, manifest.rank)]
    _check_conversions(plan, covered, options)
    for manifest in covered:
        _check_no_aliases(manifest)
    boxes, elements = _check_writes(plan.transfers, destinations, covered)
    return Verdict(elements, boxes, len(plan.transfers), plan.digest, plan.conversions)


def _check_owner(plan: Plan) -> None:
    """Checks that a part contains only transfers of its rank."""
    of = plan.part
    if of is None:
        return
    for item in plan.transfers:
        if of.rank != (item.source if of.side == "source" else item.destination):
            raise ProofError(
                f"{item.box} goes from source rank {item.source} to destination rank {item.destination} in the part of "
                f"{of}"
            )


def _concerned(plan: Plan, part: PartOf, destinations: Sequence[Manifest]) -> Sequence[Manifest]:
    """The destination that a part is for, or those that a source's part sends to."""
    ranks = {part.rank} if part.side == "destination" else {item.destination for item in plan.transfers}
    return [manifest for manifest in destinations if manifest.rank in ranks]


def _is_covered(plan: Plan, rank: int) -> bool:
    """Whether the plan, or part, contains all transfers to this destination."""
    return plan.part is None or plan.part == PartOf("destination", rank)


def _check_placement(rank: int, placement: Placement, storage: Storage, specs: Mapping[str, TensorSpec]) -> None:
    box, view = placement.box, placement.view
    spec = specs.get(box.tensor)
    if spec is None or len(spec.shape) != len(box.stop) or not spec.box.contains(box):
        raise ProofError(
            f"destination rank {rank} lists {box}, outside {spec.shape if spec else 'any tensor'} of the model"
        )
    if view.shape != box.shape:
        raise ProofError(f"destination rank {rank} shows {box} through a view of shape {view.shape}")
    low, high = view.span
    limit = storage.logical_numel
    if low < 0 or high > limit or limit > storage.numel:
        raise ProofError(
            f"destination rank {rank}: {box} spans elements {low} to {high} of {storage.name}, of which {limit} of "
            f"{storage.numel} are not padding"
        )


def _check_reads(
    transfers: Sequence[Transfer], holders: Sequence[Holder], destinations: Sequence[Manifest], options: PlanOptions
) -> None:
    """Checks that every read is of what its source holds, where it holds it, and that dtypes are those of both ends."""
    layouts = {holder.rank: holder.layout for holder in holders}
    storages = {manifest.rank: manifest.storage for manifest in destinations}
    for item in transfers:
        held = layouts[item.source].views_of(item.box) if item.source in layouts else iter(())
        read = next((kind.dtype for view, kind in held if view == item.read), None)
        if read is None:
            raise ProofError(f"source rank {item.source} does not hold {item.box} at {item.read}")
        if item.write.storage not in storages.get(item.destination, {}):
            raise ProofError(
                f"{item.box} goes to {item.write.storage} of destination rank {item.destination}, which is not there"
            )
        write = storages[item.destination][item.write.storage].dtype
        if (read, write) != (item.source_dtype, item.dtype):
            raise ProofError(
                f"{item.box} from source rank {item.source} to destination rank {item.destination} is planned as "
                f"{item.source_dtype} to {item.dtype} but is {read} to {write}"
            )
        if read != write and (read, write) not in options.conversions:
            raise ProofError(
                f"{item.box} is {read} on source rank {item.source} and {write} on destination rank "
                f"{item.destination}, and no rule converts the one to the other"
            )


def _is_cut(box: Box, view: View, placement: Placement) -> bool:
    return (
        placement.view.storage == view.storage
        and placement.box.contains(box)
        and placement.view.cut(placement.box, box) == view
    )


def _check_conversions(plan: Plan, covered: Sequence[Manifest], options: PlanOptions) -> None:
    """Checks that the plan lists the rules of all destinations, and that each rule is sound."""
    if plan.conversions != conversions_of(covered):
        raise ProofError("the plan does not list the rules by which the destinations convert what arrives")
    for manifest in covered:
        _check_targets(manifest)
        tensors = {placement.view.storage: placement.box.tensor for placement in manifest.placements}
        for item in manifest.conversions:
            lost_in = item.rule.narrowed_to(item.dtype)
            if lost_in is not None and not options.allow_narrowing:
                raise ProofError(
                    f"{tensors.get(item.storage, 'nothing')} is {item.dtype} in the trainer, and destination rank "
                    f"{item.rank} makes {lost_in} of it ({item.rule}) for {item.rule.target}, which loses part of its "
                    "value; train and serve in one type, or allow narrowing"
                )


def _check_targets(manifest: Manifest) -> None:
    """Checks that storages that are converted into one memory agree on its dtype and length."""
    first: dict[str, Storage] = {}
    for storage in manifest.storages:
        known = first.setdefault(storage.target, storage)
        if (known.final_dtype, known.numel) != (storage.final_dtype, storage.numel):
            raise ProofError(
                f"destination rank {manifest.rank}: {storage.target} would have {known.numel} elements of "
                f"{known.final_dtype} by {known.name}, and {storage.numel} of {storage.final_dtype} by {storage.name}"
            )


def _check_no_aliases(manifest: Manifest) -> None:
    """Checks that no two wanted boxes of a rank, and no two elements of one box, share memory."""
    views: dict[str, list[Placement]] = defaultdict(list)
    for placement in manifest.placements:
        views[manifest.storage[placement.view.storage].target].append(placement)
    for name, placements in views.items():
        runs = [contiguous_runs(placement.view) for placement in placements]
        starts = np.concatenate([run.starts[0] for run in runs])
        stops = np.concatenate([run.starts[0] + run.length for run in runs])
        owner = np.repeat(np.arange(len(placements)), [run.count for run in runs])
        order = np.argsort(starts, kind="stable")
        clash = np.flatnonzero(stops[order][:-1] > starts[order][1:])
        if clash.size:
            first, second = owner[order[clash[0]]], owner[order[clash[0] + 1]]
            raise ProofError(
                f"destination rank {manifest.rank}: {placements[first].box} and {placements[second].box} share "
                f"element {int(starts[order[clash[0] + 1]])} of {name}"
            )


def _check_writes(
    transfers: Sequence[Transfer], destinations: Sequence[Manifest], covered: Sequence[Manifest]
) -> tuple[int, int]:
    """Checks that every write is wanted and every box of ``covered`` is covered once. Returns (boxes, elements)."""
    wanted: dict[tuple[int, str, str], list[Placement]] = defaultdict(list)
    for manifest in destinations:
        for placement in manifest.placements:
            wanted[manifest.rank, placement.box.tensor, placement.view.storage].append(placement)
    written: dict[tuple[int, Placement], list[Transfer]] = defaultdict(list)
    for item in transfers:
        key = item.destination, item.box.tensor, item.write.storage
        home = next((place for place in wanted[key] if _is_cut(item.box, item.write, place)), None)
        if home is None:
            raise ProofError(f"destination rank {item.destination} does not want {item.box} at {item.write}")
        written[item.destination, home].append(item)
    count = elements = 0
    for manifest in covered:
        for placement in manifest.placements:
            _check_cover(manifest.rank, placement, written.get((manifest.rank, placement), []))
            count += 1
            elements += placement.box.volume
    return count, elements


def _check_cover(rank: int, placement: Placement, transfers: Sequence[Transfer]) -> None:
    pair = overlapping_pair([item.box for item in transfers])
    if pair is not None:
        first, second = transfers[pair[0]], transfers[pair[1]]
        raise ProofError(
            f"destination rank {rank} receives {first.box.intersect(second.box)} in {placement.view.storage} twice, "
            f"from source ranks {first.source} and {second.source}"
        )
    if sum(item.box.volume for item in transfers) != placement.box.volume:
        missing = subtract(placement.box, [item.box for item in transfers])
        raise ProofError(
            f"destination rank {rank} never receives {missing[0]}, part of {placement.box} in {placement.view.storage}"
        )
