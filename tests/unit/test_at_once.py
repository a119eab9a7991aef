"""A run that is ended before its end has said which tests failed, and says which were under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.support.at_once import report_at_once


def pytest_configure(config):
    report_at_once(config)
"""
TESTS = """
import time


def test_that_fails():
    first, second = 2, 3
    assert first == second, "two is not three"


def test_that_hangs():
    time.sleep(600.0)


def test_that_is_not_reached():
    pass
"""


def test_failures_are_named_at_once_and_so_is_what_a_signal_ends(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    output = tmp_path / "output"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    with output.open("w") as file:
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60.0
        while "two is not three" not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        early = output.read_text()
        time.sleep(0.5)  # the next one begins
        run.send_signal(signal.SIGTERM)
        run.wait(60.0)
    finally:
        run.kill()
        run.wait()
    assert "FAILED AT ONCE test_some.py::test_that_fails (call, " in early
    assert "1 failed" not in early
    later = output.read_text().removeprefix(early)
    assert "UNDER WAY test_some.py::test_that_hangs for " in later
    assert "SIGTERM" in later
    assert "1 failed" in later
    assert "not_reached" not in later
