"""How boxes get from a party's memory into packets and back, and how they are digested.

A :class:`Port` handles one kind of memory: :class:`HostPort` that of the host with numpy, and
:class:`megatron_patches.refit.memory.device_port.DevicePort` that of a GPU. Work on a GPU may still be running when a
method returns, so results are :class:`Pending`; on a CPU they are available at once.

Memories are flat arrays of unsigned integers as wide as the elements: bits are moved, never values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.digest import digest_array
from megatron_patches.refit.layout.dtypes import itemsize

if TYPE_CHECKING:
    import torch

type Bits = NDArray[np.unsignedinteger]
type FlatMemory = Mapping[str, torch.Tensor]
"""Storages by name: flat tensors, all in the host's memory or all on one device."""
type Memory = Mapping[str, Bits] | FlatMemory
"""The same, or flat arrays."""
type Bytes = NDArray[np.uint8]
type Payload = bytes | Bytes | torch.Tensor
"""Elements of a packet: bytes on the host, or a byte tensor on a device."""


class Pending[T](Protocol):
    """An operation that may still be running."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self) -> T:
        """Waits until it has ended, and returns its result."""


@dataclass(frozen=True, slots=True)
class Done[T]:
    """An operation that has ended."""

    value: T

    def done(self) -> bool:
        """True."""
        return True

    def result(self) -> T:
        """Its result."""
        return self.value


@dataclass(frozen=True, slots=True)
class Then[A, B]:
    """An operation whose result is made from that of another one.

    Attributes:
        first: the other operation.
        finish: makes the result, or raises.
    """

    first: Pending[A]
    finish: Callable[[A], B]

    def done(self) -> bool:
        """Whether the other operation has ended."""
        return self.first.done()

    def result(self) -> B:
        """Waits until it has ended, and makes the result."""
        return self.finish(self.first.result())


class Shared[T]:
    """A pending list of which several callers each wait for a part."""

    def __init__(self, pending: Pending[list[T]]) -> None:
        self._pending: Pending[list[T]] | None = pending
        self._result: list[T] = []

    def part(self, begin: int, end: int) -> Pending[list[T]]:
        """Elements ``begin`` to ``end`` of it."""
        return Then(self, lambda whole: whole[begin:end])

    def done(self) -> bool:
        """Whether it has ended."""
        return self._pending is None or self._pending.done()

    def result(self) -> list[T]:
        """Waits until it has ended, and returns its result."""
        if self._pending is not None:
            self._result, self._pending = self._pending.result(), None
        return self._result


@dataclass(frozen=True, slots=True)
class Piece:
    """A box in memory that is copied to or from a payload.

    Attributes:
        view: where it lies in memory.
        dtype: its dtype.
        box: the box.
        shape: shape of the whole tensor.
        offset: its first byte in the payload.
    """

    view: View
    dtype: str
    box: Box
    shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """Boxes that are moved together. Ports cache what they compute for a batch.

    Attributes:
        pieces: the boxes.
    """

    pieces: tuple[Piece, ...]


class Writing(Protocol):
    """What is still writing to storages, on a GPU, when they are looked up."""

    def await_written(self, ends: Mapping[str, int]) -> None:
        """Makes the current stream wait until storages are written. Any thread may call it.

        Args:
            ends: of each, how many of its first elements.
        """

    def confirm(self) -> None:
        """Waits until all are written.

        Raises:
            RefitError: if what was written must not serve.
        """


class Port(Protocol):
    """One party's storages."""

    @property
    def asynchronous(self) -> bool:
        """Whether work may still be running when a method returns, so that queueing more at once blocks nothing."""

    def renew(self, memory: Any, writing: Writing | None = None) -> None:
        """Switches to the memory of another version. All work on the last one must have ended.

        Args:
            memory: the storages, by name, of the same kind as before.
            writing: what is still writing to them; None if they are written.

        Raises:
            TransferError: if their kind differs.
        """

    def pack(self, batch: Batch, payload: Payload) -> Pending[list[int]]:
        """Copies boxes into a payload, each in row-major order, and digests what it reads.

        Returns:
            The digest of each box.

        Raises:
            TransferError: if a storage differs from its description in the manifest.
        """

    def copy_out(self, batch: Batch, payload: Any) -> None:
        """What :meth:`pack` copies, without digests, to a payload in this port's kind of memory. Raises as it."""

    def unpack(self, batch: Batch, payload: Payload) -> Pending[None]:
        """Copies boxes out of a payload, which may be overwritten once this has ended. Raises as :meth:`pack`."""

    def digest(self, batch: Batch) -> Pending[list[int]]:
        """The digest of each box as it lies in memory. Raises as :meth:`pack`."""

    def storages(self, batch: Batch) -> Memory:
        """The storages, among which are those of the boxes. Raises as :meth:`pack`."""

    def close(self) -> None:
        """Waits for work under way, returns leased memory, and drops the storages.

        :meth:`renew` opens it again.
        """


