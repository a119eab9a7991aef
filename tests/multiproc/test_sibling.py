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
