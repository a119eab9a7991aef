"""One side's weights of a base version on a GPU, with which the changes of a load are found or completed there.

A load and its base are packed beside each other, and what differs is compacted from there into the payload. So the host
learns how large a payload is when the GPU has ended, and waits for that only where the payload goes to host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.memory.delta import Base, Delta, delta_of
from megatron_patches.refit.memory.device_port import DevicePort, from_host
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.memory.packets import payload_bytes
from megatron_patches.refit.memory.ports import Batch, Payload, Pending, Then
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
            found = self._port.to_host(encode_delta(new, old, load.width, target))
            version, count = self.version, load.nbytes // load.width
            delta = Then(found, lambda numbers: delta_of(version, numbers[0], count, load.width))
            if crossing:
                nbytes = payload_bytes(load, delta.result())
                from_host(payload)[:nbytes].copy_(target[:nbytes])
        return digests, delta

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
            copied = self._port.unpack(batch, completed)

        def check(_: None) -> None:
            invalid, places = found.result()
            if invalid or places != changed:
                raise TransferError(
                    f"{load}: {invalid} of {places} places of changed elements are not in rising order or beyond the "
                    f"{load.nbytes // load.width} elements; {changed} came"
                )

        return Then(copied, check)

    def close(self) -> None:
        """See :class:`megatron_patches.refit.memory.base_copy.BaseCopy`."""
        self._base.close()
        self._new.close()
        self._old.close()


def _tensors(base: Base) -> Mapping[str, torch.Tensor]:
    return cast("Mapping[str, torch.Tensor]", base.memory)
