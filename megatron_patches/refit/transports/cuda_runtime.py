"""One GPU, with the CUDA runtime functions that IPC needs and torch does not expose.

The runtime library is the one that torch has loaded; memory of the virtual memory API needs the driver's. Exported
memory is allocated separately: torch's allocator would return parts of larger blocks, or of segments that cannot be
exported this way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.device_port import DeviceWork
from megatron_patches.refit.memory.ports import Bits, Memory, Payload, Pending
from megatron_patches.refit.transports.cuda_mapped import Chunk, ChunkShelf, CudaVmm, Fetch, MappedRow
from megatron_patches.refit.transports.direct_copies import Int64s, Rows

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_STREAMS = 8  # of copies: a GPU has several copy engines, and the next copy starts while the last one ends
_BATCHES_SINCE = 13  # CUDA's major version
_COPY_KIND = 4  # cudaMemcpyDefault: the direction follows from the addresses


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """``cudaMemcpyAttributes``. Locations are hints about managed memory, which is not used here."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = _CopyAttributes(source_order=1)  # cudaMemcpySrcAccessOrderStream
_FROM_THE_FIRST = ctypes.c_size_t(0)  # the attributes apply from the first copy of a batch


class _Library:
    """The CUDA runtime library, with errors as exceptions."""

    def __init__(self) -> None:
        major = str(torch.version.cuda).split(".")[0]
        try:
            self._library = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise PartyFailedError(f"CUDA's run-time library libcudart.so.{major} cannot be loaded: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        # These calls only start work, and there are thousands. Releasing and retaking the GIL for each would be slow. A
        # call that finds its stream's queue full waits for copies, which do not need the GIL.
        begins = ctypes.PyDLL(None, handle=self._library._handle)
        self._copy, self._copy_rows = begins.cudaMemcpyAsync, begins.cudaMemcpy2DAsync
        self._copy.argtypes = [pointer, pointer, size, kind, pointer]
        self._copy_rows.argtypes = [pointer, size, pointer, size, size, size, kind, pointer]
        # One call that starts many copies. CUDA 12.8 and 12.9 have it, too, with one more argument.
        self.has_batches = int(major) >= _BATCHES_SINCE
        if self.has_batches:
            self._copy_batch = begins.cudaMemcpyBatchAsync
            self._copy_batch.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Starts to copy bytes; raises as :meth:`call`."""
        self._check("cudaMemcpyAsync", self._copy(target, source, nbytes, _COPY_KIND, stream))

    def copy_batch(self, targets: Int64s, sources: Int64s, nbytes: Int64s, stream: int) -> None:
        """Starts copies in one call, in any order; raises as :meth:`call`. Not for the default stream."""
        where = (numbers.ctypes.data for numbers in (targets, sources, nbytes))
        attributes = ctypes.addressof(_IN_STREAM_ORDER), ctypes.addressof(_FROM_THE_FIRST), 1
        self._check("cudaMemcpyBatchAsync", self._copy_batch(*where, len(nbytes), *attributes, stream))

    def copy_rows(self, target: int, source: int, rows: Rows, stream: int) -> None:
        """Starts to copy rows; raises as :meth:`call`."""
        copy = self._copy_rows
        steps = rows.target_step, source, rows.source_step
        self._check("cudaMemcpy2DAsync", copy(target, *steps, rows.nbytes, rows.count, _COPY_KIND, stream))

    def call(self, name: str, *args: Any) -> None:
        """Calls a function; raises PartyFailedError with CUDA's message if it fails."""
        function: Callable[..., int] = getattr(self._library, name)
        self._check(name, function(*args))

    def _check(self, name: str, status: int) -> None:
        if status:
            # Otherwise torch would find the error at its next call and report it as its own.
            self._library.cudaGetLastError()
            words = self._library.cudaGetErrorString(ctypes.c_int(status))
            raise PartyFailedError(f"{name}: {words.decode()}")


class IpcHandle(msgspec.Struct, frozen=True, tag="ipc"):
    """Opens memory that CUDA has allocated.

    Attributes:
        content: ``cudaIpcMemHandle_t``.
    """

    content: bytes


class MappedHandle(msgspec.Struct, frozen=True, tag="mapped"):
    """Opens memory that was mapped with the virtual memory API.

    Attributes:
        chunks: its chunks.
    """

    chunks: tuple[Chunk, ...]


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a storage lies.

    Attributes:
        handle: handle with which other processes open its allocation.
        start: its first byte in the allocation.
    """

    handle: bytes
    start: int


_encode = msgspec.msgpack.Encoder().encode
decode_handle = msgspec.msgpack.Decoder(IpcHandle | MappedHandle).decode


class CudaRuntime:
    """One GPU as seen by one process. All methods raise PartyFailedError if CUDA fails.

    Args:
        device: torch's name of the GPU, such as ``cuda:1``.

    Attributes:
        uuid: the GPU's UUID, equal in all processes.

    Raises:
        PartyFailedError: if it is not a GPU, or CUDA's library is missing.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise PartyFailedError(
                f"the transport cuda_ipc moves memory of GPUs and this party's storages are on {device}; use shm"
            )
        self._library, self._driver = _Library(), CudaVmm()
        self._shelf = ChunkShelf(self._driver)
        self._handles: dict[int, bytes] = {}  # of allocations located last, by number
        index = self._device.index
        self._index = torch.cuda.current_device() if index is None else index
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    @cached_property
    def _streams(self) -> CopyStreams:
        """Streams of a destination. A source does not copy."""
        return CopyStreams(self._device)

    def export(self, nbytes: int) -> CudaExport:
        """Allocates memory that other processes can open."""
        with torch.cuda.device(self._device):
            address = ctypes.c_void_p()
            self._library.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
            handle = _Handle()
            try:
                self._library.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
            except PartyFailedError:
                self._library.call("cudaFree", address)
                raise
        return CudaExport(self._library, self._device, int(address.value or 0), nbytes, _encode(_ipc(handle)))

    def open(self, handle: bytes, fetch: Fetch) -> CudaOpened:
        """Opens memory that another process has exported.

        Args:
            handle: its handle.
            fetch: fetches descriptors from that process, if the handle needs them.
        """
        how = decode_handle(handle)
        with self._current():
            if isinstance(how, MappedHandle):
                row = MappedRow(self._driver, self._index, how.chunks, fetch)
                return CudaOpened(self._device, self._streams, row.address, row.close)
            address = ctypes.c_void_p()
            self._library.call(
                "cudaIpcOpenMemHandle",
                ctypes.byref(address),
                _Handle.from_buffer_copy(how.content),
                ctypes.c_uint(_ENABLE_PEER_ACCESS),
            )
        close = partial(self._library.call, "cudaIpcCloseMemHandle", address)
        return CudaOpened(self._device, self._streams, int(address.value or 0), close)

    def locate(self, memory: Memory) -> Mapping[str, Location]:
        """Locations of storages. Storages in memory that CUDA cannot export in either way are left out.

        CUDA makes a handle in about 15 microseconds, so handles are kept by the number of their allocation.
        """
        found: dict[str, Location] = {}
        handles: dict[int, bytes | None] = {}  # by number of the allocation
        mapped: dict[str, tuple[int, int]] = {}
        base = end = 0
        handle = None
        with self._current():
            for name, storage in memory.items():
                if not isinstance(storage, torch.Tensor) or not storage.is_cuda:
                    continue
                start = storage.data_ptr()
                stop = start + storage.nbytes
                if not base <= start < end:  # neighbouring parameters often share an allocation
                    base, size = self._driver.allocation_of(start)
                    end = base + size
                    number = self._driver.number_of(base)
                    if number not in handles:
                        handles[number] = self._handles.get(number) or self._handle_of(base)
                    handle = handles[number]
                if handle is None:
                    mapped[name] = start, stop
                elif stop <= end:
                    found[name] = Location(handle, start - base)
            self._handles = {number: handle for number, handle in handles.items() if handle is not None}
            rows: dict[int, bytes] = {}
            for name, lying in self._shelf.locate(mapped).items():
                key = id(lying.chunks)
                if key not in rows:
                    rows[key] = _encode(MappedHandle(lying.chunks))
                found[name] = Location(rows[key], lying.start)
        return found

    def descriptor(self, number: int) -> int:
        """A descriptor of a chunk, for the process that requests it, as a handle says; the caller closes it.

        Raises:
            PartyFailedError: if the number is unknown, or CUDA fails.
        """
        with self._current():
            return self._shelf.export(number)

    def close(self) -> None:
        """Forgets located memory."""
        self._shelf.close()

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the GPU current in this thread, also for the driver, whose functions use the current GPU."""
        with torch.cuda.device(self._device):
            self._library.call("cudaSetDevice", ctypes.c_int(self._index))
            yield

    def _handle_of(self, base: int) -> bytes | None:
        handle = _Handle()
        try:
            self._library.call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(base))
        except PartyFailedError:
            return None  # mapped with the virtual memory API, like expandable segments and symmetric memory
        return _encode(_ipc(handle))

    def address_of(self, memory: Bits | Payload) -> int:
        """Address of memory; raises PartyFailedError if it is not on a GPU."""
        if not isinstance(memory, torch.Tensor) or not memory.is_cuda:
            raise PartyFailedError("memory of the host cannot take a copy from a GPU's memory")
        return memory.data_ptr()

    def copier(self) -> CudaCopier:
        """Makes the copier of one link."""
        return CudaCopier(self._library, self._device, self._streams)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that no other process opens."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _ipc(handle: _Handle) -> IpcHandle:
    return IpcHandle(bytes(handle))


class CudaExport:
    """Memory of this process that other processes can open.

    Args:
        library: CUDA.
        device: its device.
        address: its first byte.
        nbytes: its size.
        handle: handle with which others open it.
    """

    def __init__(self, library: _Library, device: torch.device, address: int, nbytes: int, handle: bytes) -> None:
        self._library, self._device, self._address, self.handle = library, device, address, handle
        # The interface by which torch wraps foreign memory.
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
            PartyFailedError: after it was closed.
        """
        if self._tensor is None:
            raise PartyFailedError("the link was closed")
        return self._tensor[start:stop]

    def close(self) -> None:
        """Waits until the GPU no longer uses it, and frees it."""
        if self._tensor is not None:
            self._tensor = None
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                self._library.call("cudaFree", ctypes.c_void_p(self._address))


