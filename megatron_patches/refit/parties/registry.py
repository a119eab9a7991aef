"""What the first trainer rank makes of parties' answers, so that each is told what concerns it and nothing else.

Sources register layouts, destinations what they want. A destination is told the layouts of the sources that overlap it,
a source what destinations ask of it. No party is told everything.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.manifest import HeldBox, agree_on
from megatron_patches.refit.parties.messages import (
    DESCRIBING,
    PLANNING,
    RECORDING,
    Asked,
    Held,
    ModelAnswer,
    Orders,
    Overlap,
    Registered,
    Registration,
    Wanted,
)
from megatron_patches.refit.planning.grids import join_name, meet, numbers_of
from megatron_patches.refit.planning.layouts import Holder, Layout, Region, check_layout, fold_tensors, unfold_tensors

_encode = msgspec.msgpack.encode


class Registry:
    """The registry of one session; parties are numbered sources first.

    Args:
        sources: number of sources.
    """

    def __init__(self, sources: int) -> None:
        self._sources = sources
        self._holders: list[Holder] = []
        self._steps: Mapping[str, Callable[[list[bytes]], list[bytes]]] = {
            DESCRIBING: self._describe,
            RECORDING: self._overlaps,
            PLANNING: self._orders,
        }

    def answer(self, what: str, payloads: list[bytes]) -> list[bytes] | None:
        """What each party is told at the end of a step; None where all are told everybody's part.

        Args:
            what: name of the step.
            payloads: the parts of all parties, in order of their numbers.

        Raises:
            RefitError: if the parts do not go together.
        """
        step = self._steps.get(what)
        return None if step is None else step(payloads)

    def _describe(self, payloads: list[bytes]) -> list[bytes]:
        """Keeps the layouts of sources; everybody is told the model."""
        parts = [msgspec.msgpack.decode(payload, type=Registration) for payload in payloads]
        held = [part.held for part in parts if part.held is not None]
        self._holders = [Holder(one.rank, one.host, one.layout) for one in held]
        for holder in self._holders:
            check_layout(holder.layout, holder.rank)
        first = held[0]
        shapes = {spec.name: spec.shape for spec in unfold_tensors(first.tensors)}
        tensors = fold_tensors(agree_on(shapes, _boxes_of(self._holders)))
        return [_encode(ModelAnswer(first.config, tensors, first.allow_narrowing))] * len(payloads)

    def _overlaps(self, payloads: list[bytes]) -> list[bytes]:
        """Each destination is told the layouts that overlap what it wants; the same where several want the same."""
        known: dict[bytes, bytes] = {}
        answers = []
        for payload in payloads:
            if payload not in known:
                known[payload] = _encode(self._overlap(msgspec.msgpack.decode(payload, type=Wanted)))
            answers.append(known[payload])
        return answers

    def _overlap(self, wanted: Wanted) -> Overlap:
        regions: dict[str, list[Region]] = defaultdict(list)
        for region in wanted.regions:
            regions[region.tensor].append(region)
        numbers: dict[bytes, int | None] = {}
        layouts: list[Layout] = []
        holders: list[tuple[int, str, int]] = []
        for holder in self._holders:
            digest = holder.layout.digest
            if digest not in numbers:
                part = tuple(
                    template
                    for template in holder.layout.templates
                    if any(_overlap(template.region, region) for region in regions.get(template.region.tensor, ()))
                )
                numbers[digest] = len(layouts) if part else None
                layouts += [Layout(part, holder.layout.kinds)] if part else []
            number = numbers[digest]
            if number is not None:
                holders.append((holder.rank, holder.host, number))
        return Overlap(layouts, holders)

    def _orders(self, payloads: list[bytes]) -> list[bytes]:
        """Each source is told what is asked of it; everybody, the digest and the bytes of all plans together."""
        asked = [msgspec.msgpack.decode(payload, type=Asked) for payload in payloads]
        content = hashlib.sha256("".join(part.digest for part in asked).encode()).hexdigest()
        nbytes = sum(part.nbytes for part in asked)
        orders = [Orders([], content, nbytes) for _ in payloads]
        for destination, part in enumerate(asked[self._sources :]):
            for source, requests in part.requests.items():
                if not 0 <= source < self._sources:
                    raise RefitError(f"destination rank {destination} asks source rank {source}, which is not there")
                orders[source].requests.append((destination, requests))
        return [_encode(order) for order in orders]


def registered(held: Held, layout: Layout) -> Registered:
    """What a source tells of what it holds."""
    manifest = held.manifest
    tensors = fold_tensors(held.tensors())
    return Registered(manifest.rank, manifest.host, held.config, tensors, layout, held.allow_narrowing)


def _overlap(left: Region, right: Region) -> bool:
    return meet(left.axes, right.axes) and left.box.intersect(right.box) is not None


def _boxes_of(holders: Sequence[Holder]) -> Iterator[HeldBox]:
    """Every box that a source holds, without those that another holds likewise."""
    seen: set[tuple[Region, str]] = set()
    for holder in holders:
        for template in holder.layout.templates:
            region, dtype = template.region, holder.layout.kind(template).dtype
            if (region, dtype) in seen:
                continue
            seen.add((region, dtype))
            for numbers in numbers_of(region.axes):
                box = Box(join_name(region.tensor, numbers), region.start, region.stop)
                yield HeldBox(holder.rank, template.view_at(numbers).storage, box, dtype)
