"""The checkpoint entry of a shard: read and written piece by piece, without padding.

:class:`ShardedRows` is a ``ShardedTensorFactory``. Megatron's optimizers build their entries from a parameter's entry
with ``dataclasses.replace(entry, key=..., data=...)``, so the master weight and each moment are handled like the
weight, without extra code. A plain ``ShardedTensor`` would not work: without its padding, it would no longer be the
parameter that the optimizer looks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing.mapping import (
    FactoryBuildFn,
    FactoryMergeFn,
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)

from megatron_patches.checkpoint.pieces import Part, ShardPiece, WeightPlacement

# Megatron writes entries with replica id 0 on every axis. No rank writes a shard of padding.
_NEVER_WRITTEN = (1, 1, 1)


def _refuse_direct_build(key: str, *_args: Any) -> NoReturn:
    """The ``build_fn``, which only Megatron's conversion from GPT to hybrid models uses; other code calls ``build``."""
    raise NotImplementedError(
        f"{key}: a checkpoint cannot be converted to another model class while its weights are sharded; "
        "convert it in a run with --etp-size 1"
    )


@dataclass
class ShardedRows(ShardedTensorFactory):
    """One rank's shard of one weight, or of an optimizer state of its shape.

    Attributes:
        key: name of the checkpoint's tensor.
        data: the shard, of shape ``placement.shard_shape`` and any dtype; None once the load has begun. Kept by
            identity, because optimizers look it up.
        replica_id: (pipeline, tensor or shard, data) rank among those that hold the same rows; the one with all 0
            writes.
        placement: where the shard lies in the checkpoint.
        allow_shape_mismatch: the checkpoint's tensor may have a different number of rows (Megatron pads the vocabulary
            differently); missing rows are loaded as zeros. Megatron sets this attribute.

    Raises:
        ValueError: if ``data`` does not have the shape of a shard.
    """

    build_fn: FactoryBuildFn = _refuse_direct_build
    merge_fn: FactoryMergeFn | None = None
    placement: WeightPlacement = field(kw_only=True)
    allow_shape_mismatch: bool = False

    def __post_init__(self) -> None:
        if self.data is not None and tuple(self.data.shape) != self.placement.shard_shape:
            raise ValueError(
                f"{self.key}: a shard of shape {tuple(self.data.shape)} does not fit its layout, "
                f"which gives {self.placement.shard_shape}"
            )
        # Not a bound method: it would keep ``data`` alive while the checkpoint loads.
        self.merge_fn = functools.partial(merge_pieces, placement=self.placement)

    @torch.no_grad()
    def build(self) -> list[ShardedTensor]:
        """The shard's pieces as views of ``data``, so that a load writes directly into the weight.

        Returns:
            At least one tensor: a shard of padding returns an empty one, because Megatron's traversal of lists
            miscounts entries that disappear.

        Raises:
            ValueError: if a flattened part is requested; parts of rows have no position in the checkpoint's tensor.
        """
        if self.flattened_range is not None:
            raise ValueError(
                f"{self.key}: elements {self.flattened_range} of a shard cannot be stored by themselves; "
                "save the distributed optimizer with --dist-ckpt-optim-fully-reshardable"
            )
        pieces = self.placement.pieces()
        if not pieces:
            return [self._tensor(self.placement.no_piece(), _NEVER_WRITTEN)]
        return [self._tensor(piece, self.replica_id) for piece in pieces]

    def with_parts(self, parts: tuple[Part, ...]) -> ShardedRows:
        """The same shard, of a weight that tensor parallelism splits part by part."""
        return replace(self, placement=replace(self.placement, parts=parts))

    def _tensor(self, piece: ShardPiece, replica_id: ReplicaId) -> ShardedTensor:
        return ShardedTensor(
            key=self.key + piece.suffix,
            data=self.data.narrow(0, piece.start, piece.rows).view(piece.shape),
            dtype=self.data.dtype,
            local_shape=piece.shape,
            global_shape=piece.global_shape,
            global_offset=piece.offset,
            # Shards without padding differ in size. Megatron's irregular tensors support no leading axes (its
            # prepend_axis_num), so these are axes of size 1 of the tensor itself; the file is the same.
            axis_fragmentations=None,
            replica_id=replica_id,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )


@torch.no_grad()
def merge_pieces(loaded: Sequence[torch.Tensor], *, placement: WeightPlacement) -> torch.Tensor:
    """Assemble a shard from its loaded pieces; padding rows are zero.

    Args:
        loaded: the pieces in the order of :meth:`ShardedRows.build`, on any device.
        placement: where the shard lies.

    Returns:
        The shard, ``placement.shard_shape``; a view of the piece if one piece is the whole shard.
    """
    pieces = placement.pieces()
    if len(pieces) == 1 and pieces[0].rows == placement.layout.shard_rows:
        return loaded[0].view(placement.shard_shape)
    shard = loaded[0].new_zeros(placement.shard_shape)
    for piece, tensor in zip(pieces, loaded, strict=bool(pieces)):
        shard.narrow(0, piece.start, piece.rows).copy_(tensor.view(piece.rows, *placement.shard_shape[1:]))
    return shard


def wrap_apply_factory_merges(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``megatron.core.dist_checkpointing.mapping.apply_factory_merges``, which calls itself for nested states.

    With a lenient ``--dist-ckpt-strictness``, Megatron does not ask for weights that the checkpoint lacks. Theirs stay
    as they are, and there is nothing to merge.
    """

    @functools.wraps(original)
    def apply_factory_merges(x1: Any, x2: Any, key: tuple[str, ...] = ()) -> Any:
        if isinstance(x1, dict) and isinstance(x2, dict):
            x2 = {name: value for name, value in x2.items() if name in x1 or not isinstance(value, ShardedRows)}
        return original(x1, x2, key)

    return apply_factory_merges
