"""The receiving side: unpacks packets and checks that every wanted box reads back as it was sent.

An :class:`Unpacker` unpacks the boxes of arriving packets into memory that serves no requests meanwhile. Of a packet
that holds what differs from a base version, it first completes the load from its own copy of the base. It reads back
every wanted box, at the place that the destination's *manifest* states, not the plan. :meth:`Unpacker.verify` compares
digests.

[Note: reading back] Boxes are read back in a few parts, each as soon as the last of its bytes have arrived, so that
only the last part delays a version. Reading all of them at the end took a tenth of a push. No load writes where another
one has written (the proof says so), so a box does not change once it is complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import DigestError, PlanMismatchError, StaleVersionError, TransferError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Manifest, Placement
from megatron_patches.refit.memory.base_copy import BaseCopy, renewed
from megatron_patches.refit.memory.delta import Base, Delta
from megatron_patches.refit.memory.loads import Load, LoadKey, Terms, cut_into_loads
from megatron_patches.refit.memory.packets import Packet, payload_bytes
from megatron_patches.refit.memory.port_choice import open_port
from megatron_patches.refit.memory.ports import Batch, Done, Memory, Payload, Pending, Piece, Port
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.planning.plan import Link, Plan

_PARTS = 8


class Unpacker:
    """Receives one version at a time into memory that serves no requests meanwhile.

    Args:
        plan: the plan.
        manifest: what this rank wants and where.
        terms: the agreed terms, by link; None for one packet per link.
        pool: staging memory of the party, which a GPU needs.

    Attributes:
        verified: digests of the boxes of the manifest, of the last version that was verified.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        terms: Mapping[Link, Terms] | None = None,
        pool: StagingPool | None = None,
    ) -> None:
        self._plan, self._manifest, self._pool = plan, manifest, pool
        self.verified: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        shapes = {spec.name: spec.shape for spec in plan.tensors}
        mine = (item for item in plan.transfers if item.destination == manifest.rank)
        self._expected = {load.key: load for loads in cut_into_loads(mine, terms).values() for load in loads}
        self._batches = {key: load.batch(shapes, read=False) for key, load in self._expected.items()}
        self._wanted = [
            Piece(item.view, manifest.storage[item.view.storage].dtype, item.box, shapes[item.box.tensor])
            for item in manifest.placements
        ]
        self._version = 0
        self._port: Port | None = None
        self._base: BaseCopy | None = None  # of the version under way
        self._kept: BaseCopy | None = None  # the same, or that of an earlier version: ports cache what they compute
        self._arrived: dict[LoadKey, None] = {}  # in their order
        self._sent = np.zeros(len(self._wanted), dtype=np.uint64)  # sums of the digests that came with the boxes
        self._awaited: list[int] = []  # of each part, how many loads have not arrived
        self._reading: dict[int, Pending[list[int]]] = {}  # parts that are being read back

    @property
    def expected(self) -> int:
        """Number of packets that the plan sends here."""
        return len(self._expected)

    def begin(self, version: int, memory: Memory, base: Base | None = None) -> None:
        """Prepares to receive ``version`` into ``memory``, and forgets what has arrived of another version.

        Args:
            version: number of the weights.
            memory: the storages of the manifest, by name; always of one kind.
            base: what packets may be relative to; its memory may be ``memory``. None if all must be whole.

        Raises:
            TransferError: if the kind of memory differs from that of an earlier version, or that of the base.
        """
        self._version, self._arrived, self._reading = version, {}, {}
        self._sent[:] = 0
        self._awaited = [len(part.loads) for part in self._parts]
        if self._port is None:
            self._port = open_port(memory, f"destination rank {self._manifest.rank}", self._pool)
        else:
            self._port.renew(memory)
        self._base = None
        if base is not None:
            self._base = self._kept = renewed(self._kept, base, self._port, self._here, self._pool)

    def storages(self, load: Load) -> Memory:
        """The storages, among which are those that the boxes of a load belong to."""
        return self._open.storages(self._batches[load.key])

    def accept(self, packet: Packet, payload: Payload) -> Pending[None]:
        """Starts to unpack a packet.

        Args:
            packet: the packet.
            payload: its payload, which may be overwritten once this has ended. It is empty for a direct load, whose
                boxes are already in place.

        Raises:
            PlanMismatchError: if the sender follows another plan.
            StaleVersionError: if it carries another version than the one begun.
            TransferError: if it differs from what the plan says that this source sends.
        """
        load = self.load_of(packet)
        nbytes = 0 if load.direct else payload_bytes(load, packet.delta)
        for came, planned, what in (
            (len(payload), nbytes, "bytes"),
            (len(packet.digests), len(load.items), "digests"),
        ):
            if came != planned:
                raise TransferError(
                    f"packet {packet.number} from source rank {packet.source}, to {self._here}, has {came} {what} and "
                    f"not the {planned} planned"
                )
        if packet.delta is not None:
            unpacking = self._complete(packet, packet.delta, load, payload)
        elif load.direct:
            unpacking = Done(None)
        else:
            unpacking = self._open.unpack(self._batches[load.key], payload)
        self._arrived[load.key] = None
        homes = self._homes[load.key]
        np.add.at(self._sent, homes.placements, np.array(packet.digests, dtype=np.uint64)[homes.boxes])  # wraps
        for number in self._parts_of[load.key]:
            self._awaited[number] -= 1
            if self._awaited[number] == 0:  # the port reads what it has been given to unpack
                self._reading[number] = self._open.digest(self._parts[number].batch)
        return unpacking

    def _complete(self, packet: Packet, delta: Delta, load: Load, payload: Payload) -> Pending[None]:
        """Starts to unpack a load of which the changed elements have arrived."""
        if self._base is None or self._base.version != delta.base:
            held = "none" if self._base is None else f"version {self._base.version}"
            raise TransferError(
                f"source rank {packet.source} sent {self._here}, which holds {held}, what changed since version "
                f"{delta.base}"
            )
        return self._base.unpack(load, self._batches[load.key], payload, delta.changed)

    @property
    def _here(self) -> str:
        return f"destination rank {self._manifest.rank}"

    @property
    def _open(self) -> Port:
        if self._port is None:
            raise TransferError(f"{self._here} has begun no version")
        return self._port

    def load_of(self, packet: Packet) -> Load:
        """The planned load of a packet, of which the digests are ignored. Raises as :meth:`accept`."""
        here = self._here
        sender = f"source rank {packet.source}"
        agreed = self._plan.digests.get((packet.source, self._manifest.rank), "")
        if packet.plan_digest != agreed:
            raise PlanMismatchError(f"{sender} follows plan {packet.plan_digest[:12]}, {here} plan {agreed[:12]}")
        if packet.version != self._version:
            raise StaleVersionError(
                f"{sender} sent version {packet.version} to {here}, which receives version {self._version}"
            )
        key = packet.source, packet.destination, packet.number
        load = self._expected.get(key)
        if load is None:
            raise TransferError(
                f"{here} got packet {packet.number} for rank {packet.destination} from {sender}, which is not planned"
            )
        if key in self._arrived:
            raise TransferError(f"{here} got packet {packet.number} of {sender} twice")
        return load

    def verify(self) -> None:
        """Compares every wanted box with what was sent.

        Raises:
            TransferError: if a packet has not arrived; names a box in it.
            DigestError: if a box reads back differently from what was sent; names it and its sources.
        """
        missing = [key for key in sorted(self._expected) if key not in self._arrived]
        if missing:
            source, _, number = missing[0]
            raise TransferError(
                f"destination rank {self._manifest.rank} never got {self._expected[missing[0]].items[0].box}, which "
                f"source rank {source} sends in packet {number}, of version {self._version}"
            )
        found = np.zeros_like(self._sent)
        for number, part in enumerate(self._parts):
            reading = self._reading.get(number) or self._open.digest(part.batch)  # the latter if no load has any of it
            found[part.placements] = reading.result()
        for home in np.flatnonzero(found != self._sent):
            self._refuse(int(home), int(found[home]), int(self._sent[home]))
        self.verified = found

    def close(self) -> None:
        """Waits until unpacking has ended, returns leased memory, and forgets the base."""
        if self._port is not None:
            self._port.close()
        base, self._base = self._base, None
        if base is not None:
            base.close()

    @cached_property
    def _homes(self) -> Mapping[LoadKey, _Homes]:
        """For each load, the placements that contain its boxes."""
        known: dict[tuple[str, str], list[tuple[int, Placement]]] = defaultdict(list)
        for number, placement in enumerate(self._manifest.placements):
            known[placement.box.tensor, placement.view.storage].append((number, placement))

        def homes(load: Load) -> _Homes:
            pairs = [
                (index, number)
                for index, item in enumerate(load.items)
                for number, home in known[item.box.tensor, item.write.storage]
                if home.box.contains(item.box) and home.view.cut(home.box, item.box) == item.write
            ]
            columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            return _Homes(columns[:, 0], columns[:, 1])

        return {key: homes(load) for key, load in self._expected.items()}

    @cached_property
    def _parts(self) -> Sequence[_Part]:
        """The parts in which the placements are read back, of about equal size, in the order in which they arrive."""
        loads_of: dict[int, list[Load]] = defaultdict(list)
        for key, homes in self._homes.items():
            for home in np.unique(homes.placements):
                loads_of[int(home)].append(self._expected[key])
        of_link = Counter(load.key[:2] for load in self._expected.values())

        def arrives(home: int) -> tuple[bool, float]:
            # Links send at the same time. Of each, packed loads may come last: see send_version in transports/pump.py.
            return max(
                ((not load.direct, load.number / of_link[load.key[:2]]) for load in loads_of[home]),
                default=(False, 0.0),
            )

        sizes = [piece.box.volume * itemsize(piece.dtype) for piece in self._wanted]
        homes_of: list[list[int]] = [[]]
        size, filled = sum(sizes), 0
        for home in sorted(range(len(sizes)), key=arrives):
            if filled * _PARTS >= size * len(homes_of):
                homes_of.append([])
            homes_of[-1].append(home)
            filled += sizes[home]
        return [
            _Part(
                np.array(homes, dtype=np.int64),
                Batch(tuple(self._wanted[home] for home in homes)),
                frozenset(load.key for home in homes for load in loads_of[home]),
            )
            for homes in homes_of
        ]

    @cached_property
    def _parts_of(self) -> Mapping[LoadKey, Sequence[int]]:
        """For each load, numbers of the parts that have any of its boxes."""
        found: dict[LoadKey, list[int]] = {key: [] for key in self._expected}
        for number, part in enumerate(self._parts):
            for key in part.loads:
                found[key].append(number)
        return found

    def _refuse(self, number: int, found: int, expected: int) -> None:
        """Raises an error for a placement that does not hold what was sent."""
        placement = self._manifest.placements[number]
        sources = sorted({key[0] for key, homes in self._homes.items() if number in homes.placements})
        raise DigestError(
            f"{placement.box} in {placement.view.storage} of destination rank {self._manifest.rank} has digest "
            f"{found:016x}, but source ranks {sources} sent {expected:016x}; version {self._version} is not taken"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Homes:
    """The placements that contain the boxes of a load. Several placements may contain one box.

    Attributes:
        boxes: their numbers in the load.
        placements: for each of ``boxes``, the number of a placement in the manifest.
    """

    boxes: NDArray[np.int64]
    placements: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Placements that are read back together.

    Attributes:
        placements: their numbers in the manifest.
        batch: what they contain.
        loads: the loads that bring it.
    """

    placements: NDArray[np.int64]
    batch: Batch
    loads: frozenset[LoadKey]
