"""How one weight is cut into shards. Integers only: no tensor, no process group.

A weight is cut along dim 0 (``out_features``, or the vocabulary of an embedding). Its rows are padded at
the tail to a multiple of ``pad_for_alignment * num_shards``, so that all shards have one shape and one
collective can gather them, and rank r holds the padded rows ``[r * shard_rows, (r + 1) * shard_rows)``.
Padding therefore lies in the last shard or shards only; a shard can be padding from its first row on.

The alignment rule is the one of Megatron-core's weight-shard axis (Megatron-LM PR 4967), so shard shapes
agree with what Megatron computes itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ShardLayout:
    """The cut of one weight over ``num_shards`` ranks.

    Attributes:
        shape: logical (unsharded, unpadded) shape of the weight; with tensor parallelism, of its TP-local part.
        num_shards: number of ranks that hold one shard each.
        pad_for_alignment: each shard's row count is a multiple of this; 0 forbids padding.

    Raises:
        ValueError: if a size is not positive, or if the rows do not divide and padding is forbidden.
    """

    shape: tuple[int, ...]
    num_shards: int
    pad_for_alignment: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.shape or any(size <= 0 for size in self.shape):
            raise ValueError(f"cannot shard a weight of shape {self.shape}: every dimension must be positive")
        if self.num_shards <= 0:
            raise ValueError(f"num_shards is {self.num_shards}; it must be at least 1")
        if self.pad_for_alignment < 0:
            raise ValueError(f"pad_for_alignment is {self.pad_for_alignment}; use 0 to forbid padding")
        if self.pad_for_alignment == 0 and self.rows % self.num_shards:
            raise ValueError(
                f"{self.rows} rows do not divide over {self.num_shards} shards and pad_for_alignment is 0; "
                f"set pad_for_alignment to 1 or more, or choose a size that is a multiple of {self.num_shards}"
            )

    @cached_property
    def rows(self) -> int:
        """Logical rows, all shards together, without padding."""
        return self.shape[0]

    @cached_property
    def row_numel(self) -> int:
        """Elements in one row."""
        return math.prod(self.shape[1:])

    @cached_property
    def padded_rows(self) -> int:
        """Rows of all shards together, padding included."""
        multiple = self.num_shards * max(self.pad_for_alignment, 1)
        return -(-self.rows // multiple) * multiple

    @cached_property
    def pad_rows(self) -> int:
        """Rows of padding at the tail."""
        return self.padded_rows - self.rows

    @cached_property
    def shard_rows(self) -> int:
        """Rows in each shard, padding included."""
        return self.padded_rows // self.num_shards

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the gathered weight, padding included."""
        return (self.padded_rows, *self.shape[1:])

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what one rank holds, padding included."""
        return (self.shard_rows, *self.shape[1:])

    def padded_range(self, rank: int) -> tuple[int, int]:
        """Rows ``[start, stop)`` of the padded weight that shard ``rank`` holds."""
        if not 0 <= rank < self.num_shards:
            raise IndexError(f"shard {rank} of a weight with {self.num_shards} shards")
        return rank * self.shard_rows, (rank + 1) * self.shard_rows

    def logical_range(self, rank: int) -> tuple[int, int]:
        """Rows ``[start, stop)`` of the logical weight that shard ``rank`` holds; empty for pure padding."""
        start, stop = self.padded_range(rank)
        return min(start, self.rows), min(stop, self.rows)

    def logical_rows(self, rank: int) -> int:
        """How many of shard ``rank``'s rows are not padding; they come first in the shard."""
        start, stop = self.logical_range(rank)
        return stop - start
