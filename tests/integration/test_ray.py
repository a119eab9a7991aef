"""Weights are published to engines that are Ray actors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.ray_program import found_by


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_an_actor_serves_what_is_published_and_one_that_is_killed_fails_alone(tmp_path: Path) -> None:
    found = found_by("tests.integration.ray_publishing", tmp_path)
    assert found["fates"] == {"first": "serves", "other": "serves"}
    assert found["before"] != found["fresh"]
    assert found["after"] == found["fresh"]
    assert found["served"] == {"first": "serves", "other": "failed"}
    assert "other cannot be called: The actor died" in found["reasons"]["other"]
