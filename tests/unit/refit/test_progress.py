"""What a log shows of a command's phases."""

from __future__ import annotations

import io

from megatron_patches.refit.progress import LoggedProgress


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
