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
_ROWS, _COLUMNS, _ROW_BYTES, _WIDTH = 64, 64, 1 << 17, 2  # least rows and columns, longest row, widest element
_DIGIT = 7  # bits
_DIGITS, _PADDED = 10, 16  # of a hash; oneDNN is faster with 16 columns than with 10

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
    kind: type[_Columns] = _ByteColumns if _is_matrix(box, bits.itemsize) and _multiplies_bytes() else _Columns
    columns: _Columns | None = None
    total = 0
    done = 0
    for part in box.chunks(kind.chunk):
        rows, low, high = _rows(part, shape)
        piece = bits[done : done + part.volume].reshape(-1, high - low)
        done += part.volume
        if columns is None or columns.range != (low, high):
            columns = kind(low, high, bits.itemsize)
        total += int(np.dot(columns.sums(piece), _odd_hash(rows)))
    return total & MASK


def _is_matrix(box: Box, width: int) -> bool:
    """Whether products of bytes pay, and cannot overflow."""
    columns = box.shape[-1] if box.shape else 1
    pays = width <= _WIDTH and columns >= _COLUMNS and box.volume // columns >= _ROWS
    return pays and columns * width <= _ROW_BYTES


def _multiplies_bytes() -> bool:
    """Whether torch has fast products of bytes for this CPU."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


class _Columns:
    """The hashes of a range of columns, with which the elements of rows are summed.

    Args:
        low: the first column.
        high: the one after the last.
        width: bytes per element.
    """

    chunk = 1 << 16  # elements at a time: the temporaries stay in a core's cache

    def __init__(self, low: int, high: int, width: int) -> None:
        del width
        self.range = low, high
        self._hashes = _odd_hash(np.arange(low, high, dtype=np.uint64) ^ np.uint64(COLUMN_SALT))

    def sums(self, bits: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
        """For each row, the sum of ``(bits + 1) * hash``."""
        wide = bits.astype(np.uint64)
        if bits.itemsize == wide.itemsize:
            wide ^= wide >> np.uint64(32)
        found: NDArray[np.uint64] = (wide + np.uint64(1)) @ self._hashes
        return found


class _ByteColumns(_Columns):
    """The same by one matrix product of bytes, which takes a CPU a quarter of the time.

    A byte at place ``b`` of an element counts ``hash << 8 * b``, modulo 2**64. Each of these numbers is cut into digits
    of -64 to 63, whose products with signed bytes are added in 32 bits: less than 2**13 for each of at most 2**17
    bytes. Digits are that small because CPUs without VNNI add pairs of products in 16 bits.
    """

    chunk = 1 << 20  # more than a core's cache may hold, since a product has fixed costs

    def __init__(self, low: int, high: int, width: int) -> None:
        import torch

        super().__init__(low, high, width)
        shifts = np.arange(0, 8 * width, 8, dtype=np.uint64)
        left = (self._hashes[:, None] << shifts).reshape(-1)
        digits = np.zeros((left.size, _PADDED), dtype=np.int8)
        half = np.uint64(1 << _DIGIT - 1)
        for at in range(_DIGITS):
            left += half  # wraps, as does the digest
            digits[:, at] = (left & np.uint64((1 << _DIGIT) - 1)).astype(np.int8) - np.int8(half)
            left >>= np.uint64(_DIGIT)
        self._digits = torch.from_numpy(digits)
        # What adding 1 to all elements adds, and 128 to all bytes, which makes them unsigned.
        ones = 1 + sum(0x80 << 8 * place for place in range(width))
        self._constant = np.uint64(int(np.add.reduce(self._hashes)) * ones & MASK)

    def sums(self, bits: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
        """See :class:`_Columns`."""
        import torch

        signed = torch.from_numpy((bits.view(np.uint8) ^ np.uint8(0x80)).view(np.int8))
        by_digit = torch._int_mm(signed, self._digits).numpy()[:, :_DIGITS].astype(np.int64).view(np.uint64)
        shifts = np.arange(0, _DIGIT * _DIGITS, _DIGIT, dtype=np.uint64)
        found: NDArray[np.uint64] = np.add.reduce(by_digit << shifts, axis=1) + self._constant
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
