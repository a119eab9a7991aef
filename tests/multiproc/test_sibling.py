"""A second communicator is made where all ranks can find each other, and its lack is said where they cannot."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_sibling as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_equally_many_groups_make_another(ranks: int) -> None:
    for another, said, total in run_distributed(bodies.makes_another_group, ranks, args=(True,)):
        assert another
        assert not said
        assert total == ranks * (ranks + 1) / 2


def test_ranks_with_other_numbers_of_groups_share_the_old_one_and_say_why() -> None:
    for another, said, total in run_distributed(bodies.makes_another_group, 2, args=(False,)):
        assert not another
        (text,) = said
        assert "ranks [0, 1]" in text
        assert "new_group alike" in text
        assert total == 3.0


def test_ranks_that_would_have_to_split_the_worlds_communicator_share_the_old_one_and_say_why() -> None:
    """NCCL splits a communicator only if all of its ranks take part, who would wait for those that are not asked."""
    first, *others = run_distributed(bodies.split_from_the_world, 3)
    assert first is None
    assert len(others) == 2
    for another, said, total in others:
        assert not another
        (text,) = said
        assert "ranks [1, 2]" in text
        assert "device_id" in text
        assert total == 2 + 3


def test_a_sibling_waits_as_long_as_the_group_unless_told_otherwise() -> None:
    assert run_distributed(bodies.time_outs, 2) == [[20.0, 77.0]] * 2
