"""CUDA IPC on one host: the destination copies from the source's GPU to its own, over NVLink if available.

A box that consists of rows on both sides is copied from the source's weights to its place by the GPU's copy engines,
without using a multiprocessor, a slot or packing. That requires weights in memory that other processes can open. Memory
that torch allocates by default is opened by a handle, which is sent like any other bytes. Expandable segments and
symmetric memory are opened by file descriptors, which the destination requests from the source. Weights in other
memory, such as symmetric memory made only for a multi-host fabric, are packed, like boxes that are not rows.

A source's slots are separate device memory, outside torch's allocator. The destination copies a slot when told that it
is full, and then returns it. Processes may number GPUs differently and need not see each other's, so GPUs are
identified by UUID. CUDA is behind :class:`DeviceRuntime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import msgspec
import numpy as np

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.loads import Load, Reach
from megatron_patches.refit.ports import Elements, Memory, Payload, Pending, Spot
from megatron_patches.refit.staging import SLOTS, Lease
from megatron_patches.refit.transports.base import (
    Check,
    Delivery,
    IncomingWire,
    LinkEnd,
    Offer,
    OutgoingWire,
    Place,
    Transport,
)
from megatron_patches.refit.transports.cuda_mapped import Fetch
from megatron_patches.refit.transports.descriptors import Counter, DescriptorServer, take_descriptors
from megatron_patches.refit.transports.direct_copies import DirectCopies, Numbers, Rows


class ExportedMemory(Protocol):
    """Device memory that another process may open."""

    @property
    def handle(self) -> bytes:
        """Handle with which another process opens it."""

    def part(self, start: int, stop: int) -> Payload:
        """Bytes ``start`` to ``stop`` of it."""

    def close(self) -> None:
        """Frees it."""


class OpenedMemory(Protocol):
    """Device memory of another process."""

    @property
    def address(self) -> int:
        """Its address in this process."""

    def close(self) -> None:
        """Waits for copies and closes the memory."""


class Copier(Protocol):
    """Starts copies to this party's device. Addresses are those of this process."""

    def runs(self, sources: Numbers, targets: Numbers, nbytes: Numbers) -> None:
        """Starts to copy runs of bytes, in any order.

        Args:
            sources: ``[runs]``, source address of each.
            targets: ``[runs]``, target address of each.
            nbytes: ``[runs]``, length of each.

        Raises:
            PartyFailedError: if CUDA fails.
        """

    def rows(self, source: int, target: int, rows: Rows) -> None:
        """Starts to copy rows from ``source`` to ``target``, the addresses of the first row; raises as :meth:`runs`."""

    def ended(self) -> Pending[None]:
        """All copies that were started since the last call."""


class Location(msgspec.Struct, frozen=True):
    """Where a storage lies.

    Attributes:
        handle: handle with which other processes open its allocation.
        start: its first byte in the allocation.
    """

    handle: bytes
    start: int


class DeviceRuntime(Protocol):
    """One GPU as seen by one process."""

    @property
    def uuid(self) -> str:
        """The GPU's UUID, equal in all processes."""

    def export(self, nbytes: int) -> ExportedMemory:
        """Allocates memory that other processes can open.

        Raises:
            PartyFailedError: if CUDA fails.
        """

    def locate(self, memory: Memory) -> Mapping[str, Location]:
        """Locations of the storages that other processes can open. Other storages are left out."""

    def open(self, handle: bytes, fetch: Fetch) -> OpenedMemory:
        """Opens memory that another process has exported.

        Args:
            handle: its handle.
            fetch: fetches descriptors from that process, if the handle needs them.

        Raises:
            PartyFailedError: if CUDA fails, or the other process does not provide the descriptors.
        """

    def descriptor(self, number: int) -> int:
        """A descriptor that another process requests, as a handle says; the caller closes it. Called in any thread.

        Raises:
            PartyFailedError: if the number is unknown, or CUDA fails.
        """

    def copier(self) -> Copier:
        """Makes the copier of one link."""

    def allocate(self, nbytes: int) -> Payload:
        """Allocates memory that no other process opens."""

    def address_of(self, memory: Elements | Payload) -> int:
        """Address of memory on this GPU.

        Raises:
            PartyFailedError: if the memory is elsewhere.
        """

    def close(self) -> None:
        """Forgets located memory."""


class _Remote(msgspec.Struct):
    """What a destination must know to open its source's slots."""

    uuid: str
    handle: bytes


