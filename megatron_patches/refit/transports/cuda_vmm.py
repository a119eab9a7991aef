"""CUDA's virtual memory management, as needed to map one process's memory into another.

Functions of the driver library, which documents them under "Virtual Memory Management"; torch offers none of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from megatron_patches.refit.errors import PartyFailedError

_POSIX_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, a bit
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE: the access that devices support for device memory
_SPARE_BYTES = 64  # for fields that a later driver may write


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
        ("spare", ctypes.c_ubyte * _SPARE_BYTES),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The driver library, with errors as exceptions. Handles and addresses are integers, sizes are in bytes.

    Every method raises PartyFailedError with CUDA's message if CUDA fails.

    Raises:
        PartyFailedError: if the machine has no driver.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PartyFailedError(f"CUDA's driver library libcuda.so.1 cannot be loaded: {error}") from error

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that contains an address; of mapped memory, only of that mapping."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address), at=address
        )
        return int(base.value), int(size.value)

    def retain(self, address: int) -> int:
        """The handle that is mapped at an address, the same each time. Must be released once per call."""
        handle = ctypes.c_uint64()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address), at=address)
        return int(handle.value)

    def release(self, handle: int) -> None:
        """Releases a handle. The memory is freed when no process has a handle or mapping of it."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def becomes_file(self, handle: int) -> bool:
        """Whether the memory was created so that it can be exported as a file descriptor."""
        properties = _Properties()
        self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), ctypes.c_uint64(handle))
        return bool(properties.handle_types & _POSIX_FILE_DESCRIPTOR)

    def export_file(self, handle: int) -> int:
        """A new file descriptor with which other processes import the memory."""
        descriptor = ctypes.c_int(-1)
        flags = ctypes.c_ulonglong(0)
        self._call(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            ctypes.c_uint64(handle),
            ctypes.c_int(_POSIX_FILE_DESCRIPTOR),
            flags,
        )
        return int(descriptor.value)

    def import_file(self, descriptor: int) -> int:
        """The handle of another process's memory, to be released. The descriptor may be closed at once."""
        handle = ctypes.c_uint64()
        # The API takes the descriptor in place of a pointer.
        self._call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(_POSIX_FILE_DESCRIPTOR),
        )
        return int(handle.value)

    def reserve(self, nbytes: int) -> int:
        """Reserves addresses without memory."""
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_ulonglong(0),
        )
        return int(address.value)

    def free(self, address: int, nbytes: int) -> None:
        """Frees reserved addresses: the whole range, with nothing mapped."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes), at=address)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Maps all of a handle's memory at reserved addresses. The handle may be released at once."""
        self._call(
            "cuMemMap",
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(handle),
            ctypes.c_ulonglong(0),
            at=address,
        )

    def unmap(self, address: int, nbytes: int) -> None:
        """Undoes one :meth:`map`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes), at=address)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Lets a GPU access mapped addresses.

        Args:
            address: the first address.
            nbytes: number of bytes, across any number of mappings.
            device: the GPU, by its number in this process.
        """
        access = _Access(_Location(_DEVICE, device), _READ_AND_WRITE)
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            ctypes.byref(access),
            ctypes.c_size_t(1),
            at=address,
        )

    def _call(self, name: str, *args: Any, at: int | None = None) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            where = "" if at is None else f" at {at:#x}"
            raise PartyFailedError(f"{name}{where}: {(text.value or b'unknown').decode()} (CUDA's error {status})")
