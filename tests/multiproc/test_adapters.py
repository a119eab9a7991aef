"""Adapters of PEFT, plain and sharded, are published to an engine that keeps what it receives."""

from __future__ import annotations

import importlib.util

import pytest

from megatron_patches.refit import Fate
from tests.multiproc import bodies_adapters as bodies
from tests.multiproc.bodies_adapters import RANK, Sharding
from tests.support.launch import run_distributed

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.cpu_only("the engine of these tests keeps adapters in host memory"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed"),
]


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        pytest.param(bodies.plain, 1, marks=pytest.mark.slow),
        (bodies.shards, 2),
        pytest.param(bodies.fsdp, 2, marks=pytest.mark.slow),
    ],
)
def test_an_engine_receives_what_peft_would_save_and_nothing_of_the_base(
    sharding: Sharding, ranks: int, engine_folder: str
) -> None:
    of_ranks = run_distributed(bodies.published, ranks, "gloo", args=(sharding, engine_folder))
    served, were, told, names = of_ranks[0]
    assert served == were
    assert were[0][1] != were[1][1]
    assert names == ["math@3", "math@9"]
    modules = 2 * 2
    assert told == [(Fate.SERVES, modules * (4 * RANK * (11 + 23) + 8))] * 2
    assert all(other[2] == told for other in of_ranks)


@pytest.mark.slow
def test_a_scale_that_is_no_number_is_refused_on_all_ranks_before_anything_is_sent(engine_folder: str) -> None:
    of_ranks = run_distributed(bodies.refused_on_one_rank, 2, "gloo", args=(engine_folder,))
    assert [said for said, _ in of_ranks] == [of_ranks[0][0]] * 2
    assert "publishing math@2 failed on rank 1" in of_ranks[0][0]
    assert "the scale of the adapter 'default' at base_model.model.layers.1.down is nan" in of_ranks[0][0]
    assert of_ranks[0][1] == 3
