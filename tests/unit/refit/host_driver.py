"""CUDA's virtual memory management, played by files without a name that are mapped by the host's own mmap.

As strict as CUDA's: what was not made, is given back twice, or is not given back whole, is an error; memory that nobody
was given access to cannot be touched.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass, field

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.transports.cuda_mapped import CudaVmm

PAGE = 4096
_READ_AND_WRITE = 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 1, 2, 16, 32
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass
class _Allocation:
    file: int
    nbytes: int
    shareable: bool
    references: int = 1


@dataclass
class HostDriver(CudaVmm):
    """The functions of CUDA, with files.

    Attributes:
        refused: what an import fails with, if it is to fail.
        allowed: GPUs that were given access, in order.
    """

    refused: str = ""
    allowed: list[int] = field(default_factory=list)
    _allocations: dict[int, _Allocation] = field(default_factory=dict)
    _mappings: dict[int, tuple[int, int]] = field(default_factory=dict)
    _reserved: dict[int, int] = field(default_factory=dict)
    _handles: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    def create(self, nbytes: int, *, shareable: bool = True) -> int:
        """Makes memory; its handle."""
        file = os.memfd_create("chunk")
        os.ftruncate(file, nbytes)
        handle = next(self._handles)
        self._allocations[handle] = _Allocation(file, nbytes, shareable)
        return handle

    def segment(self, sizes: list[int], *, shareable: bool = True) -> int:
        """Chunks that are mapped one after the other, with nothing behind them; their address."""
        address = self.reserve(sum(sizes) + PAGE)
        at = address
        for nbytes in sizes:
            handle = self.create(nbytes, shareable=shareable)
            self.map(at, nbytes, handle)
            self.release(handle)
            at += nbytes
        self.allow(address, sum(sizes), 0)
        return address

    def drop(self, address: int) -> None:
        """Unmaps all of a segment, and frees its addresses."""
        nbytes = self._reserved[address]
        for base in [base for base in self._mappings if address <= base < address + nbytes]:
            self.unmap(base, self._mappings[base][0])
        self.free(address, nbytes)

    @property
    def clean(self) -> bool:
        """Whether all was given back."""
        return not (self._allocations or self._mappings or self._reserved)

    def allocation_of(self, address: int) -> tuple[int, int]:
        for base, (nbytes, _) in self._mappings.items():
            if base <= address < base + nbytes:
                return base, nbytes
        raise PartyFailedError(f"nothing is mapped at {address:#x}")

    def retain(self, address: int) -> int:
        _, handle = self._mappings[self.allocation_of(address)[0]]
        self._allocations[handle].references += 1
        return handle

    def release(self, handle: int) -> None:
        allocation = self._allocations[handle]
        allocation.references -= 1
        if not allocation.references:
            os.close(allocation.file)
            del self._allocations[handle]

    def export_file(self, handle: int) -> int:
        allocation = self._allocations[handle]
        if not allocation.shareable:
            raise PartyFailedError("it was made for no other process")
        return os.dup(allocation.file)

    def import_file(self, descriptor: int) -> int:
        if self.refused:
            raise PartyFailedError(self.refused)
        handle = next(self._handles)
        self._allocations[handle] = _Allocation(os.dup(descriptor), os.fstat(descriptor).st_size, False)
        return handle

    def reserve(self, nbytes: int) -> int:
        address = _mmap(None, nbytes, _PRIVATE | _ANONYMOUS, -1)
        self._reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        if self._reserved.pop(address) != nbytes or any(address <= base < address + nbytes for base in self._mappings):
            raise PartyFailedError(f"{nbytes} bytes at {address:#x} cannot be freed")
        assert not _libc.munmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        allocation = self._allocations[handle]
        if allocation.nbytes != nbytes or address in self._mappings or address % PAGE:
            raise PartyFailedError(f"{nbytes} bytes of {allocation.nbytes} cannot be mapped at {address:#x}")
        assert _mmap(address, nbytes, _SHARED | _FIXED, allocation.file) == address
        allocation.references += 1
        self._mappings[address] = nbytes, handle

    def unmap(self, address: int, nbytes: int) -> None:
        size, handle = self._mappings.pop(address)
        assert size == nbytes
        assert _mmap(address, nbytes, _PRIVATE | _ANONYMOUS | _FIXED, -1) == address
        self.release(handle)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        at = address
        while at < address + nbytes:
            base, size = self.allocation_of(at)
            assert not _libc.mprotect(base, size, _READ_AND_WRITE)
            at = base + size
        self.allowed.append(device)


def _mmap(address: int | None, nbytes: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, nbytes, 0, flags, file, 0)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def content_at(address: int, nbytes: int) -> memoryview:
    """Bytes that are mapped, to read and to write."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
