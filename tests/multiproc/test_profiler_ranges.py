"""Profiles name the gathers, reductions and publications of each weight; without a profiler, nothing is recorded."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_profiles as bodies
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("tests/gpu/test_engine.py profiles GPUs")]


def test_a_profile_names_what_happens_to_each_weight() -> None:
    for result in run_distributed(bodies.ranges, world_size=2, args=("c10d",)):
        bodies.check(result)
