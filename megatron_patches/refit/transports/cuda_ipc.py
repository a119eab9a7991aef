"""CUDA IPC on one host: the destination copies from the source's GPU to its own, over NVLink where there is one.

A box that consists of rows on both sides is copied from the source's weights to its place by the GPU's copy engines,
which takes no multiprocessor, no slot and no packing. That needs weights in memory that other processes can open. What
torch allocates by default is opened by a handle that is sent like any other bytes. Expandable segments and symmetric
memory are opened by file descriptors, which the destination asks the source for. Weights in other memory, such as
symmetric memory that was made for a fabric of many hosts alone, are packed, like boxes that are no rows.

A source's slots are device memory of their own, outside torch's allocator; the destination copies a slot when it was
told that it is full, and then gives it back. Processes may number GPUs differently, and need not see each other's, so a
GPU is known by its UUID alone. What CUDA does is behind :class:`DeviceRuntime`.
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
from megatron_patches.refit.transports.base import Check, Delivery, LinkEnd, Offer, Place
from megatron_patches.refit.transports.cuda_mapped import Fetch
from megatron_patches.refit.transports.descriptors import Counter, DescriptorServer, take_descriptors
from megatron_patches.refit.transports.direct_copies import DirectCopies, Numbers, Rows


class ExportedMemory(Protocol):
    """Device memory that another process may open."""

    @property
    def handle(self) -> bytes:
        """What the other process opens it by."""

    def part(self, start: int, stop: int) -> Payload:
        """Bytes ``start`` to ``stop`` of it."""

    def close(self) -> None:
        """Frees it."""


class OpenedMemory(Protocol):
    """Device memory of another process."""

    @property
    def address(self) -> int:
        """Where it begins in this process."""

    def close(self) -> None:
        """Waits for copies and forgets it."""


class Copier(Protocol):
    """Begins copies to the own device. Addresses are those of this process."""

    def runs(self, sources: Numbers, targets: Numbers, nbytes: Numbers) -> None:
        """Begins to copy runs of bytes, in any order.

        Args:
            sources: ``[runs]``, where each begins.
            targets: ``[runs]``, where each goes to.
            nbytes: ``[runs]``, how long each is.

        Raises:
            PartyFailedError: if CUDA refuses.
        """

    def rows(self, source: int, target: int, rows: Rows) -> None:
        """Begins to copy rows, the first of which begins at ``source`` and goes to ``target``; raises as ``runs``."""

    def ended(self) -> Pending[None]:
        """All copies that have begun since this was asked last."""


class Location(msgspec.Struct, frozen=True):
    """Where a storage lies.

    Attributes:
        handle: what other processes open the allocation by.
        start: first byte in it.
    """

    handle: bytes
    start: int


class DeviceRuntime(Protocol):
    """One GPU as one process sees it."""

    @property
    def uuid(self) -> str:
        """The GPU, by the same name in all processes."""

    def export(self, nbytes: int) -> ExportedMemory:
        """Allocates memory that others may open.

        Raises:
            PartyFailedError: if CUDA refuses.
        """

    def locate(self, memory: Memory) -> Mapping[str, Location]:
        """Where storages lie that others can open; those that they cannot are left out."""

    def open(self, handle: bytes, fetch: Fetch) -> OpenedMemory:
        """Opens what another process has exported.

        Args:
            handle: what it is opened by.
            fetch: fetches descriptors from that process, if the handle takes some.

        Raises:
            PartyFailedError: if CUDA refuses, or the other process does not hand them out.
        """

    def descriptor(self, number: int) -> int:
        """A descriptor that another process asks for, as some handle says; to be closed. Called in any thread.

        Raises:
            PartyFailedError: if there is none of this number, or CUDA refuses.
        """

    def copier(self) -> Copier:
        """For the copies of one link."""

    def allocate(self, nbytes: int) -> Payload:
        """Memory that nobody else opens."""

    def address_of(self, memory: Elements | Payload) -> int:
        """Where memory of the own device begins.

        Raises:
            PartyFailedError: if it lies elsewhere.
        """

    def close(self) -> None:
        """Forgets what was located."""


class _Remote(msgspec.Struct):
    """What a destination must know of its source's slots."""

    uuid: str
    handle: bytes


class _Told(msgspec.Struct, array_like=True):
    """Where a source's storages lie.

    Attributes:
        handles: what allocations are opened by.
        places: for each storage the number of its handle, and its first byte.
    """

    handles: list[bytes]
    places: dict[str, tuple[int, int]]


_decode_remote = msgspec.msgpack.Decoder(_Remote).decode
_decode_told = msgspec.msgpack.Decoder(_Told).decode
_decode_counter = msgspec.msgpack.Decoder(Counter).decode


