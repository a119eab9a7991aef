"""NeMo-RL's order of calls, a policy under FSDP2 and engines of vLLM, with the checkpoint engine between them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nemo_rl_stand_in import documented

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_the_engines_hold_the_shards_of_the_policy(tmp_path: Path) -> None:
    settings = documented()
    assert settings["vllm_kwargs"] == {"weight_transfer_config": {"backend": "etp"}}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integration.nemo_rl_publishing", tmp_path, json.dumps(settings)],
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    first, second = found["updates"]
    for update in (first, second):
        assert update["held"] == [update["fresh"]] * 2
        assert update["batches"] == [[0], [0]]  # NeMo-RL itself loads nothing
    assert first["held"] != second["held"] == found["after"]
    assert "version 1" in found["failed"], found["failed"]
    assert "lm_head.more is new" in found["failed"], found["failed"]
