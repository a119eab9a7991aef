"""Memory mapped with CUDA's virtual memory API: how a source exports it, and how a destination maps it.

Expandable segments of torch's allocator and symmetric memory are such. What looks like one piece consists of *chunks*
there, allocations of their own, mapped one after the other. Other processes know a chunk by a number, by which they
ask for its file descriptor; they map chunks that follow each other here one after the other, too, so that whatever
lies across them lies so there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import msgspec

from megatron_patches.refit.errors import PartyFailedError


class MappingDriver(Protocol):
    """What is asked of CUDA; see :class:`megatron_patches.refit.transports.cuda_vmm.CudaDriver`."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Beginning and size of the chunk that an address lies in."""

    def retain(self, address: int) -> int:
        """The chunk's handle."""

    def release(self, handle: int) -> None:
        """Gives a handle back."""

    def becomes_file(self, handle: int) -> bool:
        """Whether it can be exported as a file descriptor."""

    def export_file(self, handle: int) -> int:
        """Exports it."""

    def import_file(self, descriptor: int) -> int:
        """Imports it."""

    def reserve(self, nbytes: int) -> int:
        """Reserves addresses."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives them back."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Maps a chunk."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps a chunk."""

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Lets a GPU use addresses."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """An allocation that others may map.

    Attributes:
        number: by which they ask for it; never given to another one.
        nbytes: its size.
    """

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Lying:
    """Where something lies in a row of chunks.

    Attributes:
        chunks: the row; the same object for all that lie in it.
        start: first byte in it.
    """

    chunks: tuple[Chunk, ...]
    start: int


Fetch = Callable[[Sequence[int], Callable[[int, int], None]], None]
"""Fetches the descriptors of chunks, by number, and calls a function with each number and its descriptor."""


@dataclass(frozen=True, slots=True)
class _Held:
    chunk: Chunk
    handle: int


class ChunkShelf:
    """The chunks of this process that others may map.

    A chunk that is on the shelf is retained, so that its handle, by which it is known again, cannot become another
    one's. Its memory stays taken while it is; it leaves when nothing lies in it any longer that was asked for.

    Args:
        driver: CUDA.
    """

    def __init__(self, driver: MappingDriver) -> None:
        self._driver = driver
        self._held: dict[int, _Held] = {}
        self._next = 0
        self._lock = threading.Lock()

    def locate(self, spans: Mapping[str, tuple[int, int]]) -> dict[str, Lying]:
        """Finds the chunks that things lie in, and forgets all others.

        Args:
            spans: first address of each, and the one behind its last.

        Returns:
            Where those lie that others can map; left out is what lies, if only in part, in memory of another kind.
        """
        asked: dict[int, _Held | None] = {}
        found: dict[str, list[int]] = {}
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            bases = self._bases(start, stop, asked)
            if bases is not None:
                found[name] = bases
        used = {base for bases in found.values() for base in bases}
        self._forget(set(self._held) - used)
        rows = {base: row for row in self._rows(sorted(used)) for base in row.bases}
        return {
            name: Lying(rows[bases[0]].chunks, spans[name][0] - rows[bases[0]].bases[0])
            for name, bases in found.items()
        }

    def export(self, number: int) -> int:
        """A file descriptor of a chunk, which the caller closes. May be called in any thread.

        Raises:
            PartyFailedError: if it is not on the shelf, or CUDA refuses.
        """
        with self._lock:
            for held in self._held.values():
                if held.chunk.number == number:
                    return self._driver.export_file(held.handle)
        raise PartyFailedError(f"memory number {number} is not, or no longer, on the shelf; weights have moved since")

    def close(self) -> None:
        """Forgets all."""
        self._forget(set(self._held))

    def _bases(self, start: int, stop: int, asked: dict[int, _Held | None]) -> list[int] | None:
        """Beginnings of the chunks that addresses lie in; None if they do not all lie in such."""
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
            return None  # not mapped by hand
        known = self._held.get(base)
        if known is not None and (known.handle, known.chunk.nbytes) == (handle, nbytes):
            self._driver.release(handle)  # it is retained already
            return known
        if not self._driver.becomes_file(handle):
            self._driver.release(handle)
            return None
        held = _Held(Chunk(self._next, nbytes), handle)
        self._next += 1
        self._forget({base} & set(self._held))
        with self._lock:
            self._held[base] = held
        return held

    def _forget(self, bases: Iterable[int]) -> None:
        with self._lock:
            for base in bases:
                self._driver.release(self._held.pop(base).handle)

    def _rows(self, bases: Sequence[int]) -> list[_Row]:
        """Chunks without gaps between them, together."""
        rows: list[list[int]] = []
        end = -1
        for base in bases:
            if base != end:
                rows.append([])
            rows[-1].append(base)
            end = base + self._held[base].chunk.nbytes
        return [_Row(tuple(row), tuple(self._held[base].chunk for base in row)) for row in rows]


@dataclass(frozen=True, slots=True)
class _Row:
    bases: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class MappedRow:
    """Chunks of another process, mapped one after the other.

    Args:
        driver: CUDA.
        device: the GPU that is to use them, by its number in this process.
        chunks: the chunks.
        fetch: fetches their descriptors.

    Attributes:
        address: where the first begins.

    Raises:
        PartyFailedError: if the other process does not hand them out, or CUDA refuses.
    """

    def __init__(self, driver: MappingDriver, device: int, chunks: Sequence[Chunk], fetch: Fetch) -> None:
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
                    # The mapping keeps the memory; nothing else is done with the handle.
                    driver.release(handle)

            fetch(list(offsets), place)
            driver.allow(self.address, sum(sizes), device)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unmaps them and gives the addresses back; nothing may use them any longer."""
        self._undo.close()
