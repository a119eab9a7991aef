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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.boxes import Box, row_major_strides

if TYPE_CHECKING:
    import torch

MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64's constants (Steele, Lea and Flood, OOPSLA 2014)."""
COLUMN_SALT = 0x5851F42D4C957F2D
"""Combined with a column's index, so that rows and columns have different hashes."""
_CHUNK = 1 << 16  # elements at a time: the temporaries stay in a core's cache

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
    total = 0
    done = 0
    for part in box.chunks(_CHUNK):
        rows, low, high = _rows(part, shape)
        piece = bits[done : done + part.volume].reshape(-1, high - low).astype(np.uint64) + np.uint64(1)
        done += part.volume
        sums = piece @ _odd_hash(np.arange(low, high, dtype=np.uint64) ^ np.uint64(COLUMN_SALT))
        total += int(np.dot(sums, _odd_hash(rows)))
    return total & MASK


def digest_tensor(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Digest of ``box`` from a torch tensor of the box's shape, computed on its device; see :func:`digest_array`.

    Strided tensors are read in place, chunk by chunk.

    Raises:
        ValueError: if the tensor's shape differs from the box's.
    """
    import torch

    total = torch.zeros((), dtype=torch.int64, device=values.device)
    add_digest(values, box, shape, total)
    return int(total.item()) & MASK


def add_digest(values: torch.Tensor, box: Box, shape: tuple[int, ...], total: torch.Tensor) -> None:
    """Adds the result of :func:`digest_tensor` to ``total``, an int64 scalar on the same device; sums wrap.

    Raises:
        ValueError: if the tensor's shape differs from the box's.
    """
    import torch

    if tuple(values.shape) != box.shape:
        raise ValueError(f"{box} has shape {box.shape}, not {tuple(values.shape)}")
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    keep = -1 if values.element_size() == 8 else (1 << 8 * values.element_size()) - 1
    for part in box.chunks(_CHUNK if values.device.type == "cpu" else _CHUNK << 6):
        rows, low, high = _rows(part, shape)
        slices = tuple(slice(a - o, b - o) for a, b, o in zip(part.start, part.stop, box.start, strict=True))
        bits = values[slices].contiguous().reshape(-1, high - low).view(signed).to(torch.int64) & keep
        columns = torch.arange(low, high, dtype=torch.int64, device=values.device) ^ _signed(COLUMN_SALT)
        sums = ((bits + 1) * _odd_hash_torch(columns)).sum(dim=1)
        total += (sums * _odd_hash_torch(torch.from_numpy(rows.view(np.int64)).to(values.device))).sum()


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


def _odd_hash_torch(index: torch.Tensor) -> torch.Tensor:
    """The same in int64, whose products wrap identically. Right shifts are masked to make them logical shifts."""

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = (index + 1) * _signed(GOLDEN)
    x = (x ^ shifted(x, 30)) * _signed(MIX1)
    x = (x ^ shifted(x, 27)) * _signed(MIX2)
    return (x ^ shifted(x, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
