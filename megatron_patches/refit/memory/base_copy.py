"""One side's weights of a base version, with which the changes of a load are found or completed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from megatron_patches.refit.memory.delta import Base, Delta, decode_delta, encode_delta
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.memory.ports import (
    Batch,
    Bytes,
    Done,
    HostPort,
    Payload,
    Pending,
    Port,
    bytes_in_place,
    host_bytes,
)
from megatron_patches.refit.memory.staging import Room, StagingPool

if TYPE_CHECKING:
    from megatron_patches.refit.memory.device_port import DevicePort


class BaseCopy(Protocol):
    """One side's weights of a base version.

    Attributes:
        version: number of the base version.
    """

    version: int

    def renew(self, base: Base) -> None:
        """Switches to another version, in the same kind of memory. Raises as :func:`renewed`."""

    def pack(self, load: Load, batch: Batch, payload: Payload) -> tuple[Pending[list[int]], Pending[Delta | None]]:
        """Packs a load as what changed since the base, if that is less, and digests all of its elements.

        Args:
            load: the load.
            batch: its boxes.
            payload: as large as all elements. Receives the changes at its start, or all elements.

        Returns:
            The digest of each box, and what the payload holds; None for all elements.

        Raises:
            TransferError: if a storage differs from its description in the manifest.
        """

    def unpack(self, load: Load, batch: Batch, payload: Payload, changed: int) -> Pending[None]:
        """Completes a load from the base, and copies its boxes to their places.

        Args:
            load: the load.
            batch: its boxes.
            payload: its changes, which may be overwritten once this has ended.
            changed: number of changed elements.

        Raises:
            TransferError: if the payload does not hold that many elements, at rising places within the load: now, or
                from the result.
        """

    def close(self) -> None:
        """Returns leased memory, and drops the weights. :meth:`renew` opens it again.

        The port of the party's own storages must have been closed before, so that no work uses the memory.
        """


def renewed(kept: BaseCopy | None, base: Base, port: Port, where: str, pool: StagingPool | None) -> BaseCopy:
    """The weights of a base version, as fits a party's memory.

    Args:
        kept: what this returned for an earlier version, with the same port; None if there is none.
        base: the weights, in the same kind of memory as those of the port.
        port: of the party's own storages.
        where: owner of the storages, for messages.
        pool: pool of buffers, in which loads are packed; None to allocate them.

    Raises:
        TransferError: if the base is in another kind of memory.
    """
    if kept is not None:
        kept.renew(base)
        return kept
    if isinstance(port, HostPort):
        return _HostBase(base, port, where, pool)
    from megatron_patches.refit.memory.device_base import DeviceBase

    return DeviceBase(base, cast("DevicePort", port), where, pool)


class _HostBase:
    """Weights in host memory, and a buffer into which one load of them at a time is packed."""

    def __init__(self, base: Base, port: HostPort, where: str, pool: StagingPool | None) -> None:
        self.version = base.version
        self._port, self._base = port, HostPort(base.memory, where)
        self._room: Room[Bytes] = Room(pool, lambda size: np.empty(size, dtype=np.uint8))

    def renew(self, base: Base) -> None:
        self.version = base.version
        self._base.renew(base.memory)

    def pack(self, load: Load, batch: Batch, payload: Payload) -> tuple[Pending[list[int]], Pending[Delta | None]]:
        digests = self._port.pack(batch, payload)
        if len(batch.pieces) == 1 and batch.pieces[0].view.contiguous:
            base = host_bytes(bytes_in_place(batch.pieces[0].view, self._base.storages(batch)))
        else:
            base = self._packed(load, batch)
        changed = encode_delta(host_bytes(payload), base, load.width)
        return digests, Done(None if changed is None else Delta(self.version, changed))

    def unpack(self, load: Load, batch: Batch, payload: Payload, changed: int) -> Pending[None]:
        completed = self._packed(load, batch)
        decode_delta(host_bytes(payload), changed, completed, load.width, str(load))
        return self._port.unpack(batch, completed)

    def close(self) -> None:
        self._base.close()
        self._room.close()

    def _packed(self, load: Load, batch: Batch) -> Bytes:
        """The base's elements of a load, valid until the next call."""
        found = self._room.of(load.nbytes)[: load.nbytes]
        self._base.copy_out(batch, found)
        return found
