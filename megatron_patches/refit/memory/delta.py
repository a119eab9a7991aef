"""The elements of a load whose bits changed since a base version, in place of all of them.

Both ends have the load's elements of the base version, packed in the load's order, so that only what differs needs to
travel: the changed elements in order, followed by where they belong, as one index each or as a bitmap of all elements,
whichever is less. Neither says anything about values: elements are bit patterns, and every one that differs travels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.memory.ports import Bits, Bytes, FlatMemory, Memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16  # elements at a time: temporaries stay in a core's cache; a multiple of 8, so that bitmaps are whole
_WORD = 8
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
    """A trainer rank's copy of the last version that it sent, where the weights are: on the host, or on their GPU.

    One copy, whatever the number of engines. On a GPU, work on the caller's stream makes it.

    Attributes:
        base: the copy; None before the first one, or if there is no memory for it.
    """

    def __init__(self) -> None:
        self.base: Base | None = None
        self._copies: dict[str, torch.Tensor] = {}

    def take(self, version: int, memory: FlatMemory) -> None:
        """Copies a version.

        Args:
            version: number of the weights.
            memory: the rank's storages, by name.
        """
        self.base = None
        try:
            self._copies = {name: _copied(storage, self._copies.get(name)) for name, storage in memory.items()}
        except RuntimeError as error:  # without memory on the host, torch raises nothing more specific
            self._copies = {}
            logger.warning("refit: the version after %d travels whole, for lack of a copy: %s", version, error)
            return
        self.base = Base(version, self._copies)

    def drop(self) -> None:
        """Frees the copy."""
        self.base = None
        self._copies = {}


def _copied(storage: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """A copy of a storage, on its device: in ``into`` if that has the same form there, otherwise in new memory."""
    held = storage.detach()
    if into is not None and _form(into) == _form(held):
        return into.copy_(held)
    return held.clone()


def _form(storage: torch.Tensor) -> tuple[torch.device, torch.dtype, int]:
    return storage.device, storage.dtype, storage.numel()


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
    return places_at(changed, width) + _place_bytes(changed, count)


def delta_of(base: int, changed: int, count: int, width: int) -> Delta | None:
    """What a payload holds; None if it holds all elements, because changes would not take less memory.

    Args:
        base: number of the base version.
        changed: number of changed elements.
        count: number of all elements.
        width: bytes per element.
    """
    return Delta(base, changed) if delta_bytes(changed, count, width) < count * width else None


def encode_delta(elements: Bytes, base: Bytes, width: int) -> int | None:
    """Replaces the elements of a load by those that changed, at the start of ``elements``.

    Args:
        elements: all elements of the new version; aligned to them.
        base: those of the base, of the same size.
        width: bytes per element.

    Returns:
        The number of changed elements. None if they would not take less memory; ``elements`` is then as it was.
    """
    new, old = elements.view(f"u{width}"), base.view(f"u{width}")
    places = _changed_places(new, old)
    if places is not None:
        changed, where = places.size, places.view(np.uint8)
    else:
        changed, where = _changes_mapped(new, old)
    size = delta_bytes(changed, new.size, width)
    if size >= elements.size:
        return None
    if places is not None:
        new[:changed] = new[places]
    else:
        done = 0
        for low, found in _marked(where, new.size):
            new[done : done + found.size] = new[low : low + _CHUNK][found]
            done += found.size
    elements[changed * width : places_at(changed, width)] = 0
    elements[places_at(changed, width) : size] = where
    return changed


def _changed_places(new: Bits, old: Bits) -> NDArray[np.uint32] | None:
    """Where elements differ; None as soon as there are so many that a bitmap is less.

    Words of 8 bytes are compared first: most are equal, unless a bitmap is less.
    """
    word = _WORD if new.nbytes % _WORD == 0 else new.itemsize
    each = word // new.itemsize
    these, those = new.view(f"u{word}"), old.view(f"u{word}")
    places, changed = [np.zeros(0, dtype=np.uint32)], 0
    for low in range(0, these.size, _CHUNK):
        words = np.flatnonzero(these[low : low + _CHUNK] != those[low : low + _CHUNK]) + low
        found = np.flatnonzero(these[words].view(new.dtype) != those[words].view(new.dtype))
        changed += found.size
        if not is_indexed(changed, new.size):
            return None
        places.append((words[found // each] * each + found % each).astype(np.uint32))
    return np.concatenate(places)


def _changes_mapped(new: Bits, old: Bits) -> tuple[int, Bytes]:
    """The number of elements that differ, and a bitmap of them."""
    bitmap, changed = np.empty(-(-new.size // 8), dtype=np.uint8), 0
    for low in range(0, new.size, _CHUNK):
        differs = new[low : low + _CHUNK] != old[low : low + _CHUNK]
        changed += int(np.count_nonzero(differs))
        bitmap[low // 8 : (low + _CHUNK) // 8] = np.packbits(differs)
    return changed, bitmap


def _marked(bitmap: Bytes, count: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """For each chunk of ``count`` elements: its first, and which of its elements a bitmap marks."""
    for low in range(0, count, _CHUNK):
        bits = np.unpackbits(bitmap[low // 8 : (low + _CHUNK) // 8], count=min(_CHUNK, count - low))
        yield low, np.flatnonzero(bits.view(np.bool_))


def decode_delta(payload: Bytes, changed: int, base: Bytes, width: int, what: str = "a load") -> None:
    """Puts changed elements over the base, which then holds the new version.

    Args:
        payload: as :func:`encode_delta` made it.
        changed: number of changed elements.
        base: all elements of the base; aligned to them. Its content is undefined after an error.
        width: bytes per element.
        what: name of the load, for messages.

    Raises:
        TransferError: if the payload does not hold that many elements, at rising places within the load.
    """
    into = base.view(f"u{width}")
    if not 0 <= changed <= into.size or payload.size != delta_bytes(changed, into.size, width):
        raise TransferError(
            f"{what}: {payload.size} bytes came for {changed} changed elements of {into.size}, each of {width} bytes"
        )
    values = payload[: changed * width].view(f"u{width}")
    where = payload[places_at(changed, width) :]
    if is_indexed(changed, into.size):
        _put_indexed(values, where.view(np.uint32), into, what)
    else:
        _put_mapped(values, where, into, what)


def _put_indexed(values: Bits, places: NDArray[np.uint32], into: Bits, what: str) -> None:
    rising = bool(np.all(places[1:] > places[:-1]))
    if places.size and not (rising and places[-1] < into.size):
        raise TransferError(
            f"{what}: places of changed elements come in no rising order, or end at {places[-1]}, of {into.size} "
            "elements"
        )
    into[places] = values


def _put_mapped(values: Bits, bitmap: Bytes, into: Bits, what: str) -> None:
    marked = int(np.count_nonzero(np.unpackbits(bitmap[-1:])[(into.size - 1) % 8 + 1 :]))  # beyond the last element
    done = 0
    for low, places in _marked(bitmap, into.size):
        if done + places.size <= values.size:
            into[low : low + _CHUNK][places] = values[done : done + places.size]
        done += places.size
    if marked or done != values.size:
        raise TransferError(
            f"{what}: a bitmap marks {done + marked} of {into.size} elements as changed; {values.size} came"
        )


def is_indexed(changed: int, count: int) -> bool:
    """Whether places travel as indices, of ``changed`` elements among ``count``."""
    return count <= 1 << 32 and _INDEX_BYTES * changed <= -(-count // 8)


def _place_bytes(changed: int, count: int) -> int:
    return _INDEX_BYTES * changed if is_indexed(changed, count) else -(-count // 8)


def places_at(changed: int, width: int) -> int:
    """First byte of the places, aligned to an index. Bytes before it that hold no element are 0."""
    return -(-changed * width // _INDEX_BYTES) * _INDEX_BYTES
