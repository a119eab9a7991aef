"""How Megatron lays out its parameters, one function per layout, for the family mappings to build on.

Every function takes a :class:`ParamShard` and names of Hugging Face tensors and returns the pieces of the TP-local
weight. Rows are dim 0 (``out_features``) throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_patches.refit.errors import UnmappedParameterError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.models.shard import ParamShard, RowSpan


def replicated(shard: ParamShard, tensor: str) -> tuple[RowSpan, ...]:
    """Equal on every tensor-parallel rank: norms, and biases of row-parallel layers."""
    _expect_partition(shard, None)
    return (RowSpan(0, Box(tensor, (0,) * len(shard.shape), shard.shape)),)


def column_parallel(shard: ParamShard, tensor: str) -> tuple[RowSpan, ...]:
    """Tensor-parallel rank r holds the r-th block of rows."""
    _expect_partition(shard, 0)
    return (_rows(shard, tensor, 0, shard.tp_rank * shard.shape[0], shard.shape[0]),)


def column_parallel_or_whole(shard: ParamShard, tensor: str, rows: int) -> tuple[RowSpan, ...]:
    """Rows cut by tensor parallelism, or replicated; the parameter says which.

    Megatron's own layers cut the down projections of multi-latent attention; Transformer Engine's replicate them.

    Args:
        shard: the weight.
        tensor: its tensor.
        rows: rows of the tensor; they show if the parameter is marked wrongly.
    """
    whole = shard.partition_dim is None
    if shard.shape[0] * (1 if whole else shard.tp_size) != rows:
        raise UnmappedParameterError(
            f"{shard.name} has {shard.shape[0]} rows on each of {shard.tp_size} tensor-parallel ranks and is "
            f"{'not cut' if whole else f'cut along dim {shard.partition_dim}'}; {tensor} has {rows}"
        )
    return replicated(shard, tensor) if whole else column_parallel(shard, tensor)


def segments(shard: ParamShard, parts: Sequence[tuple[str, int, int]]) -> tuple[RowSpan, ...]:
    """Several blocks of rows in one weight, each cut by tensor parallelism. A rank holds its part of each in turn.

    Args:
        shard: the weight or vector.
        parts: for each block its tensor, its first row in the tensor, and its number of rows in the whole model.
    """
    _expect_partition(shard, 0)
    total = sum(rows for _, _, rows in parts)
    if shard.shape[0] * shard.tp_size != total or any(rows % shard.tp_size for _, _, rows in parts):
        raise UnmappedParameterError(
            f"{shard.name} has {shard.shape[0]} rows on each of {shard.tp_size} tensor-parallel ranks; blocks of "
            f"{', '.join(str(rows) for _, _, rows in parts)} rows were expected, each cut evenly"
        )
    pieces = []
    local = 0
    for tensor, start, rows in parts:
        share = rows // shard.tp_size
        pieces.append(_rows(shard, tensor, local, start + shard.tp_rank * share, share))
        local += share
    return tuple(pieces)


def row_parallel(shard: ParamShard, tensor: str) -> tuple[RowSpan, ...]:
    """Tensor-parallel rank r holds the r-th block of columns, with all rows."""
    _expect_partition(shard, 1)
    rows, columns = shard.shape
    start = shard.tp_rank * columns
    return (RowSpan(0, Box(tensor, (0, start), (rows, start + columns))),)


def vocabulary(shard: ParamShard, tensor: str, vocab_size: int) -> tuple[RowSpan, ...]:
    """A column-parallel table with padding at its end; only the first ``vocab_size`` rows belong to the model."""
    _expect_partition(shard, 0)
    start = shard.tp_rank * shard.shape[0]
    rows = min(shard.shape[0], vocab_size - start)
    return (_rows(shard, tensor, 0, start, rows),) if rows > 0 else ()


def gated(shard: ParamShard, gate: str, up: str) -> tuple[RowSpan, ...]:
    """Gate and up projection in one weight: each tensor-parallel rank holds its gate rows, then its up rows."""
    _expect_partition(shard, 0)
    if shard.shape[0] % 2:
        raise UnmappedParameterError(f"{shard.name} has {shard.shape[0]} rows; gate and up would differ in size")
    half = shard.shape[0] // 2
    start = shard.tp_rank * half
    return _rows(shard, gate, 0, start, half), _rows(shard, up, half, start, half)


def fused_qkv(shard: ParamShard, names: Sequence[str], heads: int, kv_heads: int, head_dim: int) -> tuple[RowSpan, ...]:
    """Query, key and value in one weight, group by group: the query heads of a KV group, its key, its value.

    Tensor parallelism cuts the rows of the whole weight regardless of groups. With more tensor-parallel ranks than KV
    groups, a rank holds part of one group, which may end inside its key. Pieces are clipped accordingly.

    Args:
        shard: the fused weight or bias.
        names: tensors for query, key and value.
        heads: query heads of the whole model.
        kv_heads: KV groups of the whole model.
        head_dim: rows of one head.
    """
    _expect_partition(shard, 0)
    per_group = heads // kv_heads
    total = (heads + 2 * kv_heads) * head_dim
    if shard.shape[0] * shard.tp_size != total:
        raise UnmappedParameterError(
            f"{shard.name} has {shard.shape[0]} rows on each of {shard.tp_size} tensor-parallel ranks; {heads} heads "
            f"and {kv_heads} KV groups of {head_dim} need {total} in all"
        )
    low = shard.tp_rank * shard.shape[0]
    high = low + shard.shape[0]
    pieces = []
    position = 0
    for group in range(kv_heads):
        for tensor, count in zip(names, (per_group, 1, 1), strict=True):
            size = count * head_dim
            first, last = max(low, position), min(high, position + size)
            if first < last:
                start = group * size + first - position
                pieces.append(_rows(shard, tensor, first - low, start, last - first))
            position += size
    return tuple(pieces)


def _rows(shard: ParamShard, tensor: str, local: int, start: int, rows: int) -> RowSpan:
    """Rows ``[local, local + rows)`` of the TP-local weight are rows ``[start, start + rows)`` of ``tensor``."""
    tail = shard.shape[1:]
    return RowSpan(local, Box(tensor, (start, *(0,) * len(tail)), (start + rows, *tail)))


def _expect_partition(shard: ParamShard, dim: int | None) -> None:
    """Checks that the parameter is cut along the dimension that the mapping expects.

    Groups of one rank are not checked: Megatron does not always mark their parameters, and nothing is cut.
    """
    if shard.tp_size > 1 and shard.partition_dim != dim:
        raise UnmappedParameterError(
            f"{shard.name} is cut along dim {shard.partition_dim} over {shard.tp_size} tensor-parallel ranks; "
            f"the mapping expects dim {dim}"
        )
