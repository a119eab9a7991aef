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

import msgspec

from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.conversion import Conversion
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.planning.layouts import Receiver, holder_of, receiver_of
from megatron_patches.refit.planning.local import SourceIndex, plan_destination
from megatron_patches.refit.planning.tensors import TensorGrid, fold_tensors, unfold_tensors
from megatron_patches.refit.planning.transfers import Moves, Request, Transfer, canonical, moves_of

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
    """What moves.

    Attributes:
        grids: the tensors of the model.
        moves: what moves, as grids. Those of a link are in the order of the destination's requests.
        part: the rank whose moves these are; None for those of all ranks.
        conversions: the rules of all destinations, by rank, or of the one that the part is for.
    """

    grids: tuple[TensorGrid, ...]
    moves: tuple[Moves, ...]
    part: PartOf | None = None
    conversions: tuple[Conversion, ...] = ()

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the model, by name."""
        return tuple(sorted(unfold_tensors(self.grids), key=lambda spec: spec.name))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The moves one by one, in canonical order: by tensor, box, destination and place."""
        return tuple(sorted((item for moves in self.moves for item in moves.transfers()), key=canonical))

    @cached_property
    def digest(self) -> str:
        """sha256 over the moves and rules, as hexadecimal digits."""
        content = hashlib.sha256()
        for item in self.conversions:
            content.update(f"R|{item.storage}|{item}\n".encode())
        for link, digest in self.digests.items():
            content.update(f"L|{link}|{digest}\n".encode())
        return content.hexdigest()

    @cached_property
    def digests(self) -> Mapping[Link, str]:
        """sha256 over the moves of each link and the model's tensors, as hexadecimal digits. Both ends compute it."""
        tensors = hashlib.sha256(msgspec.msgpack.encode(self.grids))
        found = {}
        for link, moves in self.by_link.items():
            content = tensors.copy()
            content.update(msgspec.msgpack.encode(moves))
            found[link] = content.hexdigest()
        return found

    @cached_property
    def by_link(self) -> Mapping[Link, Sequence[Moves]]:
        """The moves of each used link; links are sorted."""
        found: dict[Link, list[Moves]] = defaultdict(list)
        for item in self.moves:
            found[item.source, item.destination].append(item)
        return dict(sorted(found.items()))

    @cached_property
    def nbytes_by_link(self) -> Mapping[Link, int]:
        """Bytes that each used link carries; links are sorted."""
        return {link: sum(item.nbytes for item in moves) for link, moves in self.by_link.items()}

    @cached_property
    def nbytes(self) -> int:
        """Bytes written by all moves together."""
        return sum(self.nbytes_by_link.values())

    def bytes_by_source(self) -> dict[int, int]:
        """Bytes that each source sends."""
        total: dict[int, int] = defaultdict(int)
        for (source, _), nbytes in self.nbytes_by_link.items():
            total[source] += nbytes
        return dict(total)


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
    index, grids = index_of(sources), _grids(tensors)
    moves = [item for wanted in destinations for item in plan_for(grids, index, receiver_of(wanted), options)[0].moves]
    return Plan(grids, tuple(moves), conversions=conversions_of(destinations))


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
        return Plan(whole.grids, tuple(item for item in whole.moves if item.source == of.rank), of)
    (wanted,) = (manifest for manifest in destinations if manifest.rank == of.rank)
    return plan_for(_grids(tensors), index_of(sources), receiver_of(wanted), options)[0]


def _grids(tensors: Sequence[TensorSpec]) -> tuple[TensorGrid, ...]:
    """All tensors of a model in compact form, which does not depend on their order."""
    return fold_tensors(sorted(tensors, key=lambda spec: spec.name))


def index_of(sources: Sequence[Manifest]) -> SourceIndex:
    """The index from which all destinations of a cluster plan.

    Raises:
        ProofError: if a source's storage has a conversion rule: only destinations convert.
    """
    return SourceIndex([holder_of(manifest) for manifest in sources])


def plan_for(
    grids: tuple[TensorGrid, ...], sources: SourceIndex, wanted: Receiver, options: PlanOptions
) -> tuple[Plan, Mapping[int, Sequence[Request]]]:
    """Plans for one destination.

    Args:
        grids: all tensors of the model.
        sources: what sources hold; sources that do not overlap may be left out.
        wanted: what the destination wants.
        options: how to plan.

    Returns:
        The plan, and its requests to each source, by rank.

    Raises:
        CoverageError: if no source holds some wanted element; names tensor, box and destination rank.
    """
    manifest = wanted.manifest
    asked = plan_destination(manifest.rank, manifest.host, wanted.layout, sources, options.split_bytes)
    moves = [
        item
        for source, requests in asked.items()
        for item in moves_of(requests, sources.layouts[source], source, manifest.rank)
    ]
    return Plan(grids, tuple(moves), PartOf("destination", manifest.rank), manifest.conversions), asked


def conversions_of(destinations: Sequence[Manifest]) -> tuple[Conversion, ...]:
    """The rules of all destinations, sorted by rank."""
    ordered = sorted(destinations, key=lambda manifest: manifest.rank)
    return tuple(item for manifest in ordered for item in manifest.conversions)
