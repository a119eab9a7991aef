"""Boxes in the memory of a GPU: packed, unpacked and digested there, by a Triton kernel.

On CUDA, work is queued on the port's own stream and may still be running when a method returns. A payload on the host
passes through one buffer on the device, leased from the party's pool, so that it crosses in one piece.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.device_tables import VALUES, ShapeTable, TileShape, describe
from megatron_patches.refit.memory.ports import Batch, FlatMemory, Payload, Pending, Piece, Then, Writing, host_bytes
from megatron_patches.refit.memory.staging import Room, StagingPool

_MASK = (1 << 64) - 1
_VECTOR_BYTES = 16  # what the kernel reads at a time if everything is aligned to it
_FIRST = -1  # priority of a stream whose kernels get the multiprocessors that become free


type _Sizes = tuple[list[int], list[torch.dtype]]
"""Numbers of elements of some storages, and their types."""


@dataclass
class _Compiled:
    """A batch in the form that the kernel takes.

    Attributes:
        ends: storages of the batch, and of each, how many of its first elements contain all of the batch's boxes.
        form: what the batch is valid for: the storages' sizes and dtypes, and the bytes by which the payload and each
            storage begin past a multiple of 16.
        parts: one per launch, with places relative to the start of the storages.
        tiles: one tensor per launch.
        addresses: addresses of the storages that ``tables`` are made for.
        tables: one tensor per launch.
        copied: what ``tables`` are copied from; kept, like ``parts``, because a GPU may read it after the call.
    """

    ends: Mapping[str, int]
    form: tuple[_Sizes, list[int]]
    parts: Sequence[ShapeTable]
    tiles: Sequence[torch.Tensor]
    addresses: Sequence[int] = ()
    tables: Sequence[torch.Tensor] = ()
    copied: Sequence[NDArray[np.int64]] = ()


class DevicePort:
    """Storages that are tensors of one device; see :class:`megatron_patches.refit.memory.ports.Port`.

    Args:
        memory: the storages by name, flat tensors whose elements are as wide as the manifest says.
        where: owner of the storages, for messages, such as "source rank 3".
        pool: pool of the buffer for payloads on the host; None if there are none.
        beside: a port of the same device whose work and this one's are done in the order in which they are given.
        urgent: whether a GPU does its work before other work that is ready.

    Raises:
        TransferError: if the storages are on several devices, or Triton is missing.
    """

    def __init__(
        self,
        memory: Mapping[str, torch.Tensor],
        where: str,
        pool: StagingPool | None = None,
        beside: DevicePort | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        if importlib.util.find_spec("triton") is None:
            raise TransferError(f"the storages on {where} are packed by a Triton kernel: pip install triton")
        self._where, self._pool = where, pool
        self._memory: Mapping[str, torch.Tensor] = {}
        self._checked: WeakKeyDictionary[Batch, tuple[tuple[str, ...], _Sizes]] = WeakKeyDictionary()
        self._device = _device_of(memory, where)
        if beside is not None and self._device != beside._device:
            raise TransferError(f"the storages on {where} lie on {self._device}, and others on {beside._device}")
        self._stream: Any = None
        self._bounce = self.room(pool)
        self._compiled: WeakKeyDictionary[Batch, _Compiled] = WeakKeyDictionary()
        if self._device.type == "cuda":
            priority = _FIRST if urgent else 0
            self._stream = torch.cuda.Stream(self._device, priority) if beside is None else beside._stream
        self._origin = torch.empty(_VECTOR_BYTES, dtype=torch.uint8, device=self._device)
        self.renew(memory)

    @property
    def asynchronous(self) -> bool:
        """See :class:`megatron_patches.refit.memory.ports.Port`."""
        return self._stream is not None

    def renew(self, memory: Mapping[str, torch.Tensor], writing: Writing | None = None) -> None:
        """See :class:`megatron_patches.refit.memory.ports.Port`; waits for the work on the caller's stream."""
        self._writing = writing
        device = _device_of(memory, self._where)
        if device != self._device:
            raise TransferError(
                f"the storages on {self._where} have moved from {self._device} to {device}; bring them back, or "
                "prepare again"
            )
        self._memory = memory
        if self._stream is not None:
            # Wait for earlier work there, such as the optimizer's step. Memory that it has freed may also be written to
            # by the transports' streams.
            torch.cuda.current_stream(self._device).synchronize()

    def pack(self, batch: Batch, payload: Payload) -> Pending[list[int]]:
        """See :class:`megatron_patches.refit.memory.ports.Port`."""
        with self.on_stream():
            target, crossing = self.near(payload)
            digests = torch.zeros(len(batch.pieces), dtype=torch.int64, device=self._device)
            self._launch("PACK", batch, target, digests)
            if crossing:
                from_host(payload).copy_(target, non_blocking=True)
            return self.to_host(digests)

    def copy_out(self, batch: Batch, payload: torch.Tensor) -> None:
        """See :class:`megatron_patches.refit.memory.ports.Port`."""
        with self.on_stream():
            digests = torch.zeros(len(batch.pieces), dtype=torch.int64, device=self._device)
            self._launch("PACK", batch, payload, digests)  # memory limits it: digests take no longer

    def unpack(self, batch: Batch, payload: Payload) -> Pending[None]:
        """See :class:`megatron_patches.refit.memory.ports.Port`."""
        with self.on_stream():
            source, crossing = self.near(payload)
            if crossing:
                source.copy_(from_host(payload), non_blocking=True)
            self._launch("UNPACK", batch, source, None)
            return self._under_way()

    def digest(self, batch: Batch) -> Pending[list[int]]:
        """See :class:`megatron_patches.refit.memory.ports.Port`."""
        with self.on_stream():
            digests = torch.zeros(len(batch.pieces), dtype=torch.int64, device=self._device)
            self._launch("DIGEST", batch, None, digests)
            return self.to_host(digests)

    def storages(self, batch: Batch) -> FlatMemory:
        """See :class:`megatron_patches.refit.memory.ports.Port`."""
        names, known = self._checked.get(batch, ((), None))
        if known is None or known != _sizes_of(self._held(names)):
            names = tuple(_ends(batch.pieces))
            for piece in batch.pieces:
                self._check(piece)
            self._checked[batch] = names, _sizes_of(self._held(names))
        return self._memory

    def close(self) -> None:
        """Waits for work under way, returns the buffer, and drops the storages."""
        if self._stream is not None:
            self._stream.synchronize()
        self._memory, self._writing = {}, None
        self._bounce.close()

    def on_stream(self) -> AbstractContextManager[Any]:
        """Makes the port's stream the current one, in whose order its work is done."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def room(self, pool: StagingPool | None) -> Room[torch.Tensor]:
        """A buffer of bytes on the device."""
        return Room(pool, lambda size: torch.empty(size, dtype=torch.uint8, device=self._device))

    def near(self, payload: Payload) -> tuple[torch.Tensor, bool]:
        """The payload itself, or a buffer of its size on the device and True, if its content must be copied across.

        The buffer is the same for all payloads: the next one may use it when the work given so far has ended.
        """
        if isinstance(payload, torch.Tensor) and payload.device == self._device:
            return payload, False
        if self._device.type == "cpu":
            return from_host(payload), False
        return self._bounce.of(len(payload))[: len(payload)], True

    def to_host(self, numbers: torch.Tensor) -> Pending[list[int]]:
        """Queues a copy of int64 numbers to the host, which are unsigned there."""
        host = numbers
        if self._stream is not None:
            with self.on_stream():
                host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
                host.copy_(numbers, non_blocking=True)
        return Then(self._under_way(), lambda _: [value & _MASK for value in host.tolist()])

    def _launch(self, move: str, batch: Batch, payload: torch.Tensor | None, digests: torch.Tensor | None) -> None:
        """Launches the kernel for a batch on the current stream, once for each shape of its boxes."""
        from megatron_patches.refit.memory.device_kernels import Move, move_boxes

        for shape, table, tiles in self._compile(batch, payload):
            unused = self._origin
            move_boxes(
                Move[move],
                shape,
                self._origin,
                unused if payload is None else payload,
                table,
                tiles,
                table if digests is None else digests,
            )

    def _compile(
        self, batch: Batch, payload: torch.Tensor | None
    ) -> Iterator[tuple[TileShape, torch.Tensor, torch.Tensor]]:
        """Shape, table and tiles of each launch for a batch; recomputed if memory has moved.

        The current stream waits until the memory is written.
        """
        past = 0 if payload is None else payload.data_ptr() % _VECTOR_BYTES
        found = self._compiled.get(batch)
        ends = found.ends if found is not None else _ends(batch.pieces)
        held = self._held(ends)
        addresses = [storage.data_ptr() for storage in held]
        form = _sizes_of(held), [past, *(address % _VECTOR_BYTES for address in addresses)]
        if found is None or found.form != form:
            for piece in batch.pieces:
                self._check(piece)
            parts = describe(batch.pieces, list(ends), form[1][1:], past)
            found = _Compiled(ends, form, parts, [self._upload(part.tiles) for part in parts])
            self._compiled[batch] = found
        if found.addresses != addresses:
            origins = np.array(addresses, dtype=np.int64) - self._origin.data_ptr()
            copied = [part.table.copy() for part in found.parts]
            for part, moved in zip(found.parts, copied, strict=True):
                moved[:, VALUES] += origins[part.storages] // part.shape.width
            found.addresses, found.tables, found.copied = addresses, [self._upload(each) for each in copied], copied
        if self._writing is not None:
            self._writing.await_written(ends)
        for part, table, tiles in zip(found.parts, found.tables, found.tiles, strict=True):
            yield part.shape, table, tiles

    def _held(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Storages by name; no storage at all if one is missing, which :meth:`_check` names."""
        try:
            return [self._memory[name] for name in names]
        except KeyError:
            return []

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Copies an array, which must live until this has ended, to the device, on the current stream."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _under_way(self) -> DeviceWork:
        """All work given so far."""
        return DeviceWork([] if self._stream is None else [self._stream.record_event()])

    def _check(self, piece: Piece) -> None:
        """Raises TransferError if a storage differs from its description in the manifest."""
        view = piece.view
        storage = self._memory.get(view.storage)
        width = itemsize(piece.dtype)
        if storage is None or storage.ndim != 1 or storage.element_size() != width:
            kind = "is missing" if storage is None else f"is {storage.dtype} of {storage.ndim} dimensions"
            raise TransferError(f"{view.storage} on {self._where} {kind}; a flat tensor of {piece.dtype} was described")
        low, high = view.span
        if low < 0 or high > storage.numel():
            raise TransferError(
                f"{view.storage} on {self._where} has {storage.numel()} elements; the plan uses {low} to {high}"
            )


