"""Pairs what is held with what is wanted: which rank sends which part of which box to whom, and in which round.

Pure and deterministic: from the same manifests every party computes the same plan alone, and compares
:attr:`Plan.digest` with the others before the first byte moves.

1. The distinct boxes that sources hold of a tensor are intersected with each wanted box. Where sources cut the
   tensor differently the intersection is refined, so that every *cell* is held whole by each of its candidates.
2. A cell held by several ranks (TP-, ETP- or DP-peers with the same bytes) is cut among them when it is large
   enough, and each part goes to the least loaded candidate, those on the receiver's host first, largest parts first.
3. Parts that one rank sends to one destination and that form a larger box are joined, then cut to the staging
   budget and dealt into rounds in which no party stages more than its budget.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_patches.refit.boxes import Box, TensorSpec, View
from megatron_patches.refit.conversion import Conversion
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.pairing import Pair, deal_rounds, pair_up


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan.

    Attributes:
        staging_bytes: bytes that one party may stage in one round, as source or as destination.
        split_bytes: cells of at least twice this size are cut among the ranks that hold them.
        conversions: pairs (source dtype, dtype that arrives) that may be converted on the way; all else must be equal.
        allow_narrowing: whether a destination's rule may go through a type that does not hold every value sent.
        bound_destinations: whether destinations stage too. A file does not.
    """

    staging_bytes: int = 256 << 20
    split_bytes: int = 1 << 20
    conversions: frozenset[tuple[str, str]] = frozenset()
    allow_narrowing: bool = False
    bound_destinations: bool = True

    def __post_init__(self) -> None:
        if self.staging_bytes < 8 or self.split_bytes < 1:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes} and split_bytes is {self.split_bytes}; "
                "a round must hold one element of 8 bytes, and a part one byte"
            )


DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part of one box on its way.

    Attributes:
        round: number of the round in which it moves, from 0.
        source: rank that sends it.
        destination: rank, on the other side, that receives it.
        box: what it is.
        read: where it lies at the source.
        write: where it goes at the destination.
        source_dtype: element type at the source.
        dtype: element type in which it arrives at the destination.
    """

    round: int
    source: int
    destination: int
    box: Box
    read: View
    write: View
    source_dtype: str
    dtype: str

    @property
    def staged_bytes(self) -> int:
        """Bytes it takes where the two dtypes need the more."""
        return self.box.volume * max(itemsize(self.source_dtype), itemsize(self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.box.volume * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class PartOf:
    """The rank that a part of a plan is made for.

    Attributes:
        side: ``source`` or ``destination``.
        rank: the rank, on that side.
    """

    side: Literal["source", "destination"]
    rank: int

    def __str__(self) -> str:
        return f"{self.side} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class PartInfo:
    """Which part of which plan.

    Attributes:
        of: the rank that it is for.
        whole_digest: digest of the whole plan.
        whole_rounds: rounds of the whole plan.
    """

    of: PartOf
    whole_digest: str
    whole_rounds: int


@dataclass(frozen=True)
class Plan:
    """All transfers of one refit, or those of one rank, in canonical order: by tensor, box, destination and place.

    Attributes:
        tensors: all tensors of the model.
        transfers: the transfers.
        part: None for a whole plan.
        conversions: the rules of all destinations, or of the one that the part is for, by rank.
    """

    tensors: tuple[TensorSpec, ...]
    transfers: tuple[Transfer, ...]
    part: PartInfo | None = None
    conversions: tuple[Conversion, ...] = ()

    @cached_property
    def digest(self) -> str:
        """sha256 over everything in the whole plan, as hexadecimal digits."""
        if self.part is not None:
            return self.part.whole_digest
        content = _PlanHash(self.tensors, self.conversions)
        for item in self.transfers:
            content.add(item)
        return content.result()

    @property
    def rounds(self) -> int:
        """Number of rounds of the whole plan."""
        if self.part is not None:
            return self.part.whole_rounds
        return max((item.round for item in self.transfers), default=-1) + 1

    @cached_property
    def nbytes(self) -> int:
        """Bytes written by all transfers together. Every push reports it, and of a large cluster it takes 0.3 s."""
        return sum(item.nbytes for item in self.transfers)

    def sent_by(self, rank: int) -> list[list[Transfer]]:
        """What rank ``rank`` sends, by round."""
        rounds: list[list[Transfer]] = [[] for _ in range(self.rounds)]
        for item in self.transfers:
            if item.source == rank:
                rounds[item.round].append(item)
        return rounds

    def bytes_by_source(self) -> dict[int, int]:
        """Bytes that each source sends."""
        total: dict[int, int] = defaultdict(int)
        for item in self.transfers:
            total[item.source] += item.nbytes
        return dict(total)


class _PlanHash:
    """Hashes a plan, transfer by transfer."""

    def __init__(self, tensors: Sequence[TensorSpec], conversions: Sequence[Conversion]) -> None:
        self._content = hashlib.sha256()
        for spec in tensors:
            self._content.update(f"T|{spec.name}|{spec.shape}|{spec.dtype}\n".encode())
        for item in conversions:
            self._content.update(f"R|{item.storage}|{item}\n".encode())

    def add(self, item: Transfer) -> None:
        self._content.update(
            f"X|{item.round}|{item.source}|{item.destination}|{item.box.tensor}{item.box.start}{item.box.stop}|"
            f"{_view_text(item.read)}|{_view_text(item.write)}|{item.source_dtype}|{item.dtype}\n".encode()
        )

    def result(self) -> str:
        return self._content.hexdigest()


def _view_text(view: View) -> str:
    return f"{view.storage}@{view.offset}{view.shape}{view.strides}"


def make_plan(
    tensors: Sequence[TensorSpec],
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Plans how every wanted box is put together from held ones.

    Args:
        tensors: all tensors of the model; dtypes are those of the destination where the two differ.
        sources: what each source rank holds, in any order.
        destinations: what each destination rank wants, in any order.
        options: budgets and allowed conversions.

    Returns:
        The plan; the same for every order of the manifests.

    Raises:
        CoverageError: if some wanted element is held by nobody; names tensor, box and destination rank.
    """
    transfers = tuple(_transfer(*item) for item in _dealt(sources, destinations, options))
    return Plan(tuple(sorted(tensors)), transfers, conversions=conversions_of(destinations))


