"""A Megatron parameter as one rank holds it, in integers, and its translation into boxes.

A weight is cut twice. Tensor parallelism cuts dim 0 or dim 1 of the whole weight. Extended tensor parallelism then cuts
dim 0 of the TP-local weight and pads its end. A family mapping sees only the TP-local weight, as :class:`RowSpan`
objects: "these rows of it are this box of that tensor". :func:`placements` then clips the pieces to the rows of this
rank's shard. Padding rows belong to no piece, so they can never be sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_patches.refit.errors import UnmappedParameterError
from megatron_patches.refit.layout.boxes import Box, View, row_major_strides
from megatron_patches.refit.layout.manifest import Placement, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShard:
    """One parameter of a Megatron model on one rank.

    Attributes:
        name: Megatron's name without wrappers, with the layer's global number:
            ``decoder.layers.7.mlp.linear_fc1.weight``.
        storage: key of the local memory, unique on the rank; two model chunks may have parameters of the same name.
        shape: logical shape of the TP-local weight: after tensor parallelism, before extended tensor parallelism.
        rows: rows ``[start, stop)`` of it that this rank holds; empty if its shard is only padding.
        held_shape: shape in memory, padding included; contiguous.
        dtype: torch's name of the dtype.
        tp_rank: position in the tensor-parallel group.
        tp_size: size of the tensor-parallel group.
        partition_dim: dimension that tensor parallelism cuts; None for a replicated parameter.
    """

    name: str
    storage: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    held_shape: tuple[int, ...]
    dtype: str
    tp_rank: int = 0
    tp_size: int = 1
    partition_dim: int | None = None

    def __post_init__(self) -> None:
        start, stop = self.rows
        held = stop - start
        if not (0 <= start <= stop <= self.shape[0] and held <= self.held_shape[0]):
            raise ValueError(
                f"{self.name}: rows {self.rows} of {self.shape[0]} do not fit into {self.held_shape[0]} rows held"
            )
        if self.shape[1:] != self.held_shape[1:]:
            raise ValueError(f"{self.name}: held as {self.held_shape} but logically {self.shape}: only rows are cut")

    @property
    def row_numel(self) -> int:
        """Number of elements in one row."""
        return math.prod(self.shape[1:])

    @property
    def form(self) -> str:
        """Dtype and shape in memory, for messages."""
        return f"{self.dtype} {self.held_shape}"

    def as_storage(self) -> Storage:
        """The memory that holds the shard. Everything after its logical rows is padding."""
        return Storage(
            name=self.storage,
            dtype=self.dtype,
            numel=math.prod(self.held_shape),
            logical_numel=(self.rows[1] - self.rows[0]) * self.row_numel,
        )


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows ``[start, start + box.shape[0])`` of a TP-local weight are ``box``.

    Attributes:
        start: first row in the TP-local weight.
        box: the same elements in a Hugging Face tensor; has as many dimensions as the weight.
    """

    start: int
    box: Box


def placements(shard: ParamShard, pieces: Iterable[RowSpan]) -> Iterator[Placement]:
    """The boxes of ``shard`` that this rank holds, and their places, from the pieces of the TP-local weight.

    Raises:
        UnmappedParameterError: if a piece does not consist of whole rows of the weight.
    """
    low, high = shard.rows
    for piece in pieces:
        box = piece.box
        if box.shape[1:] != shard.shape[1:] or piece.start < 0 or piece.start + box.shape[0] > shard.shape[0]:
            raise UnmappedParameterError(
                f"{shard.name}: {box} is not rows {piece.start} to {piece.start + box.shape[0]} of a TP-local weight "
                f"of shape {shard.shape}; the configuration and the weight disagree"
            )
        first, last = max(low, piece.start), min(high, piece.start + box.shape[0])
        if first >= last:
            continue
        shift = box.start[0] - piece.start
        held = box.with_range(0, first + shift, last + shift)
        offset = (first - low) * shard.row_numel
        yield Placement(held, View(shard.storage, offset, held.shape, row_major_strides(held.shape)))