class _Told(msgspec.Struct, array_like=True):
    """Where a source's storages lie.

    Attributes:
        handles: handles of the allocations.
        places: for each storage, the index of its handle and its first byte.
    """

    handles: list[bytes]
    places: dict[str, tuple[int, int]]


_decode_remote = msgspec.msgpack.Decoder(_Remote).decode
_decode_told = msgspec.msgpack.Decoder(_Told).decode
_decode_counter = msgspec.msgpack.Decoder(Counter).decode


class CudaIpcTransport(Transport):
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party runs.
        runtime: its GPU.
    """

    one_host = True
    reach = Reach.ROWS

    def __init__(self, place: Place, runtime: DeviceRuntime) -> None:
        self._place, self._pool, self._runtime = place, place.pool, runtime
        self._server: DescriptorServer | None = None
        self._offers: Mapping[int, Offer] = {}
        self._check: Check = lambda: None
        self._hidden: frozenset[str] = frozenset()
        self._located: Mapping[str, Location] = {}
        self._asked: set[object] = set()

    def hidden(self, memory: Memory) -> frozenset[str]:
        """Storages in memory that cannot be exported."""
        self._hidden = frozenset(memory) - frozenset(self._runtime.locate(memory))
        return self._hidden

    def details(self) -> bytes:
        """At a source, where other parties request descriptors."""
        if self._place.party >= self._place.sources:
            return b""
        if self._server is None:
            self._server = DescriptorServer(self._runtime.descriptor)
        return msgspec.msgpack.encode(self._server.counter)

    def connect(self, offers: Mapping[int, Offer], check: Check) -> None:
        """Keeps the sources' offers."""
        self._offers, self._check = offers, check

    def outgoing(self, end: LinkEnd) -> CudaIpcOutgoing:
        """Makes the slots and sends their handle."""
        lease = self._pool.lease(SLOTS * end.slot_bytes, self._runtime.export)
        try:
            remote = _Remote(self._runtime.uuid, lease.buffer.handle)
            frames.send(end.connection, msgspec.msgpack.encode(remote), end.patience)
            # Wait until the slots are open. On failure the destination reports the reason itself.
            frames.receive(end.connection, end.patience)
        except BaseException:
            lease.buffer.close()
            lease.release()
            raise
        return CudaIpcOutgoing(lease, end.slot_bytes, self._locate)

    def incoming(self, end: LinkEnd) -> CudaIpcIncoming:
        """Opens the source's slots."""
        remote = _decode_remote(frames.receive(end.connection, end.patience))
        counter = _decode_counter(self._offers[end.peer].details)

        def fetch(numbers: Sequence[int], use: Callable[[int, int], None]) -> None:
            patience = Patience(self._place.timeout_s, f"source rank {end.peer} to hand out its memory", self._check)
            take_descriptors(counter, numbers, use, patience)

        try:
            opened = self._runtime.open(remote.handle, fetch)
        except PartyFailedError as error:
            raise PartyFailedError(
                f"GPU {self._runtime.uuid} cannot reach memory of GPU {remote.uuid}, of source rank {end.peer}: {error}"
                "; the transport shm asks no GPU for that"
            ) from error
        try:
            frames.send(end.connection, b"opened", end.patience)
            lease = self._pool.lease(SLOTS * end.slot_bytes, self._runtime.allocate)
        except BaseException:
            opened.close()  # otherwise the source's memory would stay in use
            raise

        def open_weights(handle: bytes) -> OpenedMemory:
            try:
                return self._runtime.open(handle, fetch)
            except PartyFailedError as error:
                raise PartyFailedError(
                    f"GPU {self._runtime.uuid} cannot reach the weights of source rank {end.peer} on GPU {remote.uuid} "
                    f"where they lie: {error}; another transport does not ask for that"
                ) from error

        return CudaIpcIncoming(opened, lease, end.slot_bytes, open_weights, self._runtime)

    def _locate(self, memory: Memory, link: object) -> Mapping[str, Location]:
        """Current locations of the storages. Computed once per version for all links, each of which calls it once.

        Raises:
            PartyFailedError: if other processes can no longer open a storage.
        """
        if link in self._asked or not self._asked:
            found = self._runtime.locate(memory)
            lost = sorted(frozenset(memory) - frozenset(found) - self._hidden)
            if lost:
                raise PartyFailedError(
                    f"{lost[0]} (and {len(lost) - 1} more) has moved into memory that other processes cannot open; "
                    "the next push finds another way for it"
                )
            self._located, self._asked = found, set()
        self._asked.add(link)
        return self._located

    def close(self) -> None:
        """Stops providing descriptors."""
        try:
            if self._server is not None:
                self._server.close()
        finally:
            self._runtime.close()