class CopyStreams:
    """The streams of one GPU's copies, used in turn.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
        self._handles = [stream.cuda_stream for stream in self.streams]
        self._turn = 0

    def next(self) -> tuple[int, int]:
        """Number and CUDA handle of the next stream."""
        self._turn = (self._turn + 1) % _STREAMS
        return self._turn, self._handles[self._turn]


class CudaOpened:
    """Memory of another process.

    Args:
        device: this party's GPU.
        streams: streams of copies.
        address: its address in this process.
        forget: closes it.
    """

    def __init__(self, device: torch.device, streams: CopyStreams, address: int, forget: Callable[[], None]) -> None:
        self.address = address
        self._device, self._streams, self._forget = device, streams, forget

    def close(self) -> None:
        """Waits for copies and closes the memory."""
        with torch.cuda.device(self._device):
            for stream in self._streams.streams:
                stream.synchronize()
            self._forget()


class CudaCopier:
    """Starts copies to this party's GPU. Addresses are those of this process.

    Args:
        library: CUDA.
        device: this party's GPU.
        streams: streams for copies, used in turn. CUDA knows the GPU of a stream.
    """

    def __init__(self, library: _Library, device: torch.device, streams: CopyStreams) -> None:
        self._library, self._device, self._streams, self._used = library, device, streams, set[int]()

    def runs(self, sources: Int64s, targets: Int64s, nbytes: Int64s) -> None:
        """Starts to copy runs of bytes, in any order.

        Args:
            sources: ``[runs]``, source address of each.
            targets: ``[runs]``, target address of each.
            nbytes: ``[runs]``, length of each.

        Raises:
            PartyFailedError: if CUDA fails.
        """
        if self._library.has_batches and len(nbytes) > 1:
            to, start, length = (np.ascontiguousarray(each, dtype=np.int64) for each in (targets, sources, nbytes))
            self._library.copy_batch(to, start, length, self._next())
            return
        for target, source, length in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
            self._library.copy(target, source, length, self._next())

    def rows(self, source: int, target: int, rows: Rows) -> None:
        """Starts to copy rows from ``source`` to ``target``, the addresses of the first row; raises as :meth:`runs`."""
        self._library.copy_rows(target, source, rows, self._next())

    def ended(self) -> Pending[None]:
        """All copies that were started since the last call."""
        used, self._used = self._used, set()
        with torch.cuda.device(self._device):
            return DeviceWork([self._streams.streams[number].record_event() for number in sorted(used)])

    def _next(self) -> int:
        number, stream = self._streams.next()
        self._used.add(number)
        return stream
