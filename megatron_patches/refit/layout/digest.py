"""Position-weighted additive checksums: digests of disjoint boxes add up to the digest of their union.

The digest of a set of elements is the sum, modulo 2**64, of ``(bits(x) + 1) * u(r) * v(c)``, where ``bits`` is the
element's bit pattern as an unsigned integer (of an element ``x`` of 8 bytes, ``x ^ x >> 32``), ``c`` its index in the
whole tensor's last dimension, ``r`` its row-major index in all others, and ``u`` and ``v`` are splitmix64 hashes,
forced odd. So

- the holder of a part computes its share alone, and shares are summed in any order;
- an element that moved has another weight, so swapped boxes and shifted offsets show;
- since weights are odd, no single flipped bit can cancel; since 1 is added, a missing zero shows too;
- a flipped bit changes the sum by its weight times 2**31 or less, so two flipped signs do not cancel either. Of 8-byte
  elements, a sign alone would count 2**63, whatever its weight; therefore their upper halves are folded into the lower;
- a row is hashed once for all its elements and a column once for all rows, so an element costs one product, and a
  GPU digests at memory speed. Hashing each element would take several times as long.

The digest protects against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.layout.boxes import Box, row_major_strides

MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64's constants (Steele, Lea and Flood, OOPSLA 2014)."""
COLUMN_SALT = 0x5851F42D4C957F2D
"""Combined with a column's index, so that rows and columns have different hashes."""
_CHUNK = 1 << 20  # elements at a time: the hashes of their rows, at most 8 MiB, are temporaries

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
    columns: tuple[int, int] | None = None
    total = 0
    done = 0
    for part in box.chunks(_CHUNK):
        rows, low, high = _rows(part, shape)
        piece = bits[done : done + part.volume].reshape(-1, high - low)
        done += part.volume
        if columns != (low, high):
            columns = low, high
            hashes = _odd_hash(np.arange(low, high, dtype=np.uint64) ^ np.uint64(COLUMN_SALT))
            ones = np.add.reduce(hashes)  # what adding 1 to a row's elements adds
        if piece.itemsize == hashes.itemsize:
            piece = piece ^ piece >> np.uint64(32)
        # Not torch's products: oneDNN's primitives stay in a cache of the thread, and vLLM has crashed as that ended.
        sums = np.einsum("rc,c->r", piece, hashes) + ones
        total += int(np.dot(sums, _odd_hash(rows)))
    return total & MASK


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
