"""Tests that share a fixture run in one worker of pytest-xdist, or each worker would train and serve for itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import time
import pytest

@pytest.mark.parametrize("one", [pytest.param(n, marks=pytest.mark.xdist_group(f"group{n % 3}")) for n in range(12)])
def test_one(one):
    time.sleep(0.02)
"""


def test_a_group_stays_in_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    ran = re.findall(r"\[(gw\d)\].* PASSED .*\[(\d+)\]", done.stdout)
    assert len(ran) == 12
    workers = {group: {worker for worker, number in ran if int(number) % 3 == group} for group in range(3)}
    assert [len(found) for found in workers.values()] == [1, 1, 1]