def _ends(pieces: Sequence[Piece]) -> dict[str, int]:
    """The storages of some boxes, and the end of the last box in each."""
    found: dict[str, int] = {}
    for piece in pieces:
        found[piece.view.storage] = max(found.get(piece.view.storage, 0), piece.view.span[1])
    return found


def _sizes_of(storages: Sequence[torch.Tensor]) -> _Sizes:
    return [storage.numel() for storage in storages], [storage.dtype for storage in storages]


def _device_of(memory: Mapping[str, torch.Tensor], where: str) -> torch.device:
    devices = {tensor.device for tensor in memory.values()}
    if len(devices) != 1:
        raise TransferError(f"the storages on {where} lie on {sorted(map(str, devices))}; one device is needed")
    return devices.pop()


class DeviceWork:
    """Work on a GPU that ends with events; without any, it has already been done.

    See :class:`megatron_patches.refit.memory.ports.Pending`.
    """

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def done(self) -> bool:
        """Whether it has ended."""
        return all(event.query() for event in self._events)

    def result(self) -> None:
        """Waits until it has ended."""
        for event in self._events:
            event.synchronize()


def from_host(payload: Payload) -> torch.Tensor:
    """A payload on the host as a tensor of bytes that shares its memory."""
    if isinstance(payload, torch.Tensor):
        return payload
    with warnings.catch_warnings():
        # torch warns about read-only memory, such as a packet of another process; here it is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(host_bytes(payload))
