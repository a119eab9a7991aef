"""Direct loads as tables of copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.memory.loads import Load, Reach, Terms, cut_into_loads
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.planning.transfers import Transfer
from megatron_patches.refit.transports.c10d import _Pieces
from megatron_patches.refit.transports.direct_copies import DirectCopies, Rows
from tests.unit.refit.link_ends import SLOT
from tests.unit.refit.test_parties import coverable


@pytest.mark.parametrize("seed", range(8))
def test_boxes_that_follow_each_other_at_both_ends_are_copied_at_once(seed: int) -> None:
    plan = make_plan(*coverable(seed).sides)
    terms = dict.fromkeys(plan.by_link, Terms(SLOT, Reach.ROWS, direct_bytes=8))
    for loads in cut_into_loads(plan.transfers, terms).values():
        for load in (load for load in loads if load.direct):
            table = DirectCopies.of(load)
            assert int(table.nbytes.sum()) + sum(rows.count * rows.nbytes for rows in table.rows) == load.nbytes
            starts = np.stack(
                [table.runs.source, table.runs.source_offset, table.runs.target, table.runs.target_offset]
            )
            ends = starts + np.stack([0 * table.nbytes, table.nbytes] * 2)
            assert not (starts[:, 1:] == ends[:, :-1]).all(axis=0).any()


def transfer(start: int, stop: int, *, read: View, write: View) -> Transfer:
    return Transfer(0, 0, Box("w", (start, 0), (stop, 4)), read, write, "bfloat16", "bfloat16")


FUSED = [
    transfer(0, 3, read=View("f", 8, (3, 4), (4, 1)), write=View("g", 0, (3, 4), (4, 1))),
    transfer(3, 6, read=View("f", 20, (3, 4), (4, 1)), write=View("g", 12, (3, 4), (4, 1))),
    transfer(6, 9, read=View("f", 32, (3, 4), (4, 1)), write=View("h", 24, (3, 4), (4, 1))),
    transfer(9, 11, read=View("f", 44, (2, 4), (8, 1)), write=View("h", 36, (2, 4), (4, 1))),
]


def test_two_halves_of_a_fused_weight_are_one_run() -> None:
    """The second half of what follows lies elsewhere at the target; the last box consists of rows."""
    copies = DirectCopies.of(Load(0, 0, 0, tuple(FUSED), direct=True))
    assert (copies.sources, copies.targets) == (["f"], ["g", "h"])
    assert copies.nbytes.tolist() == [2 * 3 * 8, 3 * 8]
    sources, targets = np.array([1000]), np.array([5000, 7000])
    assert [each.tolist() for each in copies.runs.addresses(sources, targets)] == [[1016, 1064], [5000, 7048]]
    assert [each.tolist() for each in copies.pitched.addresses(sources, targets)] == [[1088], [7072]]
    assert copies.rows == [Rows(2, 8, 16, 8)]


@pytest.mark.parametrize("on_torch", [False, True])
def test_c10d_sends_and_receives_boxes_that_follow_each_other_as_one(on_torch: bool) -> None:
    load = Load(0, 0, 0, tuple(FUSED[:3]), direct=True)
    rng = np.random.default_rng(3)
    held = {name: rng.integers(0, 2**16, 64, dtype=np.uint16) for name in "fgh"}
    memory = {name: torch.from_numpy(array) for name, array in held.items()} if on_torch else held
    for read, expected in ((True, [("f", 8, 32), ("f", 32, 44)]), (False, [("g", 0, 24), ("h", 24, 36)])):
        pieces = _Pieces(read=read)
        for _ in range(2):  # of every version
            found = pieces.of(load, memory)
            assert [piece.numpy().tobytes() for piece in found] == [
                held[name][low:high].tobytes() for name, low, high in expected
            ]
        found[0].fill_(7)
        name, low, high = expected[0]
        assert (held[name][low:high] == 0x0707).all()  # in place


def test_c10d_sends_no_part_of_a_load_with_other_boxes() -> None:
    with pytest.raises(PartyFailedError, match="load 0 has boxes that are not contiguous"):
        _Pieces(read=True).of(Load(0, 0, 0, tuple(FUSED), direct=True), {})


def test_a_box_of_single_elements_is_refused() -> None:
    scattered = transfer(0, 3, read=View("f", 0, (3, 4), (4, 1)), write=View("g", 0, (3, 4), (1, 3)))
    with pytest.raises(PartyFailedError, match="does not consist of rows, and was announced as if it did"):
        DirectCopies.of(Load(0, 0, 0, (scattered,), direct=True))
