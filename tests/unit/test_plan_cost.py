"""Planning a refit between large clusters costs what docs/refit.md says, and gives the plan that its figures are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.refit_plan import in_own_process

ROOT = Path(__file__).resolve().parents[2]
MOST_S, MOST_BYTES = 10.0, 4 << 30
REPORT = json.loads((ROOT / "docs" / "performance" / "refit-plan.json").read_text())


@pytest.mark.slow
def test_part_of_one_rank_is_planned_in_time_and_is_the_one_in_the_report() -> None:
    """The fastest of the measurements; where its digest differs, all figures are stale: measure them anew."""
    found = in_own_process("qwen3-235b", "destination")
    assert found.total_s < MOST_S
    assert found.peak_bytes < MOST_BYTES
    (kept,) = [one for one in REPORT if (one["model"], one["what"]) == ("qwen3-235b", "destination")]
    for what in ("digest", "transfers", "moved_bytes"):
        assert getattr(found, what) == kept[what], what


@pytest.mark.parametrize("one", REPORT, ids=lambda one: f"{one['model']}-{one['what']}")
def test_page_has_the_costs_of_the_report(one: dict[str, Any]) -> None:
    model = {"qwen3-235b": "Qwen3-235B", "deepseek-v3": "DeepSeek-V3"}[one["model"]]
    part = {
        "destination": "one engine rank",
        "source": "one trainer rank",
        "registry": "first trainer rank, for all",
        "whole": "all ranks",
    }[one["what"]]
    times = [f"{one[name]:.1f} s" for name in ("describe_s", "plan_s", "prove_s", "total_s")]
    row = [model, part, *times, f"{one['peak_bytes'] / 2**30:.2f} GiB", f"{one['transfers']:,}"]
    assert f"| {' | '.join(row)} |" in (ROOT / "docs" / "refit.md").read_text()
