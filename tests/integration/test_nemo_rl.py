"""NeMo-RL's order of calls, a policy under FSDP2 and engines of vLLM, with the checkpoint engine between them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.nemo_rl_stand_in import documented
from tests.support.ray_program import found_by


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_the_engines_hold_the_shards_of_the_policy(tmp_path: Path) -> None:
    settings = documented()
    assert settings["vllm_kwargs"] == {"weight_transfer_config": {"backend": "etp"}}
    found = found_by("tests.integration.nemo_rl_publishing", tmp_path, json.dumps(settings))
    first, second = found["updates"]
    for update in (first, second):
        assert update["held"] == [update["fresh"]] * 2
        assert update["batches"] == [[0], [0]]  # NeMo-RL itself loads nothing
    assert first["held"] != second["held"] == found["after"]
    assert "version 1" in found["failed"], found["failed"]
    assert "lm_head.more is new" in found["failed"], found["failed"]