class CudaIpcOutgoing(OutgoingWire):
    """A source's side of a link. The destination does the copying.

    Args:
        lease: the slots.
        slot_bytes: size of one slot.
        locate: returns the locations of storages.
    """

    def __init__(
        self, lease: Lease[ExportedMemory], slot_bytes: int, locate: Callable[[Memory, object], Mapping[str, Location]]
    ) -> None:
        self._lease, self._locate = lease, locate
        self._told: Mapping[str, Location] = {}
        self.slots = [lease.buffer.part(index * slot_bytes, (index + 1) * slot_bytes) for index in range(SLOTS)]

    def begin(self, memory: Memory) -> bytes | None:
        """The locations of storages, if they have changed."""
        found = self._locate(memory, self)
        if found == self._told:
            return None
        self._told = found
        numbers: dict[bytes, int] = {}
        places = {name: (numbers.setdefault(at.handle, len(numbers)), at.start) for name, at in found.items()}
        return msgspec.msgpack.encode(_Told(list(numbers), places))

    def start(self, slot: int, payload: Payload) -> None:
        """Does nothing: the destination copies the slot after the announcement, when packing has ended."""

    def start_direct(self, load: Load, places: Sequence[Spot]) -> None:
        """Does nothing; see :meth:`start`."""

    def close(self) -> None:
        """Frees the memory."""
        self.slots = []
        self._lease.buffer.close()
        self._lease.release()


class CudaIpcIncoming(IncomingWire):
    """A destination's side of a link.

    Args:
        opened: the source's slots.
        lease: this side's slots.
        slot_bytes: size of one slot.
        open_memory: opens memory of the source by its handle.
        runtime: this party's GPU.
    """

    def __init__(
        self,
        opened: OpenedMemory,
        lease: Lease[Payload],
        slot_bytes: int,
        open_memory: Callable[[bytes], OpenedMemory],
        runtime: DeviceRuntime,
    ) -> None:
        self._opened, self._lease, self._slot_bytes = opened, lease, slot_bytes
        self._open, self._address_of, self._copier = open_memory, runtime.address_of, runtime.copier()
        self._allocations: dict[bytes, OpenedMemory] = {}
        self._locations: Mapping[str, Location] = {}
        self._tables: dict[int, DirectCopies] = {}

    def begin(self, told: bytes) -> None:
        """Opens the allocations of the source's storages, and closes those that are no longer used.

        Raises:
            PartyFailedError: if CUDA fails, or the source does not provide descriptors.
        """
        content = _decode_told(told)
        self._locations = {
            name: Location(content.handles[number], start) for name, (number, start) in content.places.items()
        }
        for handle in [handle for handle in self._allocations if handle not in content.handles]:
            self._allocations.pop(handle).close()
        for handle in content.handles:
            if handle not in self._allocations:
                self._allocations[handle] = self._open(handle)

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Copies into this side's slot of the same number, which is free if the source's is."""
        start = slot * self._slot_bytes
        target = self._lease.buffer[start : start + nbytes]
        run = (self._opened.address + start, self._address_of(target), nbytes)
        self._copier.runs(*np.array(run, dtype=np.int64).reshape(3, 1))
        return Delivery(self._copier.ended(), target)

    def fetch_direct(self, load: Load, places: Sequence[Spot]) -> Pending[object]:
        """Copies each box from the source's weights to its place.

        Raises:
            PartyFailedError: if the source has not sent a storage's location, or CUDA fails.
        """
        key = load.number
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = DirectCopies.of(load)
        starts = []
        for name in table.sources:
            location = self._locations.get(name)
            if location is None:
                raise PartyFailedError(f"source rank {load.source} has not told where {name} lies")
            starts.append(self._allocations[location.handle].address + location.start)
        sources = np.array(starts, dtype=np.int64)
        targets = np.array([self._address_of(places[box].storage) for box in table.first_boxes], dtype=np.int64)
        if table.nbytes.size:
            self._copier.runs(*table.runs.addresses(sources, targets), table.nbytes)
        froms, tos = table.pitched.addresses(sources, targets)
        for start, target, rows in zip(froms.tolist(), tos.tolist(), table.rows, strict=True):
            self._copier.rows(start, target, rows)
        return self._copier.ended()

    def close(self) -> None:
        """Waits for copies and closes all memory, even if closing one fails."""
        with ExitStack() as closing:
            closing.callback(self._lease.release)
            for opened in (self._opened, *self._allocations.values()):
                closing.callback(opened.close)
            self._allocations.clear()
