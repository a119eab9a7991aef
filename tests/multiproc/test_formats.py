"""The engine gathers weights in any format: quantized once a version, agreed on, in slots of the format's bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiproc import bodies_formats as bodies
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("tests/gpu/test_fp8.py has the formats of GPUs")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("depth", "reuse"), [(0, False), (1, False), (2, True)])
def test_weights_are_those_of_the_format(ranks: int, depth: int, reuse: bool) -> None:
    for right, received, expected in run_distributed(bodies.gathered_in_a_format, ranks, args=(depth, reuse)):
        assert right == [True] * 6
        if depth == 0:
            assert received == expected


@pytest.mark.parametrize("reuse", [False, True])
def test_a_layer_that_leaves_a_format_keeps_no_copies(reuse: bool) -> None:
    for copies, right in run_distributed(bodies.copies_kept, 2, args=(reuse,)):
        # A pass learns that a layer has left when it is visited; the next one quantizes without it.
        assert copies == [3, 2, 2, 3, 3, 2, 3]
        assert right == [True] * 7


@pytest.mark.parametrize(("reuse", "times"), [(True, 1), (False, 3)])
def test_all_scales_are_exchanged_together_and_once_a_step(reuse: bool, times: int) -> None:
    """Of a step with three forward passes, each of which may find other weights unless the engine may reuse them."""
    counts = [(times, times), (2 * times, 2 * times)]
    assert run_distributed(bodies.exchanges_between_steps, 2, args=(reuse,)) == [counts] * 2


@pytest.mark.parametrize(("budget", "slots"), [(0, 1), (1, 2), (bodies.LAYERS, bodies.LAYERS)])
def test_weights_that_stay_count_in_bytes_of_the_format(budget: int, slots: int) -> None:
    """In fp32, as these weights are stored, the largest of these budgets is less than one of them."""
    for found, nbytes in run_distributed(bodies.slots_within_a_budget, 2, args=(budget,)):
        assert found == slots * nbytes


def test_replays_see_a_change_of_any_layer() -> None:
    """A part that is captured into a CUDA graph reads what was published last."""
    assert run_distributed(bodies.published_after_changes, 2) == [[True] * bodies.LAYERS] * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_example_of_phases_quantizes_shards_as_the_whole(ranks: int) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "low_precision.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    # The bytes of two weights, and their scales.
    assert run_distributed(bodies.phases_of_an_example, ranks, args=(example,)) == [[True] * 4] * ranks
