"""The few functions of CUDA's run-time library that IPC takes, and that torch does not offer.

The library is the one that torch has loaded. Memory that is exported is allocated by itself: torch's allocator would
hand out parts of larger blocks, or of segments that cannot be exported this way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.ports import Elements, Memory, Payload, Pending
from megatron_patches.refit.transports.cuda_ipc import Location, Rows

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_STREAMS = 2  # of copies from one allocation: the next begins while the last one ends
_COPY_KIND = 4  # cudaMemcpyDefault: the addresses say from where to where


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Library:
    """The run-time library, with errors as exceptions."""

    def __init__(self) -> None:
        major = str(torch.version.cuda).split(".")[0]
        try:
            self._library = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise PartyFailedError(f"CUDA's run-time library libcudart.so.{major} cannot be loaded: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args: Any) -> None:
        """Calls a function; raises PartyFailedError with CUDA's words if it fails."""
        function: Callable[..., int] = getattr(self._library, name)
        status = function(*args)
        if status:
            # Otherwise torch would find the error at its next call and take it for its own.
            self._library.cudaGetLastError()
            words = self._library.cudaGetErrorString(ctypes.c_int(status))
            raise PartyFailedError(f"{name}: {words.decode()}")


class _Driver:
    """The one function of the driver's library that the run-time library has no counterpart of."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PartyFailedError(f"CUDA's driver library libcuda.so.1 cannot be loaded: {error}") from error

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Beginning and size of the allocation that an address lies in.

        Raises:
            PartyFailedError: if it lies in none.
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if status:
            raise PartyFailedError(f"cuMemGetAddressRange: CUDA's error {status} for address {address:#x}")
        return int(base.value), int(size.value)


class CudaRuntime:
    """One GPU; see :class:`megatron_patches.refit.transports.cuda_ipc.DeviceRuntime`.

    Args:
        device: torch's name of it, ``cuda:1``.

    Raises:
        PartyFailedError: if it is no GPU, or CUDA's library is missing.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise PartyFailedError(
                f"the transport cuda_ipc moves memory of GPUs and this party's storages are on {device}; use shm"
            )
        self._library, self._driver = _Library(), _Driver()
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def export(self, nbytes: int) -> CudaExport:
        """Allocates memory that others may open."""
        with torch.cuda.device(self._device):
            address = ctypes.c_void_p()
            self._library.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
            handle = _Handle()
            try:
                self._library.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
            except PartyFailedError:
                self._library.call("cudaFree", address)
                raise
        return CudaExport(self._library, self._device, int(address.value or 0), nbytes, bytes(handle))

    def open(self, handle: bytes) -> CudaOpened:
        """Opens what another process has exported."""
        with torch.cuda.device(self._device):
            address = ctypes.c_void_p()
            self._library.call(
                "cudaIpcOpenMemHandle",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_ENABLE_PEER_ACCESS),
            )
        return CudaOpened(self._library, self._device, int(address.value or 0))

    def locate(self, memory: Memory) -> Mapping[str, Location]:
        """Where storages lie; left out are those in memory that CUDA cannot export this way."""
        found: dict[str, Location] = {}
        handles: dict[int, bytes | None] = {}
        for name, storage in memory.items():
            if not isinstance(storage, torch.Tensor) or not storage.is_cuda:
                continue
            base, size = self._driver.allocation_of(storage.data_ptr())
            start = storage.data_ptr() - base
            if base not in handles:
                handles[base] = self._handle_of(base)
            handle = handles[base]
            if handle is not None and start + storage.numel() * storage.element_size() <= size:
                found[name] = Location(handle, start)
        return found

    def _handle_of(self, base: int) -> bytes | None:
        handle = _Handle()
        with torch.cuda.device(self._device):
            try:
                self._library.call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(base))
            except PartyFailedError:
                return None  # memory that is mapped by hand, as expandable segments and symmetric memory are
        return bytes(handle)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that nobody else opens."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class CudaExport:
    """Memory of this process that others may open.

    Args:
        library: CUDA.
        device: where it lies.
        address: its first byte.
        nbytes: its size.
        handle: what others open it by.
    """

    def __init__(self, library: _Library, device: torch.device, address: int, nbytes: int, handle: bytes) -> None:
        self._library, self._device, self._address, self.handle = library, device, address, handle
        # How torch, like others, takes memory that is not its own.
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self._tensor: torch.Tensor | None = torch.as_tensor(self, device=device)

    def part(self, start: int, stop: int) -> Payload:
        """Bytes ``start`` to ``stop`` of it.

        Raises:
            PartyFailedError: once it was closed.
        """
        if self._tensor is None:
            raise PartyFailedError("the link was closed")
        return self._tensor[start:stop]

    def close(self) -> None:
        """Frees it, when what still uses it has ended."""
        if self._tensor is not None:
            self._tensor = None
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                self._library.call("cudaFree", ctypes.c_void_p(self._address))


class CudaOpened:
    """Memory of another process.

    Args:
        library: CUDA.
        device: the own GPU.
        address: its first byte, in this process.
    """

    def __init__(self, library: _Library, device: torch.device, address: int) -> None:
        self._library, self._device, self._address = library, device, address
        self._streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
        self._turn = 0

    def copy(self, start: int, target: Payload) -> Pending[None]:
        """Begins to copy its bytes from ``start`` on, as many as ``target`` has.

        Raises:
            PartyFailedError: if the target is not on a GPU, or CUDA refuses.
        """
        if not isinstance(target, torch.Tensor):
            raise PartyFailedError("a slot on the host cannot take a copy from a GPU's memory")
        nbytes = target.numel()
        return self._copy(target.data_ptr(), start, Rows(1, nbytes, nbytes, nbytes))

    def copy_rows(self, start: int, target: Elements, rows: Rows) -> Pending[None]:
        """Begins to copy rows, the first of which begins at byte ``start``, to where ``target`` lies.

        Raises:
            PartyFailedError: if the target is not on a GPU, or CUDA refuses.
        """
        if not isinstance(target, torch.Tensor):
            raise PartyFailedError("an array on the host cannot take a copy from a GPU's memory")
        return self._copy(target.data_ptr(), start, rows)

    def _copy(self, target: int, start: int, rows: Rows) -> Pending[None]:
        self._turn = (self._turn + 1) % _STREAMS
        stream = self._streams[self._turn]
        with torch.cuda.device(self._device):
            if rows.count == 1:
                self._library.call(
                    "cudaMemcpyAsync",
                    ctypes.c_void_p(target),
                    ctypes.c_void_p(self._address + start),
                    ctypes.c_size_t(rows.nbytes),
                    ctypes.c_int(_COPY_KIND),
                    ctypes.c_void_p(stream.cuda_stream),
                )
                return _Copying(stream.record_event())
            self._library.call(
                "cudaMemcpy2DAsync",
                ctypes.c_void_p(target),
                ctypes.c_size_t(rows.target_step),
                ctypes.c_void_p(self._address + start),
                ctypes.c_size_t(rows.source_step),
                ctypes.c_size_t(rows.nbytes),
                ctypes.c_size_t(rows.count),
                ctypes.c_int(_COPY_KIND),
                ctypes.c_void_p(stream.cuda_stream),
            )
            return _Copying(stream.record_event())

    def close(self) -> None:
        """Waits for copies and forgets it."""
        with torch.cuda.device(self._device):
            for stream in self._streams:
                stream.synchronize()
            self._library.call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))


class _Copying:
    """A copy that ends with an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def result(self) -> None:
        self._event.synchronize()
