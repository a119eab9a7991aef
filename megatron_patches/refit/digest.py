"""Position-weighted additive checksums: digests of disjoint boxes add up to the digest of their union.

The digest of a set of elements is the sum, modulo 2**64, of ``(bits(x) + 1) * u(r) * v(c)``, where ``bits`` is the
element's bit pattern as an unsigned integer, ``c`` its index in the whole tensor's last dimension, ``r`` its row-major
index in all others, and ``u`` and ``v`` are splitmix64 hashes, forced odd. So

- the holder of a part computes its share alone, and shares are summed in any order;
- an element that moved has another weight, so swapped boxes and shifted offsets show;
- since weights are odd, no single flipped bit can cancel; since 1 is added, a missing zero shows too;
- a row is hashed once for all its elements and a column once for all rows, so an element costs one product, and a
  GPU digests at memory speed. Hashing each element would take several times as long.

The digest protects against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.boxes import Box, row_major_strides

MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64's constants (Steele, Lea and Flood, OOPSLA 2014)."""
COLUMN_SALT = 0x5851F42D4C957F2D
"""Combined with a column's index, so that rows and columns have different hashes."""
_NARROW = 2  # bytes of the widest element whose sums are exact in fp64
_ROWS, _COLUMNS = 16, (64, 1 << 16)
_SHIFTS = np.arange(0, 64, 16, dtype=np.uint64)

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def combine(parts: Iterable[int]) -> int:
    """Digest of the union of disjoint parts."""
    return sum(parts) & MASK


def digest_array(values: NDArray[np.generic], box: Box, shape: tuple[int, ...]) -> int:
    """Digest of ``box`` from its elements.

    Args:
        values: the elements in row-major order of the box; any shape, any dtype of 1, 2, 4 or 8 bytes.
        box: the region.
        shape: shape of the whole tensor.

    Raises:
        ValueError: if the number of elements differs from the box's.
    """
    if values.size != box.volume:
        raise ValueError(f"{box} has {box.volume} elements, not {values.size}")
    bits = np.ascontiguousarray(values).reshape(-1).view(_UNSIGNED[values.dtype.itemsize])
    kind: type[_Columns] = _NarrowColumns if bits.itemsize <= _NARROW and _is_matrix(box) else _Columns
    columns: _Columns | None = None
    total = 0
    done = 0
    for part in box.chunks(kind.chunk):
        rows, low, high = _rows(part, shape)
        piece = bits[done : done + part.volume].reshape(-1, high - low)
        done += part.volume
        if columns is None or columns.range != (low, high):
            columns = kind(low, high)
        total += int(np.dot(columns.sums(piece), _odd_hash(rows)))
    return total & MASK


def _is_matrix(box: Box) -> bool:
    """Whether cutting the hashes of columns into parts pays: for several rows, neither short nor very long."""
    columns = box.shape[-1] if box.shape else 1
    return _COLUMNS[0] <= columns <= _COLUMNS[1] and box.volume // columns >= _ROWS


class _Columns:
    """The hashes of a range of columns, with which the elements of rows are summed."""

    chunk = 1 << 16  # elements at a time: the temporaries stay in a core's cache

    def __init__(self, low: int, high: int) -> None:
        self.range = low, high
        self._hashes = _odd_hash(np.arange(low, high, dtype=np.uint64) ^ np.uint64(COLUMN_SALT))

    def sums(self, bits: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
        """For each row, the sum of ``(bits + 1) * hash``."""
        found: NDArray[np.uint64] = (bits.astype(np.uint64) + np.uint64(1)) @ self._hashes
        return found


class _NarrowColumns(_Columns):
    """The same for elements of 1 or 2 bytes, by matrix products in fp64, which numpy leaves to BLAS.

    Each hash is cut into 4 parts of 16 bits. Sums of a part's products are exact, in whatever order they are added:
    less than 2**16 * 2**16 for each of at most 2**18 elements, and so less than 2**53.
    """

    chunk = 1 << 18

    def __init__(self, low: int, high: int) -> None:
        super().__init__(low, high)
        self._parts = np.stack([self._hashes >> shift & np.uint64(0xFFFF) for shift in _SHIFTS], axis=1).astype(
            np.float64
        )
        self._ones = np.add.reduce(self._hashes)  # what adding 1 to all bits adds

    def sums(self, bits: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
        """See :class:`_Columns`."""
        by_part = (bits.astype(np.float64) @ self._parts).astype(np.uint64)
        found: NDArray[np.uint64] = np.add.reduce(by_part << _SHIFTS, axis=1) + self._ones
        return found


def _rows(box: Box, shape: tuple[int, ...]) -> tuple[NDArray[np.uint64], int, int]:
    """For a box: each row's row-major index among all rows of the tensor, and the range of columns."""
    if not shape:
        return np.zeros(1, dtype=np.uint64), 0, 1
    index = np.zeros(1, dtype=np.uint64)
    for low, high, step in zip(box.start[:-1], box.stop[:-1], row_major_strides(shape[:-1]), strict=True):
        index = (index[:, None] + np.arange(low, high, dtype=np.uint64) * np.uint64(step)).reshape(-1)
    return index, box.start[-1], box.stop[-1]


def _odd_hash(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each index, forced odd; wraps modulo 2**64."""
    x = (index + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX2)
    return np.asarray((x ^ (x >> np.uint64(31))) | np.uint64(1), dtype=np.uint64)
