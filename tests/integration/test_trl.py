"""TRL's AsyncGRPOTrainer trains a tiny model with answers of a live vLLM server, which EtpWeightTransfer feeds."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.tiny_models import QWEN3
from tests.integration.trl_training import STEPS, attend
from tests.support.vllm_digests import EXTENSION
from tests.support.vllm_host import VllmHost
from tests.support.vllm_server import vllm_server

ROOT = Path(__file__).resolve().parents[2]
CONFIG = QWEN3 | {"vocab_size": 256, "num_hidden_layers": 2}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_loss_reward_and_versions_move_and_the_server_holds_the_last_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder := tmp_path / "model").mkdir()
    (other := tmp_path / "host").mkdir()
    output = tmp_path / "out"
    settings = {key: value for key, value in CONFIG.items() if key not in {"model_type", "architectures"}}
    names = ("--served-model-name", "under-test", str(folder))
    # No copies of a template: with the packages that TRL needs, importing transformers starts a thread.
    with vllm_server(CONFIG, folder, *names, "--worker-extension-cls", EXTENSION, spawned=True) as server:
        torch.manual_seed(0)
        config = AutoConfig.for_model(str(CONFIG["model_type"]), **settings)
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.integration.trl_training", folder, server.url, output],
            check=False,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        served = server.parameters()
    found = json.loads((output / "log.json").read_text())
    steps = [entry for entry in found["log"] if "reward" in entry]
    assert (len(steps), found["version"], found["policy"]) == (STEPS, STEPS + 1, STEPS + 1)
    losses = [entry["loss"] for entry in steps]
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) > STEPS // 2, losses  # a step whose answers all got the same reward has loss 0
    moved = [after - before for before, after in itertools.pairwise(found["versions"])]
    assert moved == [1] * (STEPS - 1), found["versions"]
    rewards = [entry["reward"] for entry in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    with VllmHost(output / "trained", other, spawned=True) as host:
        assert served == host.connect().parameters()


def test_the_attention_that_stands_in_is_causal_and_aligned_to_the_end() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(7, heads, 4) for heads in (4, 2, 2))
    arguments: dict[str, Any] = {"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1)}
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    whole = attend(query, key, value, ends, ends, 4, 4, **arguments)
    for low, high in ((0, 3), (3, 7)):
        for row in range(low, high):
            for head in range(4):
                scores = torch.softmax(0.5 * key[low : row + 1, head // 2] @ query[row, head], 0)
                torch.testing.assert_close(whole[row, head], scores @ value[low : row + 1, head // 2])
    # The last token of each sequence alone, with all the keys.
    last = attend(query[[2, 6]], key, value, torch.tensor([0, 1, 2]), ends, 1, 4, **arguments)
    torch.testing.assert_close(last, whole[[2, 6]])
