"""The benchmark against a running vLLM, small and on the CPU: what is pushed is what answers."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from benchmarks import refit_timeline
from benchmarks.refit_vllm import main

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(400),
]

COMMAND = ["--model", "tiny", "--device", "cpu", "--repeats", "2"]
ENGINE = "--enforce-eager --max-model-len 256 --block-size 32"


def test_pushes_are_timed_and_their_weights_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("REFIT_TIMELINE", "PYTHONPATH"):  # set by the option for a timeline; unset when the test ends
        monkeypatch.setenv(name, os.environ.get(name, ""))
    file, times = tmp_path / "found.json", tmp_path / "times"
    command = [*COMMAND, "--ways", "shm", "shm+in_place", "--timeline", str(times)]
    assert main([*command, "--engine-arguments", ENGINE, "--folder", str(tmp_path), "--json", str(file)]) == 0
    found = json.loads(file.read_text())["outcomes"]
    assert [item["way"] for item in found] == ["shm", "shm+in_place"]
    for item in found:
        assert {len(values) for values in item["seconds"].values()} == {2}
        assert {"push", "move", "verify", "commit", "paused"} <= set(item["seconds"])
        # The two sides compute in bfloat16 in other orders; weights of another version give other tokens altogether.
        assert item["kl"] < 5e-3
        assert item["untouched_kl"] > 0.1
    assert refit_timeline.main([str(times), "--push", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = {line.split()[-1]: line.split()[4] for line in lines[2:]}  # the process of each function
    assert parts["trainer.session:RefitSession._push"] != parts["vllm.reload:Replacement.apply"]
    assert {"trainer.engines:HttpEngine.commit", "memory.unpacker:Unpacker.accept"} <= parts.keys()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
def test_an_adapter_is_timed_beside_merged_and_whole_weights_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [*COMMAND, "--adapter-rank", "8", "--engine-arguments", ENGINE]
    assert main([*command, "--folder", str(tmp_path), "--json", str(file)]) == 0
    found = {item["way"]: item for item in json.loads(file.read_text())["outcomes"]}
    assert list(found) == ["merged", "whole", "adapter"]
    for item in found.values():
        assert {len(values) for values in item["seconds"].values()} == {2}
        assert item["kl"] < 5e-3
        assert item["untouched_kl"] > 0.05  # with the adapter instead of without it, or the reverse
    assert found["merged"]["nbytes"] == found["whole"]["nbytes"] > 4 * found["adapter"]["nbytes"]
    assert "merge" in found["merged"]["seconds"]
