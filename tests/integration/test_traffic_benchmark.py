"""The benchmark of traffic runs as its docstring says, and its figures are those that the engine's rules predict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN, FFN, VOCABULARY, MICROBATCHES = 2, 32, 64, 64, 2


@pytest.mark.multiproc
def test_the_benchmark_counts_what_the_rules_say(tmp_path: Path) -> None:
    output = tmp_path / "traffic.json"
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "ffn": FFN, "vocabulary": VOCABULARY, "microbatches": MICROBATCHES}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.traffic", *flags, "--json", str(output)],
        env=os.environ | {"COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in ("One step of 2 microbatches over 2 ranks", "By weight, default configuration", "0.weight", "3.weight"):
        assert text in done.stdout
    # Nothing is wrapped or cut: each configuration takes one line.
    assert len([line for line in done.stdout.splitlines() if line.startswith("\u2502")]) == 8 + 2 + 3 * LAYERS
    result = json.loads(output.read_text())
    assert result["ranks"] == 2
    assert result["model"] == sizes
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in result["configurations"]}
    every, default, depthless, half, whole, across, once, both = rows.values()

    def total(row: dict[str, Any], what: str) -> int:
        return sum(weight[what] for weight in row["weights"].values())

    weights = 2 + 3 * LAYERS
    step_bytes = 4 * (2 * VOCABULARY * HIDDEN + 3 * LAYERS * HIDDEN * FFN)
    # Forward visits every weight, backward all but the embedding, whose gradient needs no weight.
    assert total(every, "gathers") == MICROBATCHES * (2 * weights - 1)
    assert total(whole, "gathers") == MICROBATCHES * weights
    assert total(across, "gathers") == weights
    assert total(whole, "gather_bytes") == MICROBATCHES * step_bytes // 2
    assert total(whole, "gather_bytes") < total(half, "gather_bytes") < total(default, "gather_bytes")
    assert total(default, "gather_bytes") < total(depthless, "gather_bytes") < total(every, "gather_bytes")
    assert total(default, "reduce_bytes") == MICROBATCHES * step_bytes // 2
    assert total(once, "reduce_bytes") == step_bytes // 2
    assert total(both, "gathers") == weights
    assert total(both, "reductions") == weights
    assert whole["slot_bytes"] == step_bytes
