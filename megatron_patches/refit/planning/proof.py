"""Proves, before a byte moves, that a plan writes every wanted element exactly once and reads no padding.

The proof trusts nothing that the planner computed. It derives views again from the layouts of both sides, and shows
coverage by volumes and disjointness (parts inside a box, pairwise disjoint, with the box's volume, cover it exactly
once). What holds of all tensors of a grid is shown once; where a grid does not fit as a whole, its tensors are checked
one by one, so that a mistake is named exactly. So the cost grows with the number of grids and of contiguous stretches,
not with that of elements, and hardly with that of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import ProofError
from megatron_patches.refit.layout.boxes import Box, View, contiguous_runs, overlapping_pair, subtract
from megatron_patches.refit.layout.conversion import Conversion
from megatron_patches.refit.layout.dtypes import are_encoded_apart
from megatron_patches.refit.layout.manifest import Manifest, Storage
from megatron_patches.refit.planning.grids import Numbers, array_over, is_within, places_in, single, size_of
from megatron_patches.refit.planning.layouts import (
    Corners,
    Holder,
    Layout,
    Receiver,
    Region,
    Template,
    check_layout,
    holder_of,
    receiver_of,
)
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, PartOf, Plan, PlanOptions, conversions_of
from megatron_patches.refit.planning.tensors import TensorGrid, outside
from megatron_patches.refit.planning.transfers import Moves


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
        used = {item.source for item in plan.moves}
        sources = [manifest for manifest in sources if manifest.rank in used]
        destinations = _concerned(plan, plan.part, destinations)
    holders = [holder_of(manifest) for manifest in sources]
    return prove_with(plan, holders, [receiver_of(manifest) for manifest in destinations], options)


def prove_with(
    plan: Plan, holders: Sequence[Holder], receivers: Sequence[Receiver], options: PlanOptions = DEFAULT_OPTIONS
) -> Verdict:
    """:func:`prove` with the layouts of both sides. Sources that send nothing and uninvolved ranks may be missing."""
    layouts = {holder.rank: holder.layout for holder in holders}
    for rank, layout in {id(holder.layout): (holder.rank, holder.layout) for holder in holders}.values():
        check_layout(layout, f"source rank {rank}")
    tensors: dict[str, list[TensorGrid]] = defaultdict(list)
    for grid in plan.grids:
        tensors[grid.tensor].append(grid)
    for receiver in receivers:
        _check_wanted(receiver, tensors)
    _check_owner(plan)
    homes = _check_moves(plan.moves, layouts, {one.manifest.rank: one.layout for one in receivers}, options)
    covered = [receiver for receiver in receivers if _is_covered(plan, receiver.manifest.rank)]
    _check_conversions(plan, [receiver.manifest for receiver in covered], options)
    boxes = elements = 0
    for receiver in covered:
        _check_no_aliases(receiver)
        rank = receiver.manifest.rank
        for template in receiver.layout.templates:
            _check_cover(rank, template, homes.get((rank, template.number), []))
            boxes += size_of(template.region.axes)
            elements += template.region.volume
    return Verdict(elements, boxes, sum(item.count for item in plan.moves), plan.digest, plan.conversions)


def _check_owner(plan: Plan) -> None:
    """Checks that a part contains only moves of its rank."""
    of = plan.part
    if of is None:
        return
    for item in plan.moves:
        if of.rank != (item.source if of.side == "source" else item.destination):
            raise ProofError(
                f"{item.region.first} goes from source rank {item.source} to destination rank {item.destination} in "
                f"the part of {of}"
            )


def _concerned(plan: Plan, part: PartOf, destinations: Sequence[Manifest]) -> Sequence[Manifest]:
    """The destination that a part is for, or those that a source's part sends to."""
    ranks = {part.rank} if part.side == "destination" else {item.destination for item in plan.moves}
    return [manifest for manifest in destinations if manifest.rank in ranks]


def _is_covered(plan: Plan, rank: int) -> bool:
    """Whether the plan, or part, contains all moves to this destination."""
    return plan.part is None or plan.part == PartOf("destination", rank)


