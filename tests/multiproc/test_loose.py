"""Layers used outside of the module that was sharded, or never part of one: right or refused; docs/numerics.md."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_loose as bodies
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.plain_layers]


def test_loose_layers_have_the_gradients_of_unsharded_ones() -> None:
    for differences in run_distributed(bodies.right_uses, 2):
        assert len(differences) == 7
        assert {name: value for name, value in differences.items() if value > 1e-5} == {}


def test_what_would_be_wrong_with_loose_layers_is_refused() -> None:
    expected = {
        "DistributedDataParallel": "DistributedDataParallel has broadcast one rank's shard of weight",
        "Muon": "treats each weight as a whole matrix",
        "LBFGS": "computes dot products over all parameters",
        "added": "scale was added after etp.shard_module",
        "a part": "a runtime cannot be split: it also drives 1.weight",
        "in another's place": "0.bias was added after etp.shard_module",
    }
    for told in run_distributed(bodies.refused_uses, 2):
        assert told.keys() == expected.keys()
        for use, words in expected.items():
            assert words in told[use], (use, told[use])


@pytest.mark.cpu_only("with streams the next pass tells")
@pytest.mark.parametrize("trains", [False, True])
def test_layers_of_one_name_are_told_apart(trains: bool) -> None:
    for told in run_distributed(bodies.other_orders, 2, args=(trains,), fresh=True):
        assert "was the end of a pass of Linear " in told
