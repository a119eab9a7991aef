"""CUDA IPC on one host: the destination copies from the source's GPU to its own, over NVLink where there is one.

A source's slots are device memory of their own, outside torch's allocator, whose handle the destination opens; it
copies a slot when it was told that it is full, and then gives it back. Processes may number GPUs differently, and need
not see each other's, so a GPU is known by its UUID alone. What CUDA does is behind :class:`DeviceRuntime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.ports import Payload, Pending
from megatron_patches.refit.staging import SLOTS, Lease
from megatron_patches.refit.transports.base import Check, LinkEnd, Offer, Place


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

    def copy(self, start: int, target: Payload) -> Pending[None]:
        """Begins to copy its bytes from ``start`` on into memory of the own device, which they fill."""

    def close(self) -> None:
        """Waits for copies and forgets it."""


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

    def open(self, handle: bytes) -> OpenedMemory:
        """Opens what another process has exported.

        Raises:
            PartyFailedError: if CUDA refuses.
        """

    def allocate(self, nbytes: int) -> Payload:
        """Memory that nobody else opens."""


class _Remote(msgspec.Struct):
    """What a destination must know of its source's slots."""

    uuid: str
    handle: bytes


_decode_remote = msgspec.msgpack.Decoder(_Remote).decode


class CudaIpcTransport:
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party is.
        runtime: its GPU.
    """

    one_host = True

    def __init__(self, place: Place, runtime: DeviceRuntime) -> None:
        self._pool, self._runtime = place.pool, runtime

    def details(self) -> bytes:
        """Nothing; each link has metadata of its own."""
        return b""

    def connect(self, offers: Sequence[Offer], check: Check) -> None:
        """Nothing is common to all links."""

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
        return CudaIpcOutgoing(lease, end.slot_bytes)

    def incoming(self, end: LinkEnd) -> CudaIpcIncoming:
        """Opens the source's slots."""
        remote = _decode_remote(frames.receive(end.connection, end.patience))
        try:
            opened = self._runtime.open(remote.handle)
        except PartyFailedError as error:
            raise PartyFailedError(
                f"GPU {self._runtime.uuid} cannot reach memory of GPU {remote.uuid}, of source rank {end.peer}: {error}"
            ) from error
        frames.send(end.connection, b"opened", end.patience)
        lease = self._pool.lease(SLOTS * end.slot_bytes, self._runtime.allocate)
        return CudaIpcIncoming(opened, lease, end.slot_bytes)

    def stop(self) -> None:
        """Each wire ends what is under way."""

    def close(self) -> None:
        """Nothing is common to all links."""


class CudaIpcOutgoing:
    """A source's side of a link: the destination does the work.

    Attributes:
        direct: False: only slots can be opened by others.

    Args:
        lease: the slots.
        slot_bytes: size of one.
    """

    direct = False

    def __init__(self, lease: Lease[ExportedMemory], slot_bytes: int) -> None:
        self._lease = lease
        self.slots = [lease.buffer.part(index * slot_bytes, (index + 1) * slot_bytes) for index in range(SLOTS)]

    def start(self, slot: int, payload: Payload) -> None:
        """The destination copies it when it was told; what packed it has ended by then."""

    def check(self) -> None:
        """What fails fails at the destination."""

    def close(self) -> None:
        """Frees the memory."""
        self.slots = []
        self._lease.buffer.close()
        self._lease.release()


class CudaIpcIncoming:
    """A destination's side of a link.

    Attributes:
        direct: True: a copy may end anywhere on the own GPU.

    Args:
        opened: the source's slots.
        lease: the own slots.
        slot_bytes: size of one.
    """

    direct = True

    def __init__(self, opened: OpenedMemory, lease: Lease[Payload], slot_bytes: int) -> None:
        self._opened, self._lease, self._slot_bytes = opened, lease, slot_bytes

    def fetch(self, slot: int, nbytes: int, room: Payload | None) -> Pending[Payload]:
        """Copies into ``room``, or the own slot of the same number, which is free if the source's is."""
        start = slot * self._slot_bytes
        target = self._lease.buffer[start : start + nbytes] if room is None else room
        return _Copy(self._opened.copy(start, target), target)

    def close(self) -> None:
        """Waits for copies, and forgets the memory."""
        self._opened.close()
        self._lease.release()


class _Copy:
    """A packet that is being copied."""

    def __init__(self, copying: Pending[None], payload: Payload) -> None:
        self._copying, self._payload = copying, payload

    def done(self) -> bool:
        return self._copying.done()

    def result(self) -> Payload:
        self._copying.result()
        return self._payload
