"""Weights of models that are never announced: what other models some ranks have does not matter."""

from __future__ import annotations

import math

import pytest

from tests.multiproc import bodies_unannounced as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


def test_ranks_with_another_past_gather_alike() -> None:
    for losses in run_distributed(bodies.ranks_with_another_past, 4):
        assert len(losses) == 4
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] != losses[0]
