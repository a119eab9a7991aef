"""The quick start's picture of the loss, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import loss_curve


def test_a_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    lines = loss_curve.in_terminal([4.0, 3.0, 2.0, 1.0], height=3).splitlines()
    assert lines == [
        "     4 │█   ",
        "       │██  ",
        "     1 │███▁",
        "       └────",
        "  loss  steps 1 to 4",
    ]


def test_many_steps_share_columns_by_their_mean() -> None:
    lines = loss_curve.in_terminal([9.0] * 150 + [1.0] * 150, width=10, height=2).splitlines()
    assert lines[:2] == ["     9 │█████     ", "     1 │█████▁▁▁▁▁"]
    assert lines[-1].endswith("steps 1 to 300")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("losses", [[3.2], [2.0, 2.0]])
def test_a_flat_curve_is_drawn_too(losses: list[float]) -> None:
    assert "█" in loss_curve.in_terminal(losses) or "▁" in loss_curve.in_terminal(losses)


def test_the_picture_has_a_title_and_named_axes(tmp_path: Path) -> None:
    loss_curve.draw([3.0, 2.0], 2.5, tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text()
    for part in ("Quick start: loss of each step", "step", "loss, nats per byte", "held-out files: 2.500"):
        assert f"<!-- {part} -->" in text