def make_part(
    tensors: Sequence[TensorSpec],
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    of: PartOf,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """What :func:`make_plan` plans for one rank, with the digest of the whole; arguments and errors are the same.

    Who sends what is decided for all ranks, as it has to be where loads are balanced; the transfers, which are most
    of the work and of the memory, are made for this rank alone.

    Args:
        tensors: all tensors of the model.
        sources: what each source rank holds, in any order.
        destinations: what each destination rank wants, in any order.
        of: the rank.
        options: budgets and allowed conversions.
    """
    ordered = tuple(sorted(tensors))
    conversions = conversions_of(destinations)
    content = _PlanHash(ordered, conversions)
    mine: list[Transfer] = []
    rounds = 0
    for number, pair in _dealt(sources, destinations, options):
        transfer = _transfer(number, pair)
        content.add(transfer)
        rounds = max(rounds, number + 1)
        if of.rank == (transfer.source if of.side == "source" else transfer.destination):
            mine.append(transfer)
    own = tuple(item for item in conversions if of == PartOf("destination", item.rank))
    return Plan(ordered, tuple(mine), PartInfo(of, content.result(), rounds), own)


def conversions_of(destinations: Sequence[Manifest]) -> tuple[Conversion, ...]:
    """The rules of all destinations, by rank, whatever the order of the manifests."""
    ordered = sorted(destinations, key=lambda manifest: manifest.rank)
    return tuple(item for manifest in ordered for item in manifest.conversions)


def _dealt(
    sources: Sequence[Manifest], destinations: Sequence[Manifest], options: PlanOptions
) -> Iterator[tuple[int, Pair]]:
    """Every pair, with its round, in canonical order."""
    pairs = pair_up(sources, destinations, options.split_bytes)
    for tensor in deal_rounds(pairs, options.staging_bytes, options.bound_destinations):
        yield from tensor


def _transfer(number: int, pair: Pair) -> Transfer:
    held, wanted = pair.source.placement, pair.destination.placement
    return Transfer(
        round=number,
        source=pair.source.rank,
        destination=pair.destination.rank,
        box=pair.box,
        read=held.view.cut(held.box, pair.box),
        write=wanted.view.cut(wanted.box, pair.box),
        source_dtype=pair.source.dtype,
        dtype=pair.destination.dtype,
    )
