"""Memory mapped with CUDA's virtual memory API: how a source exports it, and how a destination maps it.

Expandable segments of torch's allocator and symmetric memory are of this kind. Such memory consists of *chunks*,
separate allocations mapped one after another. Other processes identify a chunk by a number, with which they request its
file descriptor. They map consecutive chunks consecutively, too, so that memory that spans several chunks does so there
as well. The driver library documents the functions under "Virtual Memory Management"; torch offers none of them. They
are called through the package cuda-bindings, which torch's releases for CUDA require.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

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
        self._number = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that contains an address; of mapped memory, only of that mapping."""
        base, size = self._call("cuMemGetAddressRange", address, at=address)
        return int(base), int(size)

    def number_of(self, address: int) -> int:
        """The number of the allocation that contains an address. A process never has it for two allocations."""
        return int(*self._call("cuPointerGetAttribute", self._number, address, at=address))

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


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """An allocation that other processes may map.

    Attributes:
        number: number with which they request it; never reused.
        nbytes: its size.
    """

    number: int
    nbytes: int


class Lying(NamedTuple):
    """Position of some memory: a row of chunks, the same object for all memory in it, and the first byte in the row."""

    chunks: tuple[Chunk, ...]
    start: int


Fetch = Callable[[Sequence[int], Callable[[int, int], None]], None]
"""Fetches the descriptors of chunks by number, and calls a function with each number and descriptor."""


@dataclass(frozen=True, slots=True)
class _Held:
    chunk: Chunk
    handle: int


class ChunkShelf:
    """The chunks of this process that other processes may map.

    A chunk on the shelf is retained, so that its handle, which identifies it, cannot be reused. Its memory stays
    allocated meanwhile. It leaves the shelf when no located memory lies in it any longer.

    Args:
        driver: CUDA.
    """

    def __init__(self, driver: CudaVmm) -> None:
        self._driver = driver
        self._held: dict[int, _Held] = {}
        self._next = 0

    def locate(self, spans: Mapping[str, tuple[int, int]]) -> dict[str, Lying]:
        """Finds the chunks of some memory, and forgets all other chunks.

        Args:
            spans: first address of each piece of memory, and the address after its last.

        Returns:
            Positions of the memory that others can map. Memory that lies, even in part, in other allocations is left
            out.
        """
        asked: dict[int, _Held | None] = {}
        found: dict[str, list[int]] = {}
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            bases = self._bases(start, stop, asked)
            if bases is not None:
                found[name] = bases
        used = {base for bases in found.values() for base in bases}
        self._forget(set(self._held) - used)
        rows: dict[int, tuple[tuple[Chunk, ...], int]] = {}  # by start of a chunk, with the start of the row
        for row in self._rows(sorted(used)):
            chunks = tuple(self._held[base].chunk for base in row)
            rows |= dict.fromkeys(row, (chunks, row[0]))
        return {name: Lying(rows[bases[0]][0], spans[name][0] - rows[bases[0]][1]) for name, bases in found.items()}

    def export(self, number: int) -> int:
        """A file descriptor of a chunk, which the caller closes.

        Raises:
            PartyFailedError: if the chunk is not on the shelf, or CUDA fails.
        """
        for held in self._held.values():
            if held.chunk.number == number:
                return self._driver.export_file(held.handle)
        raise PartyFailedError(f"memory number {number} is not, or no longer, on the shelf; weights have moved since")

    def close(self) -> None:
        """Forgets all chunks."""
        self._forget(set(self._held))

    def _bases(self, start: int, stop: int, asked: dict[int, _Held | None]) -> list[int] | None:
        """Start addresses of the chunks that contain a span; None if chunks do not contain all of it."""
        bases = []
        address = start
        while address < stop:
            base, nbytes = self._driver.allocation_of(address)
            if base not in asked:
                asked[base] = self._hold(base, nbytes)
            if asked[base] is None:
                return None
            bases.append(base)
            address = base + nbytes
        return bases or None

    def _hold(self, base: int, nbytes: int) -> _Held | None:
        try:
            handle = self._driver.retain(base)
        except PartyFailedError:
            return None  # not mapped with the virtual memory API
        known = self._held.get(base)
        if known is not None and (known.handle, known.chunk.nbytes) == (handle, nbytes):
            self._driver.release(handle)  # it is already retained
            return known
        try:
            os.close(self._driver.export_file(handle))
        except PartyFailedError:
            self._driver.release(handle)
            return None  # it was made for no other process
        held = _Held(Chunk(self._next, nbytes), handle)
        self._next += 1
        self._forget({base} & set(self._held))
        self._held[base] = held
        return held

    def _forget(self, bases: Iterable[int]) -> None:
        for base in bases:
            self._driver.release(self._held.pop(base).handle)

    def _rows(self, bases: Sequence[int]) -> list[list[int]]:
        """Groups chunks without gaps between them; chunks are given by their start addresses."""
        rows: list[list[int]] = []
        end = -1
        for base in bases:
            if base != end:
                rows.append([])
            rows[-1].append(base)
            end = base + self._held[base].chunk.nbytes
        return rows


class MappedRow:
    """Chunks of another process, mapped one after another.

    Args:
        driver: CUDA.
        device: the GPU that will use them, by its number in this process.
        chunks: the chunks.
        fetch: fetches their descriptors.

    Attributes:
        address: start of the first chunk.

    Raises:
        PartyFailedError: if the other process does not provide descriptors, or CUDA fails.
    """

    def __init__(self, driver: CudaVmm, device: int, chunks: Sequence[Chunk], fetch: Fetch) -> None:
        sizes = [chunk.nbytes for chunk in chunks]
        offsets = dict(zip((chunk.number for chunk in chunks), accumulate(sizes, initial=0), strict=False))
        nbytes = {chunk.number: chunk.nbytes for chunk in chunks}
        with ExitStack() as undo:
            self.address = driver.reserve(sum(sizes))
            undo.callback(driver.free, self.address, sum(sizes))

            def place(number: int, descriptor: int) -> None:
                address = self.address + offsets[number]
                handle = driver.import_file(descriptor)
                try:
                    driver.map(address, nbytes[number], handle)
                    undo.callback(driver.unmap, address, nbytes[number])
                finally:
                    # The mapping keeps the memory, and the handle is not needed otherwise.
                    driver.release(handle)

            fetch(list(offsets), place)
            driver.allow(self.address, sum(sizes), device)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unmaps the chunks and frees the addresses, which must no longer be in use."""
        self._undo.close()
