"""What a log shows of a command's phases."""

from __future__ import annotations

import io
import sys
import time

import pytest

from megatron_patches.refit.progress import LateProgress, LoggedProgress, shown_progress


def test_a_log_has_a_line_for_each_phase_when_it_begins() -> None:
    out = io.StringIO()
    progress = LoggedProgress(out)
    progress.phase("plan", 0)
    progress.phase("write", 2_000_000)
    for _ in range(100):
        progress.advance(20_000)
    assert out.getvalue() == "plan\nwrite, 2.0 MB on this rank\n"


def test_a_long_phase_says_how_far_it_is() -> None:
    out = io.StringIO()
    progress = LoggedProgress(out, seconds=0.0)
    progress.phase("write", 3_000_000)
    progress.advance(1_000_000)
    progress.advance(500_000)
    assert out.getvalue().splitlines()[1:] == ["write, 1.0 of 3.0 MB", "write, 1.5 of 3.0 MB"]


def test_a_command_that_is_mostly_quick_says_only_later_what_it_is_at() -> None:
    out = io.StringIO()
    with LateProgress(out, first_s=0.2, every_s=0.05) as progress:
        progress.phase("describe", 0)
        progress.phase("plan", 0)
        assert not out.getvalue()
        deadline = time.monotonic() + 30
        while len(out.getvalue().splitlines()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert set(lines) == {"plan, for 0 s"}
    assert len(lines) >= 2
    time.sleep(0.2)
    assert len(out.getvalue().splitlines()) == len(lines)


def test_lines_come_on_standard_error_where_that_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown_progress(shows=True, mostly_quick=True) as progress:
        assert isinstance(progress, LateProgress)
