"""Boxes in torch tensors: packed, unpacked and digested on the device where they lie.

On CUDA, work is put into a stream of the port's own and is under way when a method returns. A payload that lies on
the host passes through one buffer on the device, leased from the party's pool, so that it crosses in one piece.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_patches.refit.boxes import View
from megatron_patches.refit.device_pack import digest_box, pack_box, unpack_box
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.ports import Payload, Pending, Piece, host_bytes
from megatron_patches.refit.staging import Lease, StagingPool

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


class DevicePort:
    """Storages that are tensors of one device; see :class:`megatron_patches.refit.ports.Port`.

    Args:
        memory: the storages by name, flat tensors whose elements are as wide as the manifest says.
        where: whose they are, for messages: "source rank 3".
        pool: from which the buffer for payloads on the host is leased; None if there will be none.

    Raises:
        TransferError: if they lie on several devices.
    """

    def __init__(self, memory: Mapping[str, torch.Tensor], where: str, pool: StagingPool | None = None) -> None:
        devices = {tensor.device for tensor in memory.values()}
        if len(devices) != 1:
            raise TransferError(f"the storages on {where} lie on {sorted(map(str, devices))}; one device is needed")
        self._memory, self._where, self._pool = memory, where, pool
        self._device = devices.pop()
        self._stream: Any = None
        self._bounce: Lease[torch.Tensor] | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            # What was computed on the caller's stream, such as the optimizer's step, comes first.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def pack(self, pieces: Sequence[Piece], payload: Payload) -> Pending[list[int]]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        with self._on_stream():
            target, crossing = self._near(payload)
            digests = torch.zeros(len(pieces), dtype=torch.int64, device=self._device)
            for index, piece in enumerate(pieces):
                packed = _packed(target, piece)
                pack_box(self._elements(piece.view, piece.dtype), packed, piece.box, piece.shape, digests[index])
            if crossing:
                _from_host(payload).copy_(target, non_blocking=True)
            return _Digests(digests, self._record())

    def unpack(self, pieces: Sequence[Piece], payload: Payload) -> Pending[None]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        with self._on_stream():
            source, crossing = self._near(payload)
            if crossing:
                source.copy_(_from_host(payload), non_blocking=True)
            for piece in pieces:
                unpack_box(_packed(source, piece), self._elements(piece.view, piece.dtype))
            return _Ended(self._record())

    def digest(self, pieces: Sequence[Piece]) -> Pending[list[int]]:
        """See :class:`megatron_patches.refit.ports.Port`."""
        with self._on_stream():
            digests = torch.zeros(len(pieces), dtype=torch.int64, device=self._device)
            for index, piece in enumerate(pieces):
                digest_box(self._elements(piece.view, piece.dtype), piece.box, piece.shape, digests[index])
            return _Digests(digests, self._record())

    def in_place(self, piece: Piece) -> Payload:
        """See :class:`megatron_patches.refit.ports.Port`."""
        self._elements(piece.view, piece.dtype)  # the storage is as described
        low, high = piece.view.span
        return self._memory[piece.view.storage].detach()[low:high].view(torch.uint8)

    def close(self) -> None:
        """Waits for what is under way and gives the buffer back."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._bounce is not None:
            self._bounce.release()
            self._bounce = None

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _near(self, payload: Payload) -> tuple[torch.Tensor, bool]:
        """The payload itself, or memory of its size on the device and that its content has to cross."""
        if isinstance(payload, torch.Tensor) and payload.device == self._device:
            return payload, False
        if self._device.type == "cpu":
            return _from_host(payload), False
        nbytes = len(payload)
        if self._bounce is None or self._bounce.nbytes < nbytes:
            if self._bounce is not None:
                self._bounce.release()
                self._bounce = None  # the stream's own order protects what it is still used for
            pool = self._pool or StagingPool(nbytes)
            self._bounce = pool.lease(nbytes, lambda size: torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._bounce.buffer[:nbytes], True

    def _elements(self, view: View, dtype: str) -> torch.Tensor:
        storage = self._memory.get(view.storage)
        width = itemsize(dtype)
        if storage is None or storage.ndim != 1 or storage.element_size() != width:
            kind = "is missing" if storage is None else f"is {storage.dtype} of {storage.ndim} dimensions"
            raise TransferError(f"{view.storage} on {self._where} {kind}; a flat tensor of {dtype} was described")
        low, high = view.span
        if low < 0 or high > storage.numel():
            raise TransferError(
                f"{view.storage} on {self._where} has {storage.numel()} elements; the plan uses {low} to {high}"
            )
        return view.tensor(storage.detach().view(_SIGNED[width]))


class _Ended:
    """Work on a device that ends with an event; None for a device that has done it at once."""

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
        # torch knows no memory that may only be read, such as a packet in another process's; it is only read here.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(host_bytes(payload))


def _packed(payload: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The place of a piece in a payload, flat."""
    width = itemsize(piece.dtype)
    return payload[piece.offset : piece.offset + piece.box.volume * width].view(_SIGNED[width])
