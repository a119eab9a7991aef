"""benchmarks/long_run.py on CPUs: it trains, compares, loses a rank and resumes, and finds nothing bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


@pytest.mark.integration
@pytest.mark.multiproc
@pytest.mark.cpu_only("run the benchmark itself on GPUs, with more steps")
@pytest.mark.timeout(600)
def test_a_training_goes_on_after_a_rank_was_lost(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.long_run", "--steps", str(STEPS), "--variants", "stock", "c10d"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "runs"), "--json", str(output)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert {variant: len(curve) for variant, curve in result["losses"].items()} == {"stock": STEPS, "c10d": STEPS}
    verdicts = {verdict["what"]: verdict for verdict in result["verdicts"]}
    assert len(verdicts) == 7
    assert all(verdict["good"] for verdict in verdicts.values())
    for start in ("c10d against stock", "c10d: rank ", "c10d: resumed after step "):
        assert any(what.startswith(start) for what in verdicts), start