class CudaIpcTransport:
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party is.
        runtime: its GPU.
    """

    one_host = True
    turns = None
    reach = Reach.ROWS

    def __init__(self, place: Place, runtime: DeviceRuntime) -> None:
        self._place, self._pool, self._runtime = place, place.pool, runtime
        self._server: DescriptorServer | None = None
        self._offers: Sequence[Offer] = ()
        self._check: Check = lambda: None
        self._hidden: frozenset[str] = frozenset()
        self._located: Mapping[str, Location] = {}
        self._asked: set[object] = set()

    def hidden(self, memory: Memory) -> frozenset[str]:
        """What lies in memory that cannot be exported."""
        self._hidden = frozenset(memory) - frozenset(self._runtime.locate(memory))
        return self._hidden

    def details(self) -> bytes:
        """Of a source, where others ask for descriptors."""
        if self._place.party >= self._place.sources:
            return b""
        if self._server is None:
            self._server = DescriptorServer(self._runtime.descriptor)
        return msgspec.msgpack.encode(self._server.counter)

    def connect(self, offers: Sequence[Offer], check: Check) -> None:
        """Keeps what sources have offered."""
        self._offers, self._check = offers, check

    def outgoing(self, end: LinkEnd) -> CudaIpcOutgoing:
        """Makes slots and passes their handle on."""
        lease = self._pool.lease(SLOTS * end.slot_bytes, self._runtime.export)
        try:
            remote = _Remote(self._runtime.uuid, lease.buffer.handle)
            frames.send(end.connection, msgspec.msgpack.encode(remote), end.patience)
            # Whether it could be opened; a failure is told with its reason by the destination itself.
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
            opened.close()  # or the source's memory would stay taken
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
        """Where the storages are now; found once for all links, each of which asks once a version.

        Raises:
            PartyFailedError: if one cannot be opened by others any longer.
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

    def stop(self) -> None:
        """Each wire ends what is under way."""

    def close(self) -> None:
        """Hands out nothing any longer."""
        try:
            if self._server is not None:
                self._server.close()
        finally:
            self._runtime.close()


class CudaIpcOutgoing:
    """A source's side of a link: the destination does the work.

    Args:
        lease: the slots.
        slot_bytes: size of one.
        locate: finds where storages lie.
    """

    def __init__(
        self, lease: Lease[ExportedMemory], slot_bytes: int, locate: Callable[[Memory, object], Mapping[str, Location]]
    ) -> None:
        self._lease, self._locate = lease, locate
        self._told: Mapping[str, Location] = {}
        self.slots = [lease.buffer.part(index * slot_bytes, (index + 1) * slot_bytes) for index in range(SLOTS)]

    def begin(self, memory: Memory) -> bytes | None:
        """Tells where storages lie, if they have moved."""
        found = self._locate(memory, self)
        if found == self._told:
            return None
        self._told = found
        numbers: dict[bytes, int] = {}
        places = {name: (numbers.setdefault(at.handle, len(numbers)), at.start) for name, at in found.items()}
        return msgspec.msgpack.encode(_Told(list(numbers), places))

    def start(self, slot: int, payload: Payload) -> None:
        """The destination copies it when it was told; what packed it has ended by then."""

    def start_direct(self, load: Load, places: Sequence[Spot]) -> None:
        """The same."""

    def check(self) -> None:
        """What fails fails at the destination."""

    def close(self) -> None:
        """Frees the memory."""
        self.slots = []
        self._lease.buffer.close()
        self._lease.release()


class CudaIpcIncoming:
    """A destination's side of a link.

    Args:
        opened: the source's slots.
        lease: the own slots.
        slot_bytes: size of one.
        open_memory: opens memory of the source by its handle.
        runtime: the own GPU.
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
        """Opens the allocations that the source's storages lie in, and forgets those that none lies in any longer.

        Raises:
            PartyFailedError: if CUDA refuses, or the source does not hand its memory out.
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
        """Copies into the own slot of the same number, which is free if the source's is."""
        start = slot * self._slot_bytes
        target = self._lease.buffer[start : start + nbytes]
        run = (self._opened.address + start, self._address_of(target), nbytes)
        self._copier.runs(*np.array(run, dtype=np.int64).reshape(3, 1))
        return Delivery(self._copier.ended(), target)

    def fetch_direct(self, load: Load, places: Sequence[Spot]) -> Pending[object]:
        """Copies each box from the source's weights to its place.

        Raises:
            PartyFailedError: if the source has not told where a storage lies, or CUDA refuses.
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
        """Waits for copies, and forgets the memory; all of it, even where one cannot be closed."""
        with ExitStack() as closing:
            closing.callback(self._lease.release)
            for opened in (self._opened, *self._allocations.values()):
                closing.callback(opened.close)
            self._allocations.clear()
