"""Python calls of the engine do not grow: each may only become fewer.

Whoever makes them fewer lowers the limits here. ``python -m benchmarks.host_work --calls`` prints what is counted.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from benchmarks.host_calls import ETP, EXPERTS, Calls, all_calls, counted
from etp.layout import ShardLayout
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("it counts the calls of transport c10d over gloo")]

# Own calls, files, all calls; of rank 0.
LIMITS = {
    "3 linears, ETP": {
        "forward": Calls(146, 14, 198),
        "backward": Calls(230, 17, 388),
        "visit": Calls(39, 8, 55),
    },
    "3 x 4 experts, ETP": {
        "forward": Calls(138, 11, 178),
        "backward": Calls(222, 17, 322),
        "visit": Calls(42, 8, 59),
    },
    "3 x 16 experts, ETP": {
        "forward": Calls(138, 11, 214),
        "backward": Calls(258, 17, 358),
        "visit": Calls(42, 8, 71),
    },
    "3 x 128 experts, ETP": {
        "forward": Calls(138, 11, 550),
        "backward": Calls(594, 17, 694),
        "visit": Calls(42, 8, 183),
    },
}


def count(rank: int, world_size: int) -> dict[str, dict[str, Calls]]:
    return all_calls(dist.group.WORLD)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Calls]]:
    return run_distributed(count, world_size=2)[0]


@pytest.mark.parametrize("model", LIMITS)
def test_calls_do_not_grow(found: dict[str, dict[str, Calls]], model: str) -> None:
    for part, limit in LIMITS[model].items():
        calls = found[model][part]
        assert calls.own <= limit.own, (part, calls)
        assert calls.files <= limit.files, (part, calls)
        if torch.__version__.startswith("2.11."):  # another release makes other calls of its own
            assert calls.all <= limit.all, (part, calls)
        assert 0 < calls.files <= calls.own <= calls.all


def test_a_pass_costs_the_same_for_any_number_of_experts(found: dict[str, dict[str, Calls]]) -> None:
    few, many = found["3 x 4 experts, ETP"], found["3 x 128 experts, ETP"]
    assert few["forward"].own == many["forward"].own
    assert few["visit"].own == many["visit"].own
    # Autograd itself calls one hook for each weight; see [Note: gradients beside uses] in etp/grad_hooks.py.
    assert many["backward"].own - few["backward"].own == 3 * (128 - 4)


def test_fsdp2_is_counted_too(found: dict[str, dict[str, Calls]]) -> None:
    for calls in found["3 linears, FSDP2"].values():
        assert 0 < calls.files < calls.own < calls.all


def test_every_model_has_limits(found: dict[str, dict[str, Calls]]) -> None:
    assert list(LIMITS) == [name for name in found if name.endswith("ETP")]
    assert sum("experts" in name for name in LIMITS) == len(EXPERTS)


def test_own_calls_are_those_of_the_package() -> None:
    layout, calls = counted(lambda: ShardLayout((8, 3), 2), ETP)
    assert layout.rows == 8
    # Its own initialization and the look at its rows; Python calls generated ones from nowhere.
    assert calls.files == 1
    assert 2 <= calls.own < calls.all


def test_a_failure_ends_the_counting() -> None:
    with pytest.raises(ZeroDivisionError):
        counted(lambda: 1 // 0, ETP)
    assert sys.getprofile() is None
