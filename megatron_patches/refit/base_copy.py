"""One side's weights of a base version, packed as packets are."""

from __future__ import annotations

import numpy as np

from megatron_patches.refit.delta import Base
from megatron_patches.refit.ports import Batch, Bytes, HostPort
from megatron_patches.refit.staging import Lease, StagingPool


class BaseCopy:
    """One side's weights of a base version, and a buffer into which one load of them at a time is packed.

    Args:
        base: the weights.
        where: owner of the storages, for messages.
        pool: pool of the buffer; None to allocate it.

    Attributes:
        version: number of the base version.

    Raises:
        TransferError: if the weights are not in host memory.
    """

    def __init__(self, base: Base, where: str, pool: StagingPool | None) -> None:
        self.version = base.version
        self._port, self._pool = HostPort(base.memory, where), pool
        self._buffer: Lease[Bytes] | None = None

    def packed(self, batch: Batch, nbytes: int) -> Bytes:
        """The elements of a load, valid until the next call."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self.close()
            pool = self._pool or StagingPool(nbytes)
            self._buffer = pool.lease(nbytes, lambda size: np.empty(size, dtype=np.uint8))
        found = self._buffer.buffer[:nbytes]
        self._port.copy_out(batch, found)
        return found

    def close(self) -> None:
        """Returns the buffer to the pool."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