def _check_wanted(receiver: Receiver, tensors: Mapping[str, Sequence[TensorGrid]]) -> None:
    """Checks that wanted boxes are inside their tensors, and their views inside their storages."""
    rank = receiver.manifest.rank
    for template in receiver.layout.templates:
        found = outside(template.region, tensors)
        if found is not None:
            raise ProofError(
                f"destination rank {rank} lists {found[0]}, outside {found[1] or 'any tensor'} of the model"
            )
    check_layout(receiver.layout, f"destination rank {rank}")


def _check_moves(
    moves: Sequence[Moves], layouts: Mapping[int, Layout], wanted: Mapping[int, Layout], options: PlanOptions
) -> Mapping[tuple[int, int], Sequence[Moves]]:
    """Checks that moves read what is held, where it is held, write what is wanted, where it is wanted, and keep types.

    Returns:
        The moves to each wanted template, by destination rank and number of the template.
    """
    homes: dict[tuple[int, int], list[Moves]] = defaultdict(list)
    empty = Layout((), ())
    for whole in moves:
        source, destination = layouts.get(whole.source, empty), wanted.get(whole.destination, empty)
        for read, held in _in_templates(whole, source, reads=True):
            for item, home in _in_templates(read, destination, reads=False):
                _check_types(item, source.kind(held).dtype, destination.kind(home).dtype, options)
                homes[item.destination, home.number].append(item)
    return homes


def _in_templates(item: Moves, layout: Layout, *, reads: bool) -> Iterator[tuple[Moves, Template]]:
    """The template in which all moves read or write; if there is none, that of each move."""
    views = item.read if reads else item.write
    home = layout.home_of(item.region, views)
    if home is not None:
        yield item, home
    elif item.count > 1:
        for region in item.region.of_each():
            yield from _in_templates(item.part(region), layout, reads=reads)
    else:
        side = f"source rank {item.source} does not hold"
        if not reads:
            side = f"destination rank {item.destination} does not want"
        raise ProofError(f"{side} {item.region.first} at {next(views.over(item.region))}")


def _check_types(item: Moves, read: str, write: str, options: PlanOptions) -> None:
    if (read, write) != (item.source_dtype, item.dtype):
        raise ProofError(
            f"{item.region.first} from source rank {item.source} to destination rank {item.destination} is planned "
            f"as {item.source_dtype} to {item.dtype} but is {read} to {write}"
        )
    if read != write and (read, write) not in options.conversions:
        raise ProofError(
            f"{item.region.first} is {read} on source rank {item.source} and {write} on destination rank "
            f"{item.destination}, and no rule converts the one to the other"
        )


def _check_conversions(plan: Plan, covered: Sequence[Manifest], options: PlanOptions) -> None:
    """Checks that the plan lists the rules of all destinations, and that each rule is sound."""
    if plan.conversions != conversions_of(covered):
        raise ProofError("the plan does not list the rules by which the destinations convert what arrives")
    for manifest in covered:
        _check_targets(manifest)
        for item in manifest.conversions:
            if are_encoded_apart(item.dtype, item.rule.dtype):
                raise ProofError(
                    f"{_tensor_in(manifest, item.storage)} is {item.dtype} in the trainer, and destination rank "
                    f"{item.rank} makes {item.rule.dtype} of it for {item.rule.target}; without its scales a quantized "
                    "weight is another number"
                )
            lost_in = item.rule.narrowed_to(item.dtype)
            if lost_in is not None and not options.allow_narrowing:
                raise ProofError(
                    f"{_tensor_in(manifest, item.storage)} is {item.dtype} in the trainer, and destination rank "
                    f"{item.rank} makes {lost_in} of it ({item.rule}) for {item.rule.target}, which loses part of its "
                    "value; train and serve in one type, or allow it: RefitOptions(allow_narrowing=True), or the flag "
                    "--refit-allow-narrowing of a training script (--allow-narrowing of refit push)"
                )


def _tensor_in(manifest: Manifest, storage: str) -> str:
    """A tensor that a storage has elements of, for a message."""
    tensors = (place.box.tensor for place in manifest.placements if place.view.storage == storage)
    return next(tensors, "nothing")


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


