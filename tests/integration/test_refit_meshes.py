"""``benchmarks.refit_meshes`` against a running vLLM: one engine takes the weights of trainers of several meshes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.refit_meshes import TABLES, load, main


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(1800)
def test_engine_agrees_with_trainers_of_all_meshes(tmp_path: Path) -> None:
    file = tmp_path / "meshes.json"
    assert main(["--table", "cpu", "--json", str(file)]) == 0
    rows = load(file)
    expected = [
        (model, trainer, engine, "agrees")
        for model, trainers, engines in TABLES["cpu"]
        for engine in engines
        for trainer in trainers
    ]
    assert [(one.model, one.trainer, one.engine, one.verdict) for one in rows] == expected
    for one in rows:
        assert 0 < one.kl < 5e-3
        assert one.largest < 1.0
        assert one.other_kl > 0.1