class HostPort:
    """Storages in host memory.

    Args:
        memory: the storages, by name.
        where: owner of the storages, for messages, such as "source rank 3".

    Raises:
        TransferError: if one is on a device.
    """

    asynchronous = False

    def __init__(self, memory: Memory, where: str) -> None:
        self._where = where
        self.renew(memory)

    def renew(self, memory: Memory, writing: Writing | None = None) -> None:
        """See :class:`Port`. On the host, nothing is written meanwhile."""
        del writing
        self._memory = {name: self._array(name, storage) for name, storage in memory.items()}

    def _array(self, name: str, storage: Bits | torch.Tensor) -> Bits:
        if isinstance(storage, np.ndarray):
            return storage
        if storage.device.type != "cpu":
            raise TransferError(
                f"{name} on {self._where} is on {storage.device}; all storages must be on the host, or none, and "
                "stay there until a trainer prepares again"
            )
        import torch

        found: Bits = storage.detach().view(getattr(torch, f"uint{8 * storage.element_size()}")).numpy()
        return found

    def pack(self, batch: Batch, payload: Payload) -> Pending[list[int]]:
        """See :class:`Port`."""
        target = host_bytes(payload)
        digests = []
        for piece in batch.pieces:
            packed = _packed(target, piece)
            np.copyto(packed, elements(piece.view, self._memory, piece.dtype, self._where))
            digests.append(digest_array(packed, piece.box, piece.shape))
        return Done(digests)

    def copy_out(self, batch: Batch, payload: Bytes) -> None:
        """See :class:`Port`."""
        for piece in batch.pieces:
            np.copyto(_packed(payload, piece), elements(piece.view, self._memory, piece.dtype, self._where))

    def unpack(self, batch: Batch, payload: Payload) -> Pending[None]:
        """See :class:`Port`."""
        source = host_bytes(payload)
        for piece in batch.pieces:
            elements(piece.view, self._memory, piece.dtype, self._where)[...] = _packed(source, piece)
        return Done(None)

    def digest(self, batch: Batch) -> Pending[list[int]]:
        """See :class:`Port`."""
        found = []
        for piece in batch.pieces:
            values = elements(piece.view, self._memory, piece.dtype, self._where)
            found.append(digest_array(np.ascontiguousarray(values), piece.box, piece.shape))
        return Done(found)

    def storages(self, batch: Batch) -> Memory:
        """See :class:`Port`."""
        for piece in batch.pieces:
            storage_of(piece.view, self._memory, piece.dtype, self._where)
        return self._memory

    def close(self) -> None:
        """See :class:`Port`."""
        self._memory = {}


def bytes_in_place(view: View, memory: Memory) -> Payload:
    """The bytes of a contiguous view."""
    storage, (low, high) = memory[view.storage], view.span
    if isinstance(storage, np.ndarray):
        return storage[low:high].view(np.uint8)
    import torch

    return storage.detach()[low:high].view(torch.uint8)


def elements(view: View, memory: Mapping[str, Bits], dtype: str, where: str) -> Bits:
    """The elements of a view, in place. Raises as :func:`storage_of`."""
    storage = storage_of(view, memory, dtype, where)
    steps = [step * storage.itemsize for step in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset :], view.shape, steps)


def storage_of(view: View, memory: Mapping[str, Bits], dtype: str, where: str) -> Bits:
    """The storage of a view.

    Raises:
        TransferError: if the storage is missing, not flat, too short, or has elements of another width.
    """
    storage = memory.get(view.storage)
    width = itemsize(dtype)
    if storage is None or storage.ndim != 1 or storage.dtype != np.dtype(f"u{width}"):
        kind = "is missing" if storage is None else f"is {storage.dtype} of {storage.ndim} dimensions"
        raise TransferError(f"{view.storage} on {where} {kind}; a flat array of u{width} was described ({dtype})")
    low, high = view.span
    if low < 0 or high > storage.size:
        raise TransferError(f"{view.storage} on {where} has {storage.size} elements; the plan uses {low} to {high}")
    return storage


def host_bytes(payload: Payload) -> Bytes:
    """A payload on the host as an array that shares its memory.

    Raises:
        TransferError: if the payload is on a device.
    """
    if isinstance(payload, np.ndarray):
        return payload
    if isinstance(payload, bytes):
        return np.frombuffer(payload, dtype=np.uint8)
    if payload.device.type != "cpu":
        raise TransferError(f"a payload on {payload.device} cannot be read on the host")
    found: Bytes = payload.numpy()
    return found


def _packed(payload: Bytes, piece: Piece) -> Bits:
    """A piece's place in a payload."""
    width = itemsize(piece.dtype)
    content = payload[piece.offset : piece.offset + piece.box.volume * width]
    return content.view(f"u{width}").reshape(piece.box.shape)
