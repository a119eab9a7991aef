"""``benchmarks.refit_meshes`` against a running vLLM: one engine takes the weights of trainers of several meshes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.refit_meshes import load, main

MESHES = ["pp=2,ep=2,dp=2", "tp=2,etp=2,ep=2,expert_etp=2"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(600)
def test_engine_agrees_with_trainers_of_all_meshes(tmp_path: Path) -> None:
    file = tmp_path / "meshes.json"
    arguments = ["--model", "tiny-moe", "--device", "cpu", "--from", *MESHES, "--to", "tp=1", "--json", str(file)]
    assert main(arguments) == 0
    rows = load(file)
    assert [(one.trainer, one.engine, one.verdict) for one in rows] == [(mesh, "tp=1", "agrees") for mesh in MESHES]
    for one in rows:
        assert 0 < one.kl < 5e-3
        assert one.largest < 1.0
        assert one.other_kl > 0.1
