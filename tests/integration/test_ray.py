"""Weights are published to engines that are Ray actors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_an_actor_serves_what_is_published_and_one_that_is_killed_fails_alone(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integration.ray_publishing", str(tmp_path)],
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fates"] == {"first": "serves", "other": "serves"}
    assert found["before"] != found["fresh"]
    assert found["after"] == found["fresh"]
    assert found["served"] == {"first": "serves", "other": "failed"}
    assert "other cannot be called: The actor died" in found["reasons"]["other"]
