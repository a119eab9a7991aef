"""CUDA IPC on one host: the destination copies from the source's GPU to its own, over NVLink if available.

A box that consists of rows on both sides is copied from the source's weights to its place by the GPU's copy engines,
without using a multiprocessor, a slot or packing. That requires weights in memory that other processes can open. Memory
that torch allocates by default is opened by a handle, which is sent like any other bytes. Expandable segments and
symmetric memory are opened by file descriptors, which the destination requests over the link. Weights in other
memory, such as symmetric memory made only for a multi-host fabric, are packed, like boxes that are not rows.

A source's slots are separate device memory, outside torch's allocator. The destination copies a slot when told that it
is full, and then returns it. Processes may number GPUs differently and need not see each other's, so GPUs are
identified by UUID. CUDA is behind :class:`megatron_patches.refit.transports.cuda_runtime.CudaRuntime`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import batched

import msgspec
import numpy as np
import torch

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Load, Reach
from megatron_patches.refit.memory.ports import Memory, Payload, Pending, Then
from megatron_patches.refit.memory.staging import SLOTS, Lease
from megatron_patches.refit.transports import frames, messages
from megatron_patches.refit.transports.base import IncomingWire, LinkEnd, OutgoingWire, Place, Transport
from megatron_patches.refit.transports.cuda_mapped import Fetch
from megatron_patches.refit.transports.cuda_runtime import CudaExport, CudaOpened, CudaRuntime, Location
from megatron_patches.refit.transports.direct_copies import DirectCopies
from megatron_patches.refit.transports.frames import Patience


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


class CudaIpcTransport(Transport):
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party runs.
        runtime: its GPU.
    """

    one_host = True
    reach = Reach.ROWS

    def __init__(self, place: Place, runtime: CudaRuntime) -> None:
        self._pool, self._runtime = place.pool, runtime
        self._hidden: frozenset[str] = frozenset()
        self._located: Mapping[str, Location] = {}

    def hidden(self, memory: Memory) -> frozenset[str]:
        """Storages in memory that cannot be exported."""
        self._hidden = frozenset(memory) - frozenset(self._runtime.locate(memory))
        return self._hidden

    def begin(self, memory: Memory) -> bytes | None:
        """The locations of storages, if they have changed."""
        found = self._runtime.locate(memory)
        lost = sorted(name for name in memory if name not in found and name not in self._hidden)
        if lost:
            raise PartyFailedError(
                f"{lost[0]} (and {len(lost) - 1} more) has moved into memory that other processes cannot open; the "
                "next push finds another way for it"
            )
        if found == self._located:
            return None
        self._located = found
        numbers: dict[bytes, int] = {}
        places = {name: (numbers.setdefault(at.handle, len(numbers)), at.start) for name, at in found.items()}
        return msgspec.msgpack.encode(_Told(list(numbers), places))

    def descriptor(self, number: int) -> int:
        """A descriptor of a chunk of the source's memory."""
        return self._runtime.descriptor(number)

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
        return CudaIpcOutgoing(lease, end.slot_bytes)

    def incoming(self, end: LinkEnd) -> CudaIpcIncoming:
        """Opens the source's slots."""
        remote = _decode_remote(frames.receive(end.connection, end.patience))
        try:
            opened = self._runtime.open(remote.handle, _asking(end.connection, end.patience))
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
        return CudaIpcIncoming(opened, lease, end, remote.uuid, self._runtime)

    def close(self) -> None:
        """Forgets located memory."""
        self._runtime.close()


def _asking(connection: socket.socket, patience: Patience) -> Fetch:
    """Fetches descriptors from the source at the other end of a link, few at a time."""

    def fetch(numbers: Sequence[int], use: Callable[[int, int], None]) -> None:
        for batch in batched(numbers, frames.MOST_DESCRIPTORS):
            frames.send_all(connection, messages.SLOT.pack(messages.ASK), patience)
            frames.send(connection, messages.encode_message(batch), patience)
            descriptors = frames.receive_descriptors(connection, len(batch), patience)
            try:
                for number, descriptor in zip(batch, descriptors, strict=True):
                    use(number, descriptor)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    return fetch


class CudaIpcOutgoing(OutgoingWire):
    """A source's side of a link. The destination does the copying.

    Args:
        lease: the slots.
        slot_bytes: size of one slot.
    """

    def __init__(self, lease: Lease[CudaExport], slot_bytes: int) -> None:
        self._lease = lease
        self.slots = [lease.buffer.part(index * slot_bytes, (index + 1) * slot_bytes) for index in range(SLOTS)]

    def start(self, slot: int, payload: Payload) -> None:
        """Does nothing: the destination copies the slot after the announcement, when packing has ended."""

    def start_direct(self, load: Load, memory: Memory) -> None:
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
        end: the link.
        theirs: UUID of the source's GPU.
        runtime: this party's GPU.
    """

    def __init__(
        self, opened: CudaOpened, lease: Lease[torch.Tensor], end: LinkEnd, theirs: str, runtime: CudaRuntime
    ) -> None:
        self._opened, self._lease, self._end, self._theirs = opened, lease, end, theirs
        self._runtime, self._copier = runtime, runtime.copier()
        self._allocations: dict[bytes, CudaOpened] = {}
        self._addresses: dict[str, int] = {}
        self._tables: dict[int, DirectCopies] = {}

    def begin(self, told: bytes, patience: Patience) -> None:
        """Opens the allocations of the source's storages, and closes those that are no longer used.

        Raises:
            PartyFailedError: if CUDA fails, or the source does not provide descriptors.
        """
        content = _decode_told(told)
        for handle in [handle for handle in self._allocations if handle not in content.handles]:
            self._allocations.pop(handle).close()
        for handle in content.handles:
            if handle not in self._allocations:
                self._allocations[handle] = self._open(handle, patience)
        starts = [self._allocations[handle].address for handle in content.handles]
        self._addresses = {name: starts[number] + offset for name, (number, offset) in content.places.items()}

    def _open(self, handle: bytes, patience: Patience) -> CudaOpened:
        try:
            return self._runtime.open(handle, _asking(self._end.connection, patience))
        except PartyFailedError as error:
            raise PartyFailedError(
                f"GPU {self._runtime.uuid} cannot reach the weights of source rank {self._end.peer} on GPU "
                f"{self._theirs} where they lie: {error}; another transport does not ask for that"
            ) from error

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Copies into this side's slot of the same number, which is free if the source's is."""
        start = slot * self._end.slot_bytes
        target = self._lease.buffer[start : start + nbytes]
        run = (self._opened.address + start, self._runtime.address_of(target), nbytes)
        self._copier.runs(*np.array(run, dtype=np.int64).reshape(3, 1))
        return Then(self._copier.ended(), lambda _: target)

    def fetch_direct(self, load: Load, memory: Memory) -> Pending[object]:
        """Copies each box from the source's weights to its place.

        Raises:
            PartyFailedError: if the source has not sent a storage's location, or CUDA fails.
        """
        key = load.number
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = DirectCopies.of(load)
        untold = [name for name in table.sources if name not in self._addresses]
        if untold:
            raise PartyFailedError(f"source rank {load.source} has not told where {untold[0]} lies")
        sources = np.array([self._addresses[name] for name in table.sources], dtype=np.int64)
        targets = np.array([self._runtime.address_of(memory[name]) for name in table.targets], dtype=np.int64)
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
