"""Position-weighted additive checksums: digests of disjoint boxes add up to the digest of their union.

The digest of a set of elements is the sum, modulo 2**64, of ``(bits(x) + 1) * w(i)``, where ``bits`` is the
element's bit pattern as an unsigned integer, ``i`` its row-major index in the whole tensor and ``w(i)`` the
splitmix64 hash of ``i``, forced odd. So

- whoever holds a part computes its share alone, and shares are summed in any order;
- an element that moved counts with another weight: swapped boxes and shifted offsets show;
- since weights are odd, no single flipped bit can cancel; since 1 is added, a missing zero shows too.

It guards against mistakes, not against an adversary.
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
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 16  # elements at a time: the temporaries stay in a core's cache

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def combine(parts: Iterable[int]) -> int:
    """Digest of the union of disjoint parts."""
    return sum(parts) & MASK


def digest_array(values: NDArray[np.generic], box: Box, shape: tuple[int, ...]) -> int:
    """Digest of ``box`` from its elements.

    Args:
        values: the elements in row-major order of the box; any shape, any dtype of 1, 2, 4 or 8 bytes.
        box: which region they are.
        shape: shape of the whole tensor.

    Raises:
        ValueError: if the number of elements is not the box's.
    """
    if values.size != box.volume:
        raise ValueError(f"{box} has {box.volume} elements, not {values.size}")
    bits = np.ascontiguousarray(values).reshape(-1).view(_UNSIGNED[values.dtype.itemsize])
    strides = row_major_strides(shape)
    total = 0
    done = 0
    for part in box.chunks(_CHUNK):
        index = np.full(1, 0, dtype=np.uint64)
        for low, high, step in zip(part.start, part.stop, strides, strict=True):
            index = (index[:, None] + np.arange(low, high, dtype=np.uint64) * np.uint64(step)).reshape(-1)
        piece = bits[done : done + part.volume].astype(np.uint64)
        done += part.volume
        total += int(np.dot(piece + np.uint64(1), _weights(index)))
    return total & MASK


def digest_tensor(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Digest of ``box`` from a torch tensor of the box's shape, computed where the tensor lies; see `digest_array`.

    Strided tensors are read in place, chunk by chunk.

    Raises:
        ValueError: if the tensor's shape is not the box's.
    """
    import torch

    total = torch.zeros((), dtype=torch.int64, device=values.device)
    add_digest(values, box, shape, total)
    return int(total.item()) & MASK


def add_digest(values: torch.Tensor, box: Box, shape: tuple[int, ...], total: torch.Tensor) -> None:
    """Adds what :func:`digest_tensor` gives to ``total``, an int64 of no dimension on the same device; sums wrap.

    Raises:
        ValueError: if the tensor's shape is not the box's.
    """
    import torch

    if tuple(values.shape) != box.shape:
        raise ValueError(f"{box} has shape {box.shape}, not {tuple(values.shape)}")
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    keep = -1 if values.element_size() == 8 else (1 << 8 * values.element_size()) - 1
    strides = row_major_strides(shape)
    for part in box.chunks(_CHUNK if values.device.type == "cpu" else _CHUNK << 6):
        index = torch.zeros(1, dtype=torch.int64, device=values.device)
        for low, high, step in zip(part.start, part.stop, strides, strict=True):
            reach = torch.arange(low, high, dtype=torch.int64, device=values.device) * step
            index = (index[:, None] + reach).reshape(-1)
        slices = tuple(slice(a - o, b - o) for a, b, o in zip(part.start, part.stop, box.start, strict=True))
        bits = values[slices].contiguous().reshape(-1).view(signed).to(torch.int64) & keep
        total += ((bits + 1) * _weights_torch(index)).sum()


def _weights(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each index, forced odd; wraps modulo 2**64."""
    x = (index + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return np.asarray((x ^ (x >> np.uint64(31))) | np.uint64(1), dtype=np.uint64)


def _weights_torch(index: torch.Tensor) -> torch.Tensor:
    """The same in int64, whose products wrap alike; right shifts are masked to be logical ones."""

    def signed(value: int) -> int:
        return value - (1 << 64) if value >> 63 else value

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = (index + 1) * signed(_GOLDEN)
    x = (x ^ shifted(x, 30)) * signed(_MIX1)
    x = (x ^ shifted(x, 27)) * signed(_MIX2)
    return (x ^ shifted(x, 31)) | 1
