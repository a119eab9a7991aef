"""Shared memory on one host: the destination unpacks from the same memory that the source packs into.

The slots of a link are an anonymous memory file, whose descriptor is passed when the link is made. Nothing is left
behind in the file system, however the processes end. It needs no torch, so the two sides may run different versions.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from megatron_patches.refit.memory.ports import Bytes, Done, Payload, Pending
from megatron_patches.refit.memory.staging import SLOTS, StagingPool
from megatron_patches.refit.transports import frames
from megatron_patches.refit.transports.base import IncomingWire, LinkEnd, OutgoingWire, Place, Transport


class ShmTransport(Transport):
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party runs.
    """

    one_host = True  # and no reach: each side already makes just one copy, into the slot, and out of it

    def __init__(self, place: Place) -> None:
        self._pool = place.pool

    def outgoing(self, end: LinkEnd) -> ShmOutgoing:
        """Makes the slots and passes their descriptor."""
        handle = os.memfd_create("refit")
        try:
            os.ftruncate(handle, SLOTS * end.slot_bytes)
            wire = ShmOutgoing(handle, end.slot_bytes, self._pool, write=True)
            try:
                frames.send_descriptors(end.connection, [handle], end.patience)
            except BaseException:
                wire.close()
                raise
        finally:
            os.close(handle)
        return wire

    def incoming(self, end: LinkEnd) -> ShmIncoming:
        """Maps the slots made by the source."""
        (handle,) = frames.receive_descriptors(end.connection, 1, end.patience)
        try:
            return ShmIncoming(handle, end.slot_bytes, self._pool, write=False)
        finally:
            os.close(handle)


class _Slots:
    """Memory of a link, the same in both processes.

    Args:
        handle: descriptor of the memory.
        slot_bytes: size of a slot.
        pool: accounts for the memory; each side counts all of it.
        write: whether this side writes to it.
    """

    def __init__(self, handle: int, slot_bytes: int, pool: StagingPool, *, write: bool) -> None:
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        self._lease = pool.lease(SLOTS * slot_bytes, lambda nbytes: mmap.mmap(handle, nbytes, access=access))
        whole: Bytes = np.frombuffer(self._lease.buffer, dtype=np.uint8)
        self.slots: Sequence[Payload] = [whole[index * slot_bytes : (index + 1) * slot_bytes] for index in range(SLOTS)]

    def close(self) -> None:
        """Releases the memory, which is freed once both sides have."""
        self.slots = []
        with suppress(BufferError):  # a packet is still in use; the memory is freed with its last user
            self._lease.buffer.close()
        self._lease.release()


class ShmOutgoing(_Slots, OutgoingWire):
    """A source's side of a link."""

    def start(self, slot: int, payload: Payload) -> None:
        """Does nothing: the destination maps the same memory."""


class ShmIncoming(_Slots, IncomingWire):
    """A destination's side of a link."""

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """The packet, in the memory that its source packed it into."""
        return Done(self.slots[slot][:nbytes])
