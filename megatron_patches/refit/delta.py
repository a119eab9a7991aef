"""The elements of a load whose bits changed since a base version, in place of all of them.

Both ends have the load's elements of the base version, packed in the load's order, so that only what differs needs to
travel: the changed elements in order, followed by where they belong, as one index each or as a bitmap of all elements,
whichever is less. Neither says anything about values: elements are bit patterns, and every one that differs travels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.ports import Bits, Bytes, Memory

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16  # elements at a time: temporaries stay in a core's cache; a multiple of 8, so that bitmaps are whole
_INDEX_BYTES = 4


class PayloadKind(StrEnum):
    """What a version travels as."""

    WHOLE = "whole"
    """All elements."""
    DELTA = "delta"
    """The elements that changed since the version that an engine serves, where that is known and less."""


@dataclass(frozen=True)
class Base:
    """Weights that another version is relative to.

    Attributes:
        version: their number.
        memory: storages that hold them, by the names of the manifest. Not written to while a version is under way.
    """

    version: int
    memory: Memory


class Snapshot:
    """A trainer rank's copy of the last version that it sent. One copy, whatever the number of engines.

    Attributes:
        base: the copy; None before the first one, or if there is no memory for it.
    """

    def __init__(self) -> None:
        self.base: Base | None = None
        self._copies: dict[str, Bits] = {}

    def take(self, version: int, memory: Memory) -> None:
        """Copies a version.

        Args:
            version: number of the weights.
            memory: the rank's storages, by name.

        Raises:
            TransferError: if a storage is not a flat array.
        """
        self.base = None
        try:
            for name, storage in memory.items():
                if not isinstance(storage, np.ndarray):
                    raise TransferError(f"{name} is on {storage.device}; deltas need weights in host memory")
                if name not in self._copies or self._copies[name].nbytes != storage.nbytes:
                    self._copies[name] = np.empty_like(storage)
                np.copyto(self._copies[name], storage)
        except MemoryError as error:
            self._copies.clear()
            logger.warning("refit: the version after %d travels whole, for lack of a copy: %s", version, error)
            return
        self.base = Base(version, self._copies)

    def drop(self) -> None:
        """Frees the copy."""
        self.base = None
        self._copies.clear()


@dataclass(frozen=True, slots=True)
class Delta:
    """What a payload holds instead of a whole load.

    Attributes:
        base: number of the version that it is relative to.
        changed: number of elements that differ from it.
    """

    base: int
    changed: int


def delta_bytes(changed: int, count: int, width: int) -> int:
    """Size of a payload.

    Args:
        changed: number of changed elements.
        count: number of all elements.
        width: bytes per element.
    """
    return _places_at(changed, width) + _place_bytes(changed, count)


def encode(elements: Bytes, base: Bytes, width: int) -> int | None:
    """Replaces the elements of a load by those that changed, at the start of ``elements``. Overwrites ``base``.

    Args:
        elements: all elements of the new version; aligned to them.
        base: those of the base, of the same size.
        width: bytes per element.

    Returns:
        The number of changed elements. None if they would not take less memory; ``elements`` is then as it was.
    """
    new, old = elements.view(f"u{width}"), base.view(f"u{width}")
    differs = base[: new.size].view(np.bool_)  # over elements that have been compared already
    changed = 0
    for low in range(0, new.size, _CHUNK):
        chunk = slice(low, low + _CHUNK)
        differs[chunk] = new[chunk] != old[chunk]
        changed += int(np.count_nonzero(differs[chunk]))
    if delta_bytes(changed, new.size, width) >= elements.size:
        return None
    places: list[NDArray[np.uint32]] = []
    done = 0
    for low in range(0, new.size, _CHUNK):
        found = np.flatnonzero(differs[low : low + _CHUNK])
        new[done : done + found.size] = new[low : low + _CHUNK][found]
        done += found.size
        if _is_indexed(changed, new.size):
            places.append((found + low).astype(np.uint32))
    where = elements[_places_at(changed, width) : delta_bytes(changed, new.size, width)]
    if _is_indexed(changed, new.size):
        where.view(np.uint32)[...] = np.concatenate(places)
    else:
        where[...] = np.packbits(differs)
    return changed


def decode(payload: Bytes, changed: int, base: Bytes, width: int) -> None:
    """Puts changed elements over the base, which then holds the new version.

    Args:
        payload: as :func:`encode` made it.
        changed: number of changed elements.
        base: all elements of the base; aligned to them. Its content is undefined after an error.
        width: bytes per element.

    Raises:
        TransferError: if the payload does not hold that many elements, at rising places within the load.
    """
    into = base.view(f"u{width}")
    if not 0 <= changed <= into.size or payload.size != delta_bytes(changed, into.size, width):
        raise TransferError(
            f"{payload.size} bytes came for {changed} changed elements of {into.size}, each of {width} bytes"
        )
    values = payload[: changed * width].view(f"u{width}")
    where = payload[_places_at(changed, width) :]
    if _is_indexed(changed, into.size):
        _put_indexed(values, where.view(np.uint32), into)
    else:
        _put_mapped(values, where, into)


def _put_indexed(values: Bits, places: NDArray[np.uint32], into: Bits) -> None:
    rising = bool(np.all(places[1:] > places[:-1]))
    if places.size and not (rising and places[-1] < into.size):
        raise TransferError(
            f"places of changed elements come in no rising order, or end at {places[-1]}, of {into.size} elements"
        )
    into[places] = values


def _put_mapped(values: Bits, bitmap: Bytes, into: Bits) -> None:
    marked = int(np.count_nonzero(np.unpackbits(bitmap[-1:])[(into.size - 1) % 8 + 1 :]))  # beyond the last element
    done = 0
    for low in range(0, into.size, _CHUNK):
        size = min(_CHUNK, into.size - low)
        bits = np.unpackbits(bitmap[low // 8 : -(-(low + size) // 8)], count=size)
        places = np.flatnonzero(bits.view(np.bool_))  # faster than the mask itself
        if done + places.size <= values.size:
            into[low : low + size][places] = values[done : done + places.size]
        done += places.size
    if marked or done != values.size:
        raise TransferError(f"a bitmap marks {done + marked} of {into.size} elements as changed; {values.size} came")


def _is_indexed(changed: int, count: int) -> bool:
    """Whether places travel as indices."""
    return count <= 1 << 32 and _INDEX_BYTES * changed <= -(-count // 8)


def _place_bytes(changed: int, count: int) -> int:
    return _INDEX_BYTES * changed if _is_indexed(changed, count) else -(-count // 8)


def _places_at(changed: int, width: int) -> int:
    """First byte of the places; aligned to an index."""
    return -(-changed * width // _INDEX_BYTES) * _INDEX_BYTES
