"""Where shards lie in a checkpoint: against a weight that is really cut, part by part, rank by rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etp.layout import ShardLayout
from megatron_patches.checkpoint.pieces import Part, ShardPiece, StackAxis, WeightPlacement, halves
from tests.support.launch import run_megatron


def tp_cut(whole: torch.Tensor, axis: int, size: int, parts: list[int]) -> list[torch.Tensor]:
    """Each tensor-parallel rank's weight: ``parts`` are each part's rows on one rank; every part is cut by itself."""
    if axis != 0:
        return list(whole.chunk(size, dim=axis))
    in_whole = whole.split([rows * size for rows in parts])
    return [torch.cat([part.chunk(size)[rank] for part in in_whole]) for rank in range(size)]


def shards(weight: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """The weight's shards, padded with -1."""
    padded = torch.full(layout.padded_shape, -1, dtype=weight.dtype)
    padded[: layout.rows] = weight
    return list(padded.chunk(layout.num_shards))


def region(piece: ShardPiece) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))


@settings(deadline=None)  # a busy machine is no failure
@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    tp_size=st.integers(1, 3),
    tp_axis=st.sampled_from([0, 1]),
    num_shards=st.integers(1, 5),
    align=st.integers(1, 4),
    stack=st.sampled_from([(), ((1, 3),), ((0, 2), (3, 4))]),
)
def test_pieces_are_the_weight_once_and_without_padding(
    parts: list[int],
    tp_size: int,
    tp_axis: int,
    num_shards: int,
    align: int,
    stack: tuple[tuple[int, int], ...],
) -> None:
    rows = sum(parts) * (tp_size if tp_axis == 0 else 1)
    whole = torch.arange(1, rows * 2 * tp_size + 1).view(rows, 2 * tp_size)
    axes = tuple(StackAxis(index, count) for index, count in stack)
    stored = torch.zeros(*(axis.count for axis in axes), *whole.shape, dtype=whole.dtype)

    for tp_rank, weight in enumerate(tp_cut(whole, tp_axis, tp_size, parts)):
        layout = ShardLayout(tuple(weight.shape), num_shards, align)
        for shard, held in enumerate(shards(weight, layout)):
            placement = WeightPlacement(
                layout=layout,
                shard=shard,
                tp_axis=tp_axis,
                tp_rank=tp_rank,
                tp_size=tp_size,
                stack=axes,
                parts=tuple(Part(count) for count in parts),
            )
            assert sum(piece.rows for piece in placement.pieces()) == layout.logical_rows(shard)
            for piece in placement.pieces():
                assert piece.global_shape == tuple(stored.shape)
                assert not stored[region(piece)].any(), "no element is written twice"
                stored[region(piece)] = held[piece.start : piece.start + piece.rows].view(piece.shape)

    place = tuple(axis.index for axis in axes)
    assert torch.equal(stored[place], whole)
    stored[place] = 0
    assert not stored.any(), "the other layers of the stack are not touched"


def test_a_gated_weight_cut_by_both() -> None:
    """Two ranks, each with 3 rows of gate over 3 of up, in shards of 4 rows: the first has gate and a row of up."""
    layout = ShardLayout((6, 5), num_shards=2, pad_for_alignment=4)
    placement = WeightPlacement(layout=layout, shard=0, tp_rank=1, tp_size=2, parts=halves(layout))
    gate, up = placement.pieces()
    assert (gate.start, gate.rows, gate.offset, gate.shape) == (0, 3, (3, 0), (3, 5))
    assert (up.start, up.rows, up.offset, up.shape) == (3, 1, (9, 0), (1, 5))
    assert gate.global_shape == up.global_shape == (12, 5)


def test_parts_with_suffixes_are_tensors_of_their_own() -> None:
    layout = ShardLayout((6, 5), num_shards=2, pad_for_alignment=4)
    placement = WeightPlacement(layout=layout, shard=1, tp_rank=1, tp_size=2, parts=halves(layout, ("_w", "_v")))
    (up,) = placement.pieces()
    assert (up.suffix, up.start, up.rows, up.offset, up.global_shape) == ("_v", 0, 2, (4, 0), (6, 5))


def test_a_row_parallel_weight_is_cut_along_both_axes() -> None:
    layout = ShardLayout((8, 3), num_shards=2, pad_for_alignment=1)
    found = [
        WeightPlacement(layout=layout, shard=shard, tp_axis=1, tp_rank=tp_rank, tp_size=2).pieces()[0].offset
        for shard, tp_rank in itertools.product(range(2), range(2))
    ]
    assert found == [(0, 0), (0, 3), (4, 0), (4, 3)]


def test_a_shard_of_padding_has_no_piece_and_a_place_that_overlaps_nothing() -> None:
    layout = ShardLayout((24, 5), num_shards=4, pad_for_alignment=8)
    placement = WeightPlacement(layout=layout, shard=3, stack=(StackAxis(2, 4),))
    assert placement.pieces() == ()
    nothing = placement.no_piece()
    assert (nothing.shape, nothing.offset, nothing.global_shape) == ((1, 0, 5), (2, 24, 0), (4, 24, 5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shard": 2}, "shard 2 of a weight with 2 shards does not exist"),
        ({"shard": 0, "tp_rank": 2, "tp_size": 2}, "tensor-parallel rank 2 of 2 does not exist"),
        ({"shard": 0, "tp_axis": 2}, r"a weight of shape \(6, 5\) has no axis 2 to cut"),
        ({"shard": 0, "parts": (Part(4), Part(1))}, r"parts of \[4, 1\] rows do not make up a weight of 6"),
    ],
)
def test_wrong_placements_are_refused(wrong: dict[str, object], message: str) -> None:
    layout = ShardLayout((6, 5), num_shards=2, pad_for_alignment=1)
    with pytest.raises(ValueError, match=message):
        WeightPlacement(layout=layout, **wrong)  # type: ignore[arg-type]


def test_odd_rows_have_no_halves() -> None:
    with pytest.raises(ValueError, match="a gated weight of 7 rows has no two halves"):
        halves(ShardLayout((7, 5), num_shards=1))


def test_a_place_in_a_stack_must_exist() -> None:
    with pytest.raises(ValueError, match="weight 4 of 4 stacked weights does not exist"):
        StackAxis(4, 4)


def merged(rank: int, world_size: int) -> dict[str, dict[str, list[list[float]]]]:
    """A state with one of two shards, after Megatron has left the other out of what it asks a checkpoint for."""
    del rank, world_size
    from megatron.core.dist_checkpointing import serialization

    from megatron_patches.checkpoint.sharded_rows import ShardedRows

    placement = WeightPlacement(layout=ShardLayout((3, 2), 2, 1), shard=1)
    entry = ShardedRows(key="", data=torch.zeros(2, 2), replica_id=(0, 0, 0), placement=placement)
    loaded = {"model": {"a": [torch.ones(1, 2)]}}
    state = serialization.apply_factory_merges(loaded, {"model": {"a": entry, "b": entry}})
    return {"model": {name: tensor.tolist() for name, tensor in state["model"].items()}}


def test_a_weight_that_a_lenient_load_leaves_out_is_left_as_it_is() -> None:
    assert run_megatron(merged, 1, backend=None) == [{"model": {"a": [[1.0, 1.0], [0.0, 0.0]]}}]
