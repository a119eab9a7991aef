"""Memory for packets: one pool per party, which never exceeds its budget.

A party keeps two buffers, *slots*, for each of its links, so that one can be filled while the other is in flight. All
slots of a party have the same size, and together they fit its budget (:func:`slot_bytes`). No link ever waits for
another's memory: each has its slots from the start, so it can always proceed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron_patches.refit.errors import StagingError

SLOTS = 2
"""Buffers of one link on each side."""

_PIPELINE = 8  # a version is cut into at least this many slots per link, so that packing and transfer overlap
_SMALL = 1 << 20  # below this size, cutting costs more than overlap gains

_ELEMENT = 8  # bytes of the widest element, the least that a slot must hold
_ALIGNMENT = 256  # of slots of at least this size: fastest for GPU copies


class StagingPool:
    """Leases memory up to a limit, which it enforces.

    Args:
        limit_bytes: limit of the leased memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._out = self._peak = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes leased now."""
        return self._out

    @property
    def peak_bytes(self) -> int:
        """Peak of the leased bytes."""
        return self._peak

    def lease[T](self, nbytes: int, make: Callable[[int], T]) -> Lease[T]:
        """Leases a buffer.

        Args:
            nbytes: its size.
            make: allocates (or maps) it.

        Raises:
            StagingError: if the limit would be exceeded.
        """
        with self._lock:
            if self._out + nbytes > self.limit_bytes:
                raise StagingError(
                    f"a buffer of {nbytes} bytes beside {self._out} bytes of packets exceeds the {self.limit_bytes} "
                    "bytes of staging memory"
                )
            self._out += nbytes
            self._peak = max(self._peak, self._out)
        try:
            return Lease(self, nbytes, make(nbytes))
        except BaseException:
            self._give_back(nbytes)
            raise

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._out -= nbytes


class Lease[T]:
    """A buffer of a pool.

    Attributes:
        buffer: the memory.
        nbytes: its size.
    """

    def __init__(self, pool: StagingPool, nbytes: int, buffer: T) -> None:
        self._pool, self.nbytes, self.buffer = pool, nbytes, buffer
        self._returned = False

    def release(self) -> None:
        """Returns the memory to the pool. May be called more than once."""
        if not self._returned:
            self._returned = True
            self._pool._give_back(self.nbytes)


class Room[T]:
    """A buffer that is leased when it is first needed, and again when more is.

    Args:
        pool: pool of the buffer; None to allocate it.
        make: allocates it.
    """

    def __init__(self, pool: StagingPool | None, make: Callable[[int], T]) -> None:
        self._pool, self._make = pool, make
        self._lease: Lease[T] | None = None

    def of(self, nbytes: int) -> T:
        """The buffer, of at least this size. Valid until a larger one is asked for."""
        if self._lease is None or self._lease.nbytes < nbytes:
            self.close()
            self._lease = (self._pool or StagingPool(nbytes)).lease(nbytes, self._make)
        return self._lease.buffer

    def close(self) -> None:
        """Returns the buffer to the pool."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def slot_bytes(limit_bytes: int, links: int, extra: int = 0) -> int:
    """Size of a slot such that all slots of a party fit its budget.

    Args:
        limit_bytes: the budget.
        links: number of the party's links.
        extra: further buffers of a slot's size.

    Returns:
        A multiple of 8 bytes, or of 256 bytes if at least that large; about the whole limit without links.

    Raises:
        StagingError: if a slot could not hold one element of 8 bytes; names the least budget that works.
    """
    count = SLOTS * links + extra
    size = limit_bytes // max(1, count)
    size -= size % (_ALIGNMENT if size >= _ALIGNMENT else _ELEMENT)
    if size < _ELEMENT:
        raise StagingError(
            f"staging_bytes is {limit_bytes}; {links} links take at least {count * _ELEMENT} bytes, and should have "
            "some MiB each"
        )
    return size


def useful_bytes(total_bytes: int) -> int:
    """The largest slot that a link can make use of.

    Args:
        total_bytes: bytes that the link moves per version.

    Returns:
        A multiple of 256 bytes: enough for all of a small version, or for an eighth of a larger one.
    """
    size = max(min(total_bytes, _SMALL), -(-total_bytes // _PIPELINE))
    return -(-size // _ALIGNMENT) * _ALIGNMENT
