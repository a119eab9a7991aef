"""Plans: what moves from which source to which destination, for one destination or for a whole cluster.

Pure and deterministic. A destination's plan depends only on the layouts of the sources that overlap it
(:mod:`megatron_patches.refit.planning.local`). A cluster's plan is the union over its destinations.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_patches.refit.boxes import TensorSpec, View
from megatron_patches.refit.conversion import Conversion
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.planning.layouts import holder_of, layout_of
from megatron_patches.refit.planning.local import SourceIndex, plan_destination
from megatron_patches.refit.planning.requests import Request, transfers_of
from megatron_patches.refit.planning.transfers import Transfer, canonical

Link = tuple[int, int]
"""A source and a destination that a plan connects."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan.

    Attributes:
        split_bytes: no part is cut into parts of fewer bytes to let several sources take part.
        conversions: pairs (source dtype, arriving dtype) that may be converted; all other dtypes must be equal.
        allow_narrowing: whether a destination's rule may use a dtype that cannot hold every value sent.
    """

    split_bytes: int = 1 << 20
    conversions: frozenset[tuple[str, str]] = frozenset()
    allow_narrowing: bool = False

    def __post_init__(self) -> None:
        if self.split_bytes < 1:
            raise ValueError(f"split_bytes is {self.split_bytes}; a part has at least one byte")


DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True, slots=True)
class PartOf:
    """The rank that a plan is made for.

    Attributes:
        side: ``source`` or ``destination``.
        rank: the rank, on that side.
    """

    side: Literal["source", "destination"]
    rank: int

    def __str__(self) -> str:
        return f"{self.side} rank {self.rank}"


@dataclass(frozen=True)
class Plan:
    """Transfers in canonical order: by tensor, box, destination and place.

    Attributes:
        tensors: the tensors of the model. For one rank's part in a live refit, only those that it moves.
        transfers: the transfers.
        part: the rank whose transfers these are; None for those of all ranks.
        conversions: the rules of all destinations, by rank, or of the one that the part is for.
    """

    tensors: tuple[TensorSpec, ...]
    transfers: tuple[Transfer, ...]
    part: PartOf | None = None
    conversions: tuple[Conversion, ...] = ()

    @cached_property
    def digest(self) -> str:
        """sha256 over the transfers and rules, as hexadecimal digits."""
        content = hashlib.sha256()
        for item in self.conversions:
            content.update(f"R|{item.storage}|{item}\n".encode())
        for link, digest in sorted(self.digests.items()):
            content.update(f"L|{link}|{digest}\n".encode())
        return content.hexdigest()

    @cached_property
    def digests(self) -> Mapping[Link, str]:
        """sha256 over the transfers of each link, as hexadecimal digits. Both ends of a link compute it."""
        shapes = {spec.name: spec.shape for spec in self.tensors}
        links = {link: hashlib.sha256() for link in self.by_link}
        for link, items in self.by_link.items():
            for item in items:
                box = item.box
                links[link].update(
                    f"X|{box.tensor}{shapes[box.tensor]}{box.start}{box.stop}|{_view_text(item.read)}|"
                    f"{_view_text(item.write)}|{item.source_dtype}|{item.dtype}\n".encode()
                )
        return {link: content.hexdigest() for link, content in links.items()}

    @cached_property
    def by_link(self) -> Mapping[Link, Sequence[Transfer]]:
        """The transfers of each used link, in canonical order; links are sorted."""
        found: dict[Link, list[Transfer]] = defaultdict(list)
        for item in self.transfers:
            found[item.source, item.destination].append(item)
        return dict(sorted(found.items()))

    @cached_property
    def nbytes(self) -> int:
        """Bytes written by all transfers together."""
        return sum(item.nbytes for item in self.transfers)

    def bytes_by_source(self) -> dict[int, int]:
        """Bytes that each source sends."""
        total: dict[int, int] = defaultdict(int)
        for item in self.transfers:
            total[item.source] += item.nbytes
        return dict(total)


def _view_text(view: View) -> str:
    return f"{view.storage}@{view.offset}{view.shape}{view.strides}"


def make_plan(
    tensors: Sequence[TensorSpec],
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Plans how every wanted box is assembled from held ones.

    Args:
        tensors: all tensors of the model; dtypes are those of the destination where the two differ.
        sources: what each source rank holds, in any order.
        destinations: what each destination rank wants, in any order.
        options: how to plan.

    Returns:
        The plan. It does not depend on the order of the manifests.

    Raises:
        CoverageError: if no source holds some wanted element; names tensor, box and destination rank.
    """
    index = index_of(sources)
    transfers = [item for wanted in destinations for item in plan_for((), index, wanted, options)[0].transfers]
    return Plan(
        tuple(sorted(tensors)), tuple(sorted(transfers, key=canonical)), conversions=conversions_of(destinations)
    )


def make_part(
    tensors: Sequence[TensorSpec],
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    of: PartOf,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """The part of :func:`make_plan`'s plan for one rank; same arguments and errors.

    A destination's part does not depend on other destinations. A source's part is what all of them request of it.

    Args:
        tensors: all tensors of the model.
        sources: what each source rank holds, in any order.
        destinations: what each destination rank wants, in any order.
        of: the rank.
        options: how to plan.
    """
    if of.side == "source":
        whole = make_plan(tensors, sources, destinations, options)
        return Plan(whole.tensors, tuple(item for item in whole.transfers if item.source == of.rank), of)
    (wanted,) = (manifest for manifest in destinations if manifest.rank == of.rank)
    return plan_for(tensors, index_of(sources), wanted, options)[0]


def index_of(sources: Sequence[Manifest]) -> SourceIndex:
    """The index from which all destinations of a cluster plan.

    Raises:
        ProofError: if a source's storage has a conversion rule: only destinations convert.
    """
    return SourceIndex([holder_of(manifest) for manifest in sources])


def plan_for(
    tensors: Sequence[TensorSpec], sources: SourceIndex, wanted: Manifest, options: PlanOptions
) -> tuple[Plan, Mapping[int, Sequence[Request]]]:
    """Plans for one destination.

    Args:
        tensors: all tensors of the model.
        sources: what sources hold; sources that do not overlap may be left out.
        wanted: what the destination wants.
        options: how to plan.

    Returns:
        The plan, and its requests to each source, by rank.

    Raises:
        CoverageError: if no source holds some wanted element; names tensor, box and destination rank.
    """
    asked = plan_destination(wanted.rank, wanted.host, layout_of(wanted), sources, options.split_bytes)
    found = [
        item
        for source, requests in asked.items()
        for item in transfers_of(requests, sources.layouts[source], source, wanted.rank)
    ]
    of = PartOf("destination", wanted.rank)
    return Plan(tuple(sorted(tensors)), tuple(sorted(found, key=canonical)), of, wanted.conversions), asked


def conversions_of(destinations: Sequence[Manifest]) -> tuple[Conversion, ...]:
    """The rules of all destinations, sorted by rank."""
    ordered = sorted(destinations, key=lambda manifest: manifest.rank)
    return tuple(item for manifest in ordered for item in manifest.conversions)
