"""The benchmark's table and plot, from reports made up here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams

from benchmarks.train_report import Row, load, longest_bar, plot, rows, table
from benchmarks.train_shapes import SHAPES


def result(system: str, microbatches: int, ms: float, **more: Any) -> dict[str, Any]:
    """One system, measured three times."""
    return {
        "system": system, "microbatches": microbatches, "milliseconds": [ms + 1, ms, ms - 2], "median": ms,
        "allocated_gib": 0.0, "peak_gib": 0.0, "other_gib": {}, "closed_form_gib": {}, "trace": None,
    } | more  # fmt: skip


def report(*results: dict[str, Any], shape: str = "llama8b-8l", gpus: int = 4, **more: Any) -> dict[str, Any]:
    """What one run wrote."""
    return {
        "shape": asdict(SHAPES[shape]), "shape_name": shape, "flops_per_microbatch": SHAPES[shape].flops(),
        "gpus": gpus, "device": "NVIDIA H200", "options": {}, "failures": {}, "results": list(results),
    } | more  # fmt: skip


def only(found: list[Row], system: str, microbatches: int = 1) -> Row:
    (row,) = [row for row in found if (row.system, row.microbatches) == (system, microbatches)]
    return row


OURS = report(
    result("none", 1, 100.0, host_ms=80.0),
    result("none", 4, 400.0),
    result("none_graph", 1, 80.0),
    result(
        "etp_copy_engine",
        1,
        110.0,
        allocated_gib=2.25,
        peak_gib=7.5,
        other_gib={"shards_in_place": 0.9, "receive_ring": 0.4},
        closed_form_gib={"weights": 1.0, "gradients": 1.0, "gather slots": 1.0, "receive ring": 0.5},
        trace={"span": 111.0, "compute": 101.0, "communication": 30.0, "exposed": 6.0, "idle": 4.0},
        host_ms=99.5,
    ),
    result("etp_copy_engine", 4, 410.0),
    result("etp_copy_engine_graph", 1, 88.0, trace={"exposed": 40.0, "idle": 2.0}),
)


def test_a_row_says_what_was_measured() -> None:
    row = only(rows([OURS]), "etp_copy_engine")
    assert (row.ratio, row.eager_ratio, row.calculated) == (1.1, 1.1, False)
    assert (row.spread, row.rounds) == ((108.0, 111.0), 3)
    assert row.host_ms == 99.5
    assert row.host_ratio == pytest.approx(99.5 / 80)
    assert only(rows([OURS]), "etp_copy_engine", 4).host_ratio is None
    assert row.tokens == pytest.approx(4096 / 0.110)
    assert row.tflops == pytest.approx(SHAPES["llama8b-8l"].flops() / 0.110 / 1e12)
    assert row.held_gib == pytest.approx(3.55)
    assert row.peak_gib == pytest.approx(8.8)
    assert row.closed_form_gib == 3.5
    assert (row.exposed_ms, row.idle_ms) == (6.0, 4.0)


def test_rates_are_of_all_microbatches_and_ratios_of_as_many() -> None:
    row = only(rows([OURS]), "etp_copy_engine", 4)
    assert row.ratio == pytest.approx(410 / 400)
    assert row.tokens == pytest.approx(4 * 4096 / 0.410)


def test_a_graph_is_compared_with_a_graph_and_with_eager_none() -> None:
    row = only(rows([OURS]), "etp_copy_engine_graph")
    assert row.ratio == pytest.approx(88 / 80)
    assert row.eager_ratio == pytest.approx(0.88)


def test_what_a_graph_exposes_is_not_told_from_its_trace() -> None:
    row = only(rows([OURS]), "etp_copy_engine_graph")
    assert (row.exposed_ms, row.idle_ms) == (None, 2.0)


def test_ratios_are_to_the_same_run() -> None:
    theirs = report(result("none", 1, 90.0), result("tp", 1, 99.0))
    assert only(rows([OURS, theirs]), "tp").ratio == pytest.approx(1.1)


def test_what_does_not_fit_alone_is_compared_with_a_calculated_time() -> None:
    big = report(result("etp_copy_engine", 1, 2000.0), shape="llama70b-40l")
    found = rows([big, OURS])[0]
    alone = 100.0 * SHAPES["llama70b-40l"].flops() / SHAPES["llama8b-8l"].flops()
    assert found.calculated
    assert found.ratio == pytest.approx(2000.0 / alone)
    assert f"~{2000.0 / alone:.3f}" in table([big, OURS])
    assert rows([big])[0].ratio is None
    on_two = report(*OURS["results"], gpus=2)
    assert rows([big, on_two])[0].ratio is None
    in_fp8 = {"precision": "fp8_block"}
    big_in_fp8 = report(*big["results"], shape="llama70b-40l", options=in_fp8)
    assert rows([big_in_fp8, OURS])[0].ratio is None
    found = rows([big_in_fp8, OURS, report(result("none", 1, 80.0), options=in_fp8)])[0]
    assert found.ratio == pytest.approx(2000.0 / (0.8 * alone))


def test_the_table_is_markdown_and_lists_failures() -> None:
    failed = report(
        result("none", 1, 100.0), gpus=2, failures={"fsdp2": "out of memory", "megatron_fsdp": "out of memory"}
    )
    lines = table([OURS, failed]).splitlines()
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert len(widths) == 1
    assert sum(line.startswith("|") for line in lines) == 2 + len(OURS["results"]) + 1
    assert lines[-1] == "- llama8b-8l on 2 GPUs: PyTorch FSDP2 (Megatron's wrapper); Megatron-FSDP: out of memory"
    copy_engine = next(line for line in lines if line.startswith("| ETP, copy_engine | llama8b-8l | 4 | 1 |"))
    assert copy_engine.split(" | ")[4:8] == ["110.0", "108.0-111.0 (3)", "1.100", "1.100"]
    assert copy_engine.rstrip(" |").split(" | ")[10:] == ["99.5", "1.24", "3.55", "1.01", "8.80", "6.0", "4.0"]


def test_bytes_that_were_counted_are_in_a_column_of_their_own() -> None:
    assert "bytes/element" not in table([OURS])
    counted = report(result("none", 1, 100.0), result("etp_c10d", 1, 110.0, bytes_per_element=33 / 32 + 33 / 32 + 2))
    lines = table([counted, OURS]).splitlines()
    shown = [line.removesuffix(" |").split(" | ")[-1] for line in lines if line.startswith("| ")]
    assert shown[:3] == ["bytes/element", "", "4.0625"]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert [line for line in lines if line.startswith("bytes/element: ")]


def test_times_in_fp8_are_compared_with_those_in_bf16_of_the_same_model_and_machine() -> None:
    assert "of bf16" not in table([OURS])
    in_fp8 = {"precision": "fp8_block"}
    measured = result("none", 1, 80.0), result("etp_copy_engine", 1, 88.0), result("fsdp2", 1, 99.0)
    fp8 = report(*measured, options=in_fp8)
    found = rows([OURS, fp8, report(result("etp_copy_engine", 1, 200.0))])
    assert [row.bf16_ratio for row in found if row.model != "llama8b-8l"] == pytest.approx([0.8, 0.8, None])
    assert {row.bf16_ratio for row in found if row.model == "llama8b-8l"} == {None}
    lines = [line for line in table([OURS, fp8]).splitlines() if line.startswith("| ") and "fp8_block" in line]
    assert [line.removesuffix(" |").split(" | ")[-1].strip() for line in lines] == ["0.800", "0.800", ""]
    alone = result("none", 1, 80.0)
    for other in (
        report(alone, options=in_fp8, gpus=2),
        report(alone, options=in_fp8, device="NVIDIA H100"),
        report(alone, options=in_fp8, shape="small"),
    ):
        assert {row.bf16_ratio for row in rows([OURS, other])} == {None}


def test_a_system_that_was_built_and_never_timed_has_no_row() -> None:
    broken = report(result("none", 1, 100.0), result("tp", 1, 1.0, milliseconds=[], median=None))
    assert [row.system for row in rows([broken])] == ["none"]


def test_reports_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(OURS))
    assert load([tmp_path / "a.json"]) == [OURS]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_plot_is_drawn(tmp_path: Path, kind: str) -> None:
    small = report(result("none", 1, 10.0), result("dp", 1, 12.0), shape="small", gpus=2)
    path = tmp_path / f"plot.{kind}"
    plot([OURS, small], path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_bar_far_longer_than_the_others_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_bar([0.0, 0.1, 0.2, 2.0]) == pytest.approx(0.6)
    assert longest_bar([0.0, 0.0]) == longest_bar([]) == 0.0
    slow = result("tp", 1, 300.0)
    others = [result("none", 1, 100.0), result("dp", 1, 110.0), result("fsdp2", 1, 120.0)]
    monkeypatch.setitem(rcParams, "svg.fonttype", "none")
    plot([report(*others, slow)], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "3.000 (cut)" in drawn
    assert "1.200<" in drawn
    assert "100.0 ms" in drawn


def test_a_plot_of_experts_has_its_title_and_no_empty_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rcParams, "svg.fonttype", "none")
    moe = report(result("none", 1, 250.0), result("ep", 1, 217.0), shape="qwen3-30b-a3b-6l", gpus=2)
    plot([OURS, moe], tmp_path / "plot.svg", "Mixture of experts")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "Mixture of experts<" in drawn
    assert "qwen3-30b-a3b-6l, 2 GPUs, microbatches: 1<" in drawn
    assert "qwen3-30b-a3b-6l, 2 GPUs, microbatches: 4" not in drawn
    assert "expert parallel<" in drawn
    assert "0.868<" in drawn


def test_nothing_to_plot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results"):
        plot([report()], tmp_path / "plot.svg")


def test_tables_of_committed_results_can_be_made() -> None:
    """Reports of earlier versions lack some entries."""
    folder = Path(__file__).resolve().parents[2] / "docs" / "performance"
    reports = load(sorted(folder.glob("h200*.json")))
    assert reports
    assert all(row.ratio == row.eager_ratio == 1.0 for row in rows(reports) if row.system == "none")


_BIG = ("etp_c10d", "etp_copy_engine", "fsdp2", "megatron_fsdp", "none", "tp", "upstream_gtp")


@pytest.mark.parametrize(
    ("made", "names"),
    [
        ("h200x4.md", ("h200x4-etp.json", "h200x4-others.json")),
        ("h200x4-first.md", ("h200x4-first-etp.json", "h200x4-first-others.json")),
        ("h200x2.md", ("h200x2-etp.json", "h200x2-others.json")),
        (
            "h200x2-sizes.md",
            (
                *("h200x2-small-etp.json", "h200x2-small-others.json"),
                *(f"h200x2-big/{name}.json" for name in _BIG),
            ),
        ),
    ],
)
def test_committed_tables_are_of_committed_results(made: str, names: tuple[str, ...]) -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "performance"
    assert (folder / made).read_text() == table(load([folder / name for name in names])) + "\n"
