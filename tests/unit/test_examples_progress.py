"""Progress of the examples, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import TextColumn

from examples import progress
from examples.progress import Bars


def _shown(*, terminal: bool) -> str:
    out = io.StringIO()
    with Bars(TextColumn("bar"), console=Console(file=out, force_terminal=terminal, width=80)) as bars:
        task = bars.add_task("train", total=400, note="starting 4 processes")
        bars.update(task, completed=100, note="loss 3.000")
        bars.update(task, completed=400, note="loss 2.000")
    return out.getvalue()


def test_a_log_says_when_a_task_begins() -> None:
    assert _shown(terminal=False).splitlines() == ["train starting 4 processes", "bar"]


def test_a_log_says_from_time_to_time_how_far_a_task_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    assert _shown(terminal=False).splitlines()[1:3] == ["train 100/400 loss 3.000", "train 400/400 loss 2.000"]


def test_a_terminal_has_bars_alone() -> None:
    assert "train" not in _shown(terminal=True)
