"""The benchmark of deltas runs and reports bytes that can be calculated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import refit_delta


def test_changes_take_the_bytes_of_indices_or_of_a_bitmap(tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    options = ["--mebibytes", "32", "--repeats", "1", "--gigabytes-per-second", "2", "--json", str(report)]
    assert refit_delta.main(options) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["share"], row["payload"]) for row in rows] == [
        (share, payload) for share in refit_delta.SHARES for payload in ("whole", "delta")
    ]
    for whole, delta in zip(rows[::2], rows[1::2], strict=True):
        assert whole["nbytes"] == 32 << 20
        share = whole["share"]
        assert delta["nbytes"] == pytest.approx((2 * share + min(4 * share, 1 / 8)) * (16 << 20), rel=0.02)
        assert 0.0 < delta["move"] < delta["seconds"]


@pytest.mark.timeout(120)
def test_a_fast_link_is_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert refit_delta.main(["--mebibytes", "32", "--repeats", "1", "--gigabytes-per-second", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(refit_delta.SHARES)


@pytest.mark.timeout(120)
def test_a_failure_of_one_process_ends_the_other() -> None:
    with pytest.raises(RuntimeError, match="a process has failed"):
        refit_delta.measure("cpu", 32, -1.0, 1)  # a link has no such speed
