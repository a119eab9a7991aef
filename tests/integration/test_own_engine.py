"""An engine that was written from the documentation alone: that of docs/publish.md, as it stands there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny_models import QWEN3
from tests.support.prepared import variables_of, vllm_on_cpu
from tests.support.vllm_host import LLM_OPTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(600)
def test_the_engine_of_the_documentation_serves_the_bytes_of_each_version(tmp_path: Path) -> None:
    """But for options of its ``LLM`` that make it small. A trainer and the engine are a process each."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    page = (ROOT / "docs" / "publish.md").read_text()
    section = page.split("## An engine of your own\n")[1]
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    given = 'LLM(model, weight_transfer_config={"backend": "etp"})'
    assert example.count(given) == 1
    options = ", ".join(f"{name}={value!r}" for name, value in LLM_OPTIONS.items())
    (tmp_path / "rollout.py").write_text(example.replace(given, f"LLM(model, {options})"))
    settings = {key: value for key, value in QWEN3.items() if key not in {"model_type", "architectures"}}
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, "vocab_size": 64})).bfloat16()  # vLLM pads to 64 rows
    model.save_pretrained(tmp_path / "MODEL")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integration.own_engine"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, **variables_of(vllm_on_cpu), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    nbytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    # vLLM logs to stdout, too. It merges the 11 weights of a layer into 8 parameters.
    assert re.findall(r"^version .*$", done.stdout, re.MULTILINE) == [
        "version 1: 35 parameters are equal",
        f"version 1: serves, {nbytes} bytes",
        "version 2: 35 parameters are equal",
        f"version 2: serves, {nbytes} bytes",
    ]