def _check_no_aliases(receiver: Receiver) -> None:
    """Checks that no two wanted boxes of a rank, and no two elements of one box, share memory."""
    storages, rank = receiver.manifest.storage, receiver.manifest.rank
    targets: dict[str, int] = {}
    begins: list[NDArray[np.int64]] = []
    memories: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for template in receiver.layout.templates:
        region, views = template.region, template.views
        length, starts = contiguous_runs(View("", 0, region.box.shape, views.strides))
        begins.append((array_over(views.offset, region.axes)[:, None] + starts).reshape(-1))
        lengths.append(np.full(begins[-1].size, length))
        names, repeated = views.storages(region.axes)
        memory = [targets.setdefault(storages[name].target, len(targets)) for name in names]
        memories.append(np.repeat(np.array(memory), repeated * starts.size))
    if not begins:
        return
    begin, memory_of = np.concatenate(begins), np.concatenate(memories)
    order = np.lexsort((begin, memory_of))
    begin, memory_of, length = begin[order], memory_of[order], np.concatenate(lengths)[order]
    clash = np.flatnonzero((memory_of[:-1] == memory_of[1:]) & (begin[:-1] + length[:-1] > begin[1:]))
    if clash.size:
        at = int(clash[0])
        stops = np.cumsum([part.size for part in begins])
        first, second = (_box_of_run(receiver.layout.templates, stops, int(run)) for run in order[at : at + 2])
        raise ProofError(
            f"destination rank {rank}: {first} and {second} share element {int(begin[at + 1])} of "
            f"{list(targets)[memory_of[at]]}"
        )


def _box_of_run(templates: Sequence[Template], stops: NDArray[np.int64], run: int) -> Box:
    """The box that a stretch is of. ``stops`` counts the stretches of the templates so far."""
    number = int(np.searchsorted(stops, run, side="right"))
    region, end = templates[number].region, int(stops[number])
    count = end - (int(stops[number - 1]) if number else 0)
    place = (run - end + count) // (count // size_of(region.axes))
    return region.box_of(_numbers_at(region, place))


def _numbers_at(region: Region, place: int) -> Numbers:
    """The numbers of the name at an index of :func:`megatron_patches.refit.planning.grids.numbers_of`."""
    places = np.unravel_index(place, [count for _, _, count in region.axes]) if region.axes else ()
    return tuple(begin + step * int(index) for (begin, step, _), index in zip(region.axes, places, strict=True))


def _check_cover(rank: int, template: Template, moves: Sequence[Moves]) -> None:
    """Checks that moves, each within a template, cover the box of each tensor exactly once.

    Tensors that receive the same parts are checked once.
    """
    region, corners = template.region, dict[Corners, int]()
    parts = [corners.setdefault((item.region.start, item.region.stop), len(corners)) for item in moves]
    places = [places_in(item.region.axes, region.axes) for item in moves]
    none = np.zeros(0, dtype=np.int64)
    part = np.concatenate([none, *(np.full(at.size, number) for number, at in zip(parts, places, strict=True))])
    place = np.concatenate([none, *places])
    order = np.lexsort((part, place))
    part, counts = part[order], np.bincount(place, minlength=size_of(region.axes))
    ends = np.cumsum(counts)
    boxes = [Box(region.tensor, *ends) for ends in corners]
    for count in np.unique(counts):
        alike = np.flatnonzero(counts == count)
        rows = part[(ends[alike] - count)[:, None] + np.arange(count)]
        _, firsts = np.unique(rows, axis=0, return_index=True) if count else ((), [0])
        for first in firsts:
            received = [boxes[number] for number in rows[first]]
            if overlapping_pair(received) or sum(box.volume for box in received) != region.box.volume:
                raise _not_covered(rank, template, _numbers_at(region, int(alike[first])), moves)


def _not_covered(rank: int, template: Template, numbers: Numbers, moves: Sequence[Moves]) -> ProofError:
    """What is wrong with the parts that one tensor receives."""
    whole, name = template.region.box_of(numbers), template.views.at(template.region, numbers).storage
    found = [item for item in moves if is_within(single(numbers), item.region.axes)]
    boxes = [item.region.box_of(numbers) for item in found]
    pair = overlapping_pair(boxes)
    if pair is None:
        missing = subtract(whole, boxes)[0]
        return ProofError(f"destination rank {rank} never receives {missing}, part of {whole} in {name}")
    first, second = pair
    return ProofError(
        f"destination rank {rank} receives {boxes[first].intersect(boxes[second])} in {name} twice, from source ranks "
        f"{found[first].source} and {found[second].source}"
    )
