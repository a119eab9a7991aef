"""The benchmark of finding weights again runs, and measures what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.integration
def test_both_ways_are_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.refit_look_up", "--layers", "1", "--experts", "4", "--repeats", "2"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    # 4 experts of 2 weights, the router, 2 norms, 4 of attention; embedding, final norm and output layer.
    found = re.search(r"(\d+) parameters\ndescribed anew: ([\d.]+) ms\nlooked up: ([\d.]+) ms", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 4 * 2 + 1 + 2 + 4 + 3
    assert float(found[2]) > 0
    assert float(found[3]) > 0
