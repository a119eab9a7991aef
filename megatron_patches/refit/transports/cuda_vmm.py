"""CUDA's virtual memory management, as needed to map one process's memory into another.

Functions of the driver library, which documents them under "Virtual Memory Management"; torch offers none of them. They
are called through the package cuda-bindings, which torch's releases for CUDA require.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.refit.errors import PartyFailedError


class CudaVmm:
    """The driver library, with errors as exceptions. Handles and addresses are integers, sizes are in bytes.

    Every method raises PartyFailedError with CUDA's message if CUDA fails.

    Raises:
        PartyFailedError: if the package cuda-bindings is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise PartyFailedError(
                f"the transport cuda_ipc needs the package cuda-bindings (pip install cuda-bindings): {error}"
            ) from error
        self._driver: Any = driver
        self._file = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that contains an address; of mapped memory, only of that mapping."""
        base, size = self._call("cuMemGetAddressRange", address, at=address)
        return int(base), int(size)

    def retain(self, address: int) -> int:
        """The handle that is mapped at an address, the same each time. Must be released once per call."""
        return int(*self._call("cuMemRetainAllocationHandle", address, at=address))

    def release(self, handle: int) -> None:
        """Releases a handle. The memory is freed when no process has a handle or mapping of it."""
        self._call("cuMemRelease", handle)

    def export_file(self, handle: int) -> int:
        """A new file descriptor with which other processes import the memory, if it was created for that."""
        return int(*self._call("cuMemExportToShareableHandle", handle, self._file, 0))

    def import_file(self, descriptor: int) -> int:
        """The handle of another process's memory, to be released. The descriptor may be closed at once."""
        return int(*self._call("cuMemImportFromShareableHandle", descriptor, self._file))

    def reserve(self, nbytes: int) -> int:
        """Reserves addresses without memory."""
        return int(*self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        """Frees reserved addresses: the whole range, with nothing mapped."""
        self._call("cuMemAddressFree", address, nbytes, at=address)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Maps all of a handle's memory at reserved addresses. The handle may be released at once."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0, at=address)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undoes one :meth:`map`."""
        self._call("cuMemUnmap", address, nbytes, at=address)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Lets a GPU access mapped addresses.

        Args:
            address: the first address.
            nbytes: number of bytes, across any number of mappings.
            device: the GPU, by its number in this process.
        """
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        # The access that devices support for device memory.
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1, at=address)

    def _call(self, name: str, *args: Any, at: int | None = None) -> tuple[Any, ...]:
        status, *found = getattr(self._driver, name)(*args)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(status)
            where = "" if at is None else f" at {at:#x}"
            said = "unknown" if text is None else text.decode()
            raise PartyFailedError(f"{name}{where}: {said} (CUDA's error {int(status)})")
        return tuple(found)
