"""Boxes packed for the way: what every transport carries, and the steps on both sides that all transports share.

A :class:`Sender` packs what it sends in one round to one destination into a :class:`Packet`, box after box, and
digests each box while packing. An :class:`Unpacker` puts the boxes of arriving packets into memory of the
destination that does not serve yet, and :meth:`Unpacker.verify` reads every wanted box back, at the place that the
destination's *manifest* says and not the plan, and compares digests. How a packet travels is a transport's business.

Memories are flat numpy arrays of unsigned integers as wide as the elements: bits are moved, never values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.digest import combine, digest_array
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import DigestError, PlanMismatchError, StaleVersionError, TransferError
from megatron_patches.refit.manifest import Manifest, Placement
from megatron_patches.refit.plan import Plan, Transfer

Bits = NDArray[np.unsignedinteger]
Memory = Mapping[str, Bits]


@dataclass(frozen=True, slots=True)
class Part:
    """One box in a packet.

    Attributes:
        box: what it is.
        dtype: its element type.
        digest: its digest, computed from what the sender read.
    """

    box: Box
    dtype: str
    digest: int


@dataclass(frozen=True, slots=True)
class Packet:
    """All that one source sends to one destination in one round.

    Attributes:
        plan_digest: digest of the plan that the sender follows.
        version: version of the weights.
        round: number of the round.
        source: rank that sends.
        destination: rank that receives.
        parts: the boxes, in the plan's order.
        payload: their elements, one box after another, each in row-major order.
    """

    plan_digest: str
    version: int
    round: int
    source: int
    destination: int
    parts: tuple[Part, ...]
    payload: bytes


class Sender:
    """The side of one source rank.

    Args:
        plan: the plan.
        rank: this rank, as a source.
        memory: its storages, by the names of its manifest.
    """

    def __init__(self, plan: Plan, rank: int, memory: Memory) -> None:
        self._plan, self._rank, self._memory = plan, rank, memory
        self._shapes = {spec.name: spec.shape for spec in plan.tensors}
        self._rounds = plan.sent_by(rank)

    def pack(self, number: int, version: int) -> Iterator[Packet]:
        """The packets of round ``number``, one a destination, in the order of destinations.

        Raises:
            TransferError: if a box would have to be converted, or a storage has elements of another width.
        """
        groups: dict[int, list[Transfer]] = defaultdict(list)
        for item in self._rounds[number]:
            groups[item.destination].append(item)
        for destination, items in sorted(groups.items()):
            parts, chunks = [], []
            for item in items:
                if item.source_dtype != item.dtype:
                    raise TransferError(
                        f"{item.box} is {item.source_dtype} on source rank {self._rank} and {item.dtype} on "
                        f"destination rank {destination}; transports move bits and convert nothing"
                    )
                where = f"source rank {self._rank}"
                values = np.ascontiguousarray(elements(item.read, self._memory, item.dtype, where))
                parts.append(Part(item.box, item.dtype, digest_array(values, item.box, self._shapes[item.box.tensor])))
                chunks.append(values.tobytes())
            yield Packet(self._plan.digest, version, number, self._rank, destination, tuple(parts), b"".join(chunks))


class Unpacker:
    """Receives one version at a time into memory that does not serve.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
    """

    def __init__(self, plan: Plan, manifest: Manifest) -> None:
        self._plan, self._manifest = plan, manifest
        self._shapes = {spec.name: spec.shape for spec in plan.tensors}
        self._expected: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for item in plan.transfers:
            if item.destination == manifest.rank:
                self._expected[item.source, item.round].append(item)
        self._version = 0
        self._incoming: Memory = {}
        self._arrived: dict[tuple[int, int], tuple[Part, ...]] = {}

    @property
    def expected(self) -> list[tuple[int, int]]:
        """(round, source) of every packet that the plan sends here, in the order in which to take them."""
        return sorted((number, source) for source, number in self._expected)

    def begin(self, version: int, memory: Memory) -> None:
        """Makes ready to receive ``version`` into ``memory``; forgets what has arrived of another.

        Args:
            version: number of the weights.
            memory: the storages of the manifest, by name.
        """
        self._version, self._incoming, self._arrived = version, memory, {}

    def accept(self, packet: Packet) -> None:
        """Unpacks a packet.

        Raises:
            PlanMismatchError: if the sender follows another plan.
            StaleVersionError: if it carries another version than the one begun.
            TransferError: if it is not what the plan says that this source sends in this round.
        """
        here = f"destination rank {self._manifest.rank}"
        sender = f"source rank {packet.source}"
        if packet.plan_digest != self._plan.digest:
            raise PlanMismatchError(
                f"{sender} follows plan {packet.plan_digest[:12]}, {here} plan {self._plan.digest[:12]}"
            )
        if packet.version != self._version:
            raise StaleVersionError(
                f"{sender} sent version {packet.version} to {here}, which receives version {self._version}"
            )
        items = self._expected.get((packet.source, packet.round), [])
        if packet.destination != self._manifest.rank or not items:
            raise TransferError(
                f"{here} got a packet for rank {packet.destination} from {sender} in round {packet.round}, in which "
                "the plan sends it none"
            )
        if (packet.source, packet.round) in self._arrived:
            raise TransferError(f"{here} got the packet of {sender} in round {packet.round} twice")
        _check_parts(packet, items, f"{sender}, to {here}, in round {packet.round}")
        position = 0
        for item in items:
            width = itemsize(item.dtype)
            values = np.frombuffer(packet.payload, f"u{width}", item.box.volume, position).reshape(item.box.shape)
            elements(item.write, self._incoming, item.dtype, here)[...] = values
            position += values.nbytes
        self._arrived[packet.source, packet.round] = packet.parts

    def verify(self) -> None:
        """Compares every wanted box with what was sent.

        Raises:
            TransferError: if a packet has not arrived; names a box in it.
            DigestError: if a box reads back otherwise than it was sent; names it and its sources.
        """
        missing = [key for key in sorted(self._expected) if key not in self._arrived]
        if missing:
            source, number = missing[0]
            raise TransferError(
                f"destination rank {self._manifest.rank} never got {self._expected[missing[0]][0].box}, which source "
                f"rank {source} sends in round {number}, of version {self._version}"
            )
        sent = self._sent_digests()
        for placement in self._manifest.placements:
            self._compare(placement, sent[placement.box, placement.view])

    def _sent_digests(self) -> Mapping[tuple[Box, View], list[tuple[int, int]]]:
        """(source, digest) of every part of each wanted box, by box and place."""
        homes: dict[tuple[str, str], list[Placement]] = defaultdict(list)
        for placement in self._manifest.placements:
            homes[placement.box.tensor, placement.view.storage].append(placement)
        sent: dict[tuple[Box, View], list[tuple[int, int]]] = defaultdict(list)
        for (source, number), parts in self._arrived.items():
            for item, part in zip(self._expected[source, number], parts, strict=True):
                for home in homes[part.box.tensor, item.write.storage]:
                    if home.box.contains(part.box) and home.view.cut(home.box, part.box) == item.write:
                        sent[home.box, home.view].append((source, part.digest))
        return sent

    def _compare(self, placement: Placement, sent: Sequence[tuple[int, int]]) -> None:
        box, storage = placement.box, self._manifest.storage[placement.view.storage]
        values = elements(placement.view, self._incoming, storage.dtype, f"destination rank {self._manifest.rank}")
        found = digest_array(np.ascontiguousarray(values), box, self._shapes[box.tensor])
        expected = combine(digest for _, digest in sent)
        if found != expected:
            raise DigestError(
                f"{box} in {storage.name} of destination rank {self._manifest.rank} has digest {found:016x}, but "
                f"source ranks {sorted({source for source, _ in sent})} sent {expected:016x}; version "
                f"{self._version} is not taken"
            )


def elements(view: View, memory: Memory, dtype: str, where: str) -> Bits:
    """The elements of a view, in place.

    Raises:
        TransferError: if the storage is not there, is not flat, is too short, or has elements of another width.
    """
    storage = memory.get(view.storage)
    width = itemsize(dtype)
    if storage is None or storage.ndim != 1 or storage.dtype != np.dtype(f"u{width}"):
        kind = "is missing" if storage is None else f"is {storage.dtype} of {storage.ndim} dimensions"
        raise TransferError(f"{view.storage} on {where} {kind}; a flat array of u{width} was described ({dtype})")
    low, high = view.span
    if low < 0 or high > storage.size:
        raise TransferError(f"{view.storage} on {where} has {storage.size} elements; the plan uses {low} to {high}")
    steps = [step * width for step in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset :], view.shape, steps)


def _check_parts(packet: Packet, items: Sequence[Transfer], what: str) -> None:
    """The packet must hold exactly the planned boxes, in order, with the planned dtypes."""
    sent = {part.box for part in packet.parts}
    missing = [item.box for item in items if item.box not in sent]
    if missing:
        raise TransferError(f"the packet from {what}, lacks {missing[0]}")
    if len(packet.parts) != len(items):
        raise TransferError(f"the packet from {what}, has {len(packet.parts)} boxes and not the {len(items)} planned")
    for part, item in zip(packet.parts, items, strict=True):
        if part.box != item.box:
            raise TransferError(f"the packet from {what}, has {part.box} in the place of {item.box}")
        if part.dtype != item.dtype:
            raise TransferError(f"the packet from {what}, has {part.box} as {part.dtype}; {item.dtype} is planned")
    size = sum(item.nbytes for item in items)
    if len(packet.payload) != size:
        raise TransferError(f"the packet from {what}, has {len(packet.payload)} bytes and not the {size} planned")
