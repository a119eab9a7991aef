"""One side's weights of a base version on a GPU, with which the changes of a load are found or completed there.

A load and its base are packed beside each other, and what differs is compacted from there into the payload. So the host
learns how large a payload is when the GPU has ended, and waits for that only where the payload goes to host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.memory.delta import Base, Delta, delta_bytes, delta_of
from megatron_patches.refit.memory.device_port import DevicePort, PendingNumbers, from_host
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.memory.ports import Batch, Payload, Pending
from megatron_patches.refit.memory.staging import StagingPool


class DeviceBase:
    """See :class:`megatron_patches.refit.memory.base_copy.BaseCopy`.

    Args:
        base: the weights, on the port's device.
        port: of the party's own storages.
        where: owner of the storages, for messages.
        pool: pool of buffers for two loads.

    Raises:
        TransferError: if the base is on another device.
    """

    def __init__(self, base: Base, port: DevicePort, where: str, pool: StagingPool | None) -> None:
        self.version = base.version
        self._port, self._base = port, DevicePort(_tensors(base), where, beside=port)
        self._new, self._old = port.room(pool), port.room(pool)

    def renew(self, base: Base) -> None:
        """See :class:`megatron_patches.refit.memory.base_copy.BaseCopy`."""
        self.version = base.version
        self._base.renew(_tensors(base))

    def pack(self, load: Load, batch: Batch, payload: Payload) -> tuple[Pending[list[int]], Pending[Delta | None]]:
        """See :class:`megatron_patches.refit.memory.base_copy.BaseCopy`."""
        from megatron_patches.refit.memory.delta_kernels import encode_delta

        with self._port.on_stream():
            new, old = (room.of(load.nbytes)[: load.nbytes] for room in (self._new, self._old))
            digests = self._port.pack(batch, new)
            self._base.copy_out(batch, old)
            target, crossing = self._port.near(payload)
            changes = _Changes(self._port.to_host(encode_delta(new, old, load.width, target)), self.version, load)
            if crossing:
                nbytes = changes.nbytes()
                from_host(payload)[:nbytes].copy_(target[:nbytes])
        return digests, changes

    def unpack(self, load: Load, batch: Batch, payload: Payload, changed: int) -> Pending[None]:
        """See :class:`megatron_patches.refit.memory.base_copy.BaseCopy`."""
        from megatron_patches.refit.memory.delta_kernels import decode_delta

        with self._port.on_stream():
            completed = self._old.of(load.nbytes)[: load.nbytes]
            self._base.copy_out(batch, completed)
            if not changed:
                return self._port.unpack(batch, completed)
            source, crossing = self._port.near(payload)
            if crossing:
                source.copy_(from_host(payload), non_blocking=True)
            found = self._port.to_host(decode_delta(source, changed, completed, load.width))
            return _Completed(self._port.unpack(batch, completed), found, changed, load)

    def close(self) -> None:
        """See :class:`megatron_patches.refit.memory.base_copy.BaseCopy`."""
        self._base.close()
        self._new.close()
        self._old.close()


def _tensors(base: Base) -> Mapping[str, torch.Tensor]:
    return cast("Mapping[str, torch.Tensor]", base.memory)


class _Changes:
    """What a payload holds, as soon as the GPU has found out."""

    def __init__(self, changed: PendingNumbers, base: int, load: Load) -> None:
        self._changed, self._base, self._load = changed, base, load

    def done(self) -> bool:
        return self._changed.done()

    def result(self) -> Delta | None:
        load = self._load
        return delta_of(self._base, self._changed.result()[0], load.nbytes // load.width, load.width)

    def nbytes(self) -> int:
        """Size of the payload. Waits for it."""
        load, found = self._load, self.result()
        return load.nbytes if found is None else delta_bytes(found.changed, load.nbytes // load.width, load.width)


class _Completed:
    """A load that is completed and copied to its places, and whether its changes were valid."""

    def __init__(self, copied: Pending[None], found: PendingNumbers, changed: int, load: Load) -> None:
        self._copied, self._found, self._changed, self._load = copied, found, changed, load

    def done(self) -> bool:
        return self._copied.done()

    def result(self) -> None:
        self._copied.result()
        invalid, places = self._found.result()
        if invalid or places != self._changed:
            raise TransferError(
                f"{invalid} of {places} places of changed elements are not in rising order or beyond the "
                f"{self._load.nbytes // self._load.width} elements; {self._changed} came"
            )
