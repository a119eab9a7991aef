"""Boxes in the memory of a GPU: packed, unpacked and digested there, by a Triton kernel.

On CUDA, work is queued on the port's own stream and may still be running when a method returns. A payload on the host
passes through one buffer on the device, leased from the party's pool, so that it crosses in one piece.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_patches.refit.device_tables import VALUES, Part, Shape, describe
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.ports import Batch, Payload, Pending, Piece, Places, Spot, host_bytes
from megatron_patches.refit.staging import Lease, StagingPool

_MASK = (1 << 64) - 1
_VECTOR_BYTES = 16  # what the kernel reads at a time if everything is aligned to it


@dataclass
class _Compiled:
    """A batch in the form that the kernel takes.

    Attributes:
        names: storages of the batch.
        form: what the batch is valid for: the storages' sizes and dtypes, and the alignment of storages and payload to
            16 bytes.
        parts: one per launch, with places relative to the start of the storages.
        tiles: one tensor per launch.
        addresses: addresses of the storages that ``tables`` are made for.
        tables: one tensor per launch.
    """

    names: Sequence[str]
    form: tuple[object, ...]
    parts: Sequence[Part]
    tiles: Sequence[torch.Tensor]
    addresses: Sequence[int] = ()
    tables: Sequence[torch.Tensor] = ()


class DevicePort:
    """Storages that are tensors of one device; see :class:`megatron_patches.refit.ports.Port`.

    Args:
        memory: the storages by name, flat tensors whose elements are as wide as the manifest says.
        where: owner of the storages, for messages, such as "source rank 3".
        pool: pool of the buffer for payloads on the host; None if there are none.

    Raises:
        TransferError: if the storages are on several devices, or Triton is missing.
    """

    def __init__(self, memory: Mapping[str, torch.Tensor], where: str, pool: StagingPool | None = None) -> None:
        if importlib.util.find_spec("triton") is None:
            raise TransferError(f"the storages on {where} are packed by a Triton kernel: pip install triton")
        self._where, self._pool = where, pool
        self._memory: Mapping[str, torch.Tensor] = {}
        self._addresses: Mapping[str, int] = {}
        self._forms: Mapping[str, tuple[int, int, torch.dtype]] = {}
        self._checked: WeakKeyDictionary[Batch, tuple[tuple[str, ...], object]] = WeakKeyDictionary()
        self._device = _device_of(memory, where)
        self._stream: Any = None
        self._bounce: Lease[torch.Tensor] | None = None
        self._compiled: WeakKeyDictionary[Batch, _Compiled] = WeakKeyDictionary()
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        self._origin = torch.empty(_VECTOR_BYTES, dtype=torch.uint8, device=self._device)
        self.renew(memory)

    @property
    def asynchronous(self) -> bool:
        """See :class:`megatron_patches.refit.ports.Port`."""
        return self._stream is not None

    def renew(self, memory: Mapping[str, torch.Tensor]) -> None:
        """See :class:`megatron_patches.refit.ports.Port`; waits for the work on the caller's stream."""
        if _device_of(memory, self._where) != self._device:
            raise TransferError(f"the storages on {self._where} have moved from {self._device} to another device")
        self._memory = memory
        self._addresses = {name: storage.data_ptr() for name, storage in memory.items()}
        self._forms = {
            name: (self._addresses[name] % _VECTOR_BYTES, storage.numel(), storage.dtype)
            for name, storage in memory.items()
        }
        if self._stream is not None:
            # Wait for earlier work there, such as the optimizer's step. Memory that it has freed may also be written to
            # by the transports' streams.
            torch.cuda.current_stream(self._device).synchronize()

    def pack(self, batch: Batch, payload: Payload) -> Pending[list[int]]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        with self._on_stream():
            target, crossing = self._near(payload)
            digests = torch.zeros(len(batch.pieces), dtype=torch.int64, device=self._device)
            self._launch("PACK", batch, target, digests)
            if crossing:
                _from_host(payload).copy_(target, non_blocking=True)
            return self._digests(digests)

    def unpack(self, batch: Batch, payload: Payload) -> Pending[None]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        with self._on_stream():
            source, crossing = self._near(payload)
            if crossing:
                source.copy_(_from_host(payload), non_blocking=True)
            self._launch("UNPACK", batch, source, None)
            return _Ended(self._record())

    def digest(self, batch: Batch) -> Pending[list[int]]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        with self._on_stream():
            digests = torch.zeros(len(batch.pieces), dtype=torch.int64, device=self._device)
            self._launch("DIGEST", batch, None, digests)
            return self._digests(digests)

    def places(self, batch: Batch) -> Sequence[Spot]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        names, known = self._checked.get(batch, ((), None))
        form = tuple(map(self._forms.get, names))
        if known != form:
            names = tuple({piece.view.storage: None for piece in batch.pieces})
            for piece in batch.pieces:
                self._check(piece)
            self._checked[batch] = names, tuple(map(self._forms.get, names))
        return Places(self._memory, batch.pieces)

    def close(self) -> None:
        """Waits for work under way, returns the buffer, and drops the storages."""
        if self._stream is not None:
            self._stream.synchronize()
        self._memory = {}
        if self._bounce is not None:
            self._bounce.release()
            self._bounce = None

    def _launch(self, move: str, batch: Batch, payload: torch.Tensor | None, digests: torch.Tensor | None) -> None:
        """Launches the kernel for a batch on the current stream, once for each shape of its boxes."""
        from megatron_patches.refit.device_kernels import Move, move_boxes

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
    ) -> Iterator[tuple[Shape, torch.Tensor, torch.Tensor]]:
        """Shape, table and tiles of each launch for a batch; recomputed if memory has moved."""
        past = 0 if payload is None else payload.data_ptr() % _VECTOR_BYTES
        found = self._compiled.get(batch)
        names = found.names if found is not None else sorted({piece.view.storage for piece in batch.pieces})
        form = (past, *[self._forms.get(name) for name in names])
        if found is None or found.form != form:
            for piece in batch.pieces:
                self._check(piece)
            parts = describe(batch.pieces, names, [self._forms[name][0] for name in names], past)
            found = _Compiled(names, form, parts, [self._upload(part.tiles) for part in parts])
            self._compiled[batch] = found
        addresses = [self._addresses[name] for name in names]
        if found.addresses != addresses:
            origins = np.array(addresses, dtype=np.int64) - self._origin.data_ptr()
            tables = []
            for part in found.parts:
                moved = part.table.copy()
                moved[:, VALUES] += origins[part.storages] // part.shape.width
                tables.append(self._upload(moved))
            found.addresses, found.tables = addresses, tables
        for part, table, tiles in zip(found.parts, found.tables, found.tiles, strict=True):
            yield part.shape, table, tiles

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Copies an array to the device. Synchronous, because it happens once."""
        return torch.from_numpy(array).to(self._device)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _digests(self, digests: torch.Tensor) -> _Digests:
        """Queues a copy of digests to the host after their computation."""
        if self._stream is None:
            return _Digests(digests, None)
        host = torch.empty(digests.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(digests, non_blocking=True)
        return _Digests(host, self._record())

    def _near(self, payload: Payload) -> tuple[torch.Tensor, bool]:
        """The payload itself, or a buffer of its size on the device and True, if its content must be copied across."""
        if isinstance(payload, torch.Tensor) and payload.device == self._device:
            return payload, False
        if self._device.type == "cpu":
            return _from_host(payload), False
        nbytes = len(payload)
        if self._bounce is None or self._bounce.nbytes < nbytes:
            if self._bounce is not None:
                self._bounce.release()
                self._bounce = None  # stream order protects work that still uses it
            pool = self._pool or StagingPool(nbytes)
            self._bounce = pool.lease(nbytes, lambda size: torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._bounce.buffer[:nbytes], True

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


def _device_of(memory: Mapping[str, torch.Tensor], where: str) -> torch.device:
    devices = {tensor.device for tensor in memory.values()}
    if len(devices) != 1:
        raise TransferError(f"the storages on {where} lie on {sorted(map(str, devices))}; one device is needed")
    return devices.pop()


class _Ended:
    """Work on a device that ends with an event; None if it has already been done."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def result(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class _Digests(_Ended):
    """Digests that a device computes."""

    def __init__(self, digests: torch.Tensor, event: Any) -> None:
        super().__init__(event)
        self._digests = digests

    def result(self) -> list[int]:  # type: ignore[override]
        super().result()
        return [value & _MASK for value in self._digests.tolist()]


def _from_host(payload: Payload) -> torch.Tensor:
    if isinstance(payload, torch.Tensor):
        return payload
    with warnings.catch_warnings():
        # torch warns about read-only memory, such as a packet of another process; here it is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(host_bytes(payload))
