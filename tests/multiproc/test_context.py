"""Context parallelism in ``examples/pretrain_gpt.py``: each rank computes on its own pieces of each sequence."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_context as bodies
from tests.support.launch import run_megatron

pytestmark = pytest.mark.multiproc


def test_ranks_have_different_pieces_that_make_up_the_sequences() -> None:
    ranks = run_megatron(bodies.step, 2)
    whole = bodies.SEQUENCE
    # An early and a late quarter each, because late tokens attend to more.
    pieces = [[*range(4), *range(12, 16)], [*range(4, 12)]]
    for piece, (tokens, positions, _, number) in zip(pieces, ranks, strict=True):
        assert positions == [piece, piece]
        assert tokens == [piece, [whole + token for token in piece]]
        assert number == whole
    assert sum(loss for _, _, loss, _ in ranks) == sum(range(1, 2 * whole + 1))
