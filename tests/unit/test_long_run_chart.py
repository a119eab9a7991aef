"""benchmarks/long_run_chart.py draws what benchmarks/long_run.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.long_run_chart import main, means


def test_means_end_with_a_shorter_group() -> None:
    assert means({3: 5.0, 1: 1.0, 2: 3.0}, 2) == [(2, 2.0), (3, 5.0)]


def report(path: Path, **losses: list[float]) -> Path:
    curves = {variant: dict(enumerate(curve)) for variant, curve in losses.items()}
    path.write_text(json.dumps({"verdicts": [], "losses": curves}))
    return path


def test_a_chart_names_each_curve(tmp_path: Path) -> None:
    found = report(tmp_path / "a.json", stock=[3.0, 2.0, 1.5], copy_engine=[3.0, 2.1, 1.4])
    main([f"bf16={found}", "--every", "2", "--plot", str(tmp_path / "a.svg")])
    drawn = (tmp_path / "a.svg").read_text()
    assert "bf16, Megatron, unsharded" in drawn
    assert "bf16, ETP, copy_engine" in drawn


@pytest.mark.parametrize("given", ["bf16=/nowhere.json", "bf16"])
def test_a_file_that_is_not_there_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([given, "--plot", "x.svg"])
    assert "give NAME=FILE" in capsys.readouterr().err


def test_a_report_without_stock_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path / "a.json", copy_engine=[3.0])
    with pytest.raises(SystemExit):
        main([f"bf16={found}", "--plot", str(tmp_path / "a.svg")])
    assert "no variant stock" in capsys.readouterr().err
