"""Tables and plots of docs/performance show what the benchmarks' reports beside them say."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import batched
from pathlib import Path

import pytest
from matplotlib import rcParams

from benchmarks import refit, refit_report, refit_vllm, train_chart, train_report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "performance"
# In the order in which the reports were given.
TRAINING = {
    "h200x4-first": ("h200x4-first-etp", "h200x4-first-others"),
    "h200x4": ("h200x4-etp", "h200x4-others"),
    "h200x2": ("h200x2-etp", "h200x2-others"),
    "h100x2": ("h100x2-etp", "h100x2-others"),
    "h100x2-all": (
        *("h100x2-all/ours", "h100x2-all/theirs", "h100x2-all/moe-ours", "h100x2-all/moe-theirs"),
        *("h100x2-all/small-ours", "h100x2-all/small-theirs"),
    ),
    "h200x2-precisions": tuple(
        f"h200x2-precisions/{name}" for name in ("ours", "ours-fp8_block", "theirs", "theirs-fp8_block")
    ),
    "h100x2-fp8": ("h100x2-fp8-block", "h100x2-fp8-tensor"),
    "h100x2-moe": ("h100x2-moe-ours", "h100x2-moe-theirs"),
    "h200x4-moe": ("h200x4-moe-ours", "h200x4-moe-theirs"),
    "h200x2-sizes": (
        "h200x2-small-etp",
        "h200x2-small-others",
        *(f"h200x2-big/{name}" for name in ("etp_c10d", "etp_copy_engine", "fsdp2", "megatron_fsdp", "tp")),
        "h200x2-big/upstream_gtp",
        "h200x2-big/none",
    ),
}
REFIT = (
    *(f"refit-h200x2{name}" for name in ("", "-moe", "-moe-c10d")),
    *(f"refit-vllm-qwen3-8b{name}" for name in ("", "-in-place", "-colocated", "-one-gpu", "-one-gpu-nixl")),
    *(f"refit-vllm-qwen3-8b{name}" for name in ("-2to2", "-2to2-c10d")),
    *(f"refit-vllm-qwen3-moe{name}" for name in ("-1to1", "-one-gpu", "")),
)


def _reports(names: tuple[str, ...]) -> list[dict[str, object]]:
    return [json.loads((FOLDER / f"{name}.json").read_text()) for name in names]


def _texts(plot: Path) -> list[str]:
    """What is written in a plot whose letters are drawn as paths, after a comment that repeats each text."""
    return re.findall(r"<!-- (.*) -->", plot.read_text())


@pytest.mark.parametrize("name", TRAINING)
def test_training_table_is_that_of_the_reports(name: str) -> None:
    text = train_report.table(train_report.load([FOLDER / f"{report}.json" for report in TRAINING[name]]))
    assert text.splitlines() == (FOLDER / f"{name}.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("h200x4", "Time of a step and memory: 8 Llama-8B layers in bf16 on 4 H200"),
        ("h200x2", "Time of a step and memory: 8 Llama-8B layers in bf16 on 2 H200"),
        ("h100x2-all", "Time of a step and memory: three models in bf16 on 2 H100, measured in one command"),
        (
            "h100x2-moe",
            "Time of a step and memory: a mixture of experts, 6 layers of Qwen3-30B-A3B in bf16 on 2 H100",
        ),
    ],
)
def test_training_plot_is_that_of_the_reports(
    name: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rcParams, "svg.fonttype", "path")
    train_report.plot(_reports(TRAINING[name]), tmp_path / "plot.svg", title)
    assert _texts(tmp_path / "plot.svg") == _texts(FOLDER / f"{name}.svg") != []


def test_chart_is_that_of_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rcParams, "svg.fonttype", "path")
    title = "What communication adds to a step: 8 Llama-8B layers in bf16 on 2 H100"
    reports = _reports(TRAINING["h100x2"])
    train_chart.draw(reports, title, tmp_path / "plot.svg")
    texts = _texts(FOLDER / "step-h100x2.svg")
    assert _texts(tmp_path / "plot.svg") == texts
    assert title in texts
    assert (
        sum(text.endswith(" %") for text in texts) == sum(len(of) for of in train_chart.added(reports).values()) == 18
    )


def test_refit_plot_is_that_of_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rcParams, "svg.fonttype", "path")
    rows = refit_report.rows(_reports(REFIT))
    refit_report.plot(rows, tmp_path / "plot.svg")
    texts = _texts(tmp_path / "plot.svg")
    assert texts == _texts(FOLDER / "refit.svg")
    assert len({(row.case, row.way) for row in rows}) == len(rows), "bars of several runs are told apart"


def _cells(page: Path, gpus: int | None = None) -> Iterator[list[str]]:
    """Rows of Markdown tables, without emphasis; those of one number of GPUs where the page has several."""
    text = page.read_text()
    if gpus is not None:
        before, heading, after = text.partition("### 2 GPUs\n")
        text = before if gpus == 4 else heading + after
    for line in text.splitlines():
        if line.startswith("| "):
            yield [cell.strip().replace("*", "") for cell in line.strip("| ").split(" | ")]


@pytest.mark.parametrize(
    ("page", "gpus", "name"),
    [("performance.md", 4, "h200x4"), ("performance.md", 2, "h100x2"), ("performance/history.md", None, "h200x2")],
)
def test_pages_have_the_times_and_ratios_of_the_reports(page: str, gpus: int | None, name: str) -> None:
    rows = [row for row in train_report.rows(_reports(TRAINING[name])) if row.model == "llama8b-8l"]
    shown = {" ".join(cells) for cells in _cells(FOLDER.parent / page, gpus)}
    for once, more in batched(rows, 2):
        times = (f"{once.ms:.1f}", f"= {once.ratio:.3f}", f"{more.ms:.1f} = {more.ratio:.3f}", f"{once.held_gib:.2f}")
        assert any(all(part in row for part in times) for row in shown), (once.system, times)


def test_readme_has_the_ratios_of_one_run() -> None:
    rows = [row for row in train_report.rows(_reports(("h200x4-etp",))) if row.model == "llama8b-8l"]
    known = {(f"{a.ratio:.3f}", f"{b.ratio:.3f}", f"{a.held_gib:.1f}") for a, b in batched(rows, 2)}
    page = [cells for cells in _cells(ROOT / "README.md") if len(cells) == 4]
    ratios = [tuple(cells[1:]) for cells in page if re.fullmatch(r"1\.\d{3}", cells[1])]
    assert len(ratios) == 5
    assert set(ratios) == known


def test_readme_recommends_by_what_was_measured() -> None:
    """The table of systems to choose from, and the sentence below the chart."""
    page = (ROOT / "README.md").read_text()
    measured = train_report.rows(_reports(TRAINING["h100x2"]))
    systems = {name: [row for row in measured if row.system == name] for name in {row.system for row in measured}}
    rows = {cells[0]: cells for cells in _cells(ROOT / "README.md")}
    for name, system in (
        ("ETP", "etp_copy_engine"),
        ("Megatron's own sharded weights (GTP)", "upstream_gtp"),
        ("Megatron-FSDP", "megatron_fsdp"),
        ("PyTorch FSDP2", "fsdp2"),
        ("tensor parallelism", "tp"),
        ("data parallelism, distributed optimizer", "dp"),
    ):
        assert rows[name][2] == ", ".join(f"{row.ratio:.2f}" for row in systems[system]), name
        assert {rows[name][3]} == {f"{row.held_gib:.1f}" for row in systems[system]}, name
    added = train_chart.added(_reports(TRAINING["h100x2"]))
    ours = [*added["etp_copy_engine"].values(), *added["etp_copy_engine_graph"].values()]
    others = [percent for name in ("upstream_gtp", "megatron_fsdp", "fsdp2") for percent in added[name].values()]
    over_nccl = [*added["etp_c10d"].values(), *added["etp_c10d_graph"].values()]
    assert f"adds {min(ours):.0f} to {max(ours):.0f} %" in page
    assert f"{min(over_nccl):.0f} to {max(over_nccl):.0f} % with NCCL" in page
    assert f"{min(others):.0f} to {max(others):.0f} %" in page
    slower = train_chart.added(_reports(("h100x2-all/ours", "h100x2-all/theirs")))
    spans = [
        f"{min(found):.0f} to {max(found):.0f} %"
        for names in (("etp_copy_engine",), ("etp_c10d",), ("upstream_gtp", "megatron_fsdp", "fsdp2"))
        if (found := [percent for name in names for percent in slower[name].values()])
    ]
    assert f"{spans[0]}, {spans[1]} and {spans[2]}" in page
    fp8, bf16 = (
        next(row.ms for row in train_report.rows(_reports((name,))) if row.system == "etp_copy_engine_graph")
        for name in ("h100x2-fp8-block", "h100x2-etp")
    )
    eager, faster = (
        [row.ratio for row in train_report.rows(_reports(names)) if row.system == "etp_copy_engine"]
        for names in (TRAINING["h100x2-fp8"], ("h200x2-fp8-block-second",))
    )
    assert rows["ETP"][4] == (
        f"gathers FP8; with CUDA graphs, {fp8 / bf16:.2f} of the bf16 step; without graphs host-bound, "
        f"{min(eager):.2f} to {max(eager):.2f} of its step without communication, and {min(faster):.2f} to "
        f"{max(faster):.2f} with a faster host"
    )


def test_commands_of_refits_would_write_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is run by a shell in which python only prints its arguments; they are those that its report has."""
    monkeypatch.setattr("benchmarks.refit.require_gpus", lambda *_: None)
    page = (FOLDER.parent / "performance.md").read_text()
    commands = [block for block in re.findall(r"(?ms)^```sh\n(.*?)^```", page) if "refit_vllm" in block]
    script = 'python() { printf "%s\\t" "$@"; echo; }\n' + "".join(commands)
    done = subprocess.run(["/bin/bash", "-c", script], check=True, cwd=FOLDER, capture_output=True, text=True)
    lines = [line.split("\t")[:-1] for line in done.stdout.splitlines()]
    (shown,) = [given for _, module, *given in lines if module == "benchmarks.refit_report"]
    runs = [line for line in lines if line[1] != "benchmarks.refit_report"]
    for _, module, *given in runs:
        options = vars((refit if module == "benchmarks.refit" else refit_vllm).parse(given))
        kept = json.loads((FOLDER / options["json"]).read_text())["options"]
        for name in kept.keys() - {"json", "timeout", "limit"}:
            assert str(options[name]) == kept[name], (options["json"], name)
    names = [Path(argument).stem for argument in shown if argument.endswith(".json")]
    assert names == list(REFIT)
    written = [Path(given[given.index("--json") + 1]).stem for given in runs]
    assert sorted([*names, "refit-vllm-adapters"]) == sorted(written)


def test_every_report_is_in_a_table_or_named_by_a_page() -> None:
    shown = {name for names in (*TRAINING.values(), REFIT) for name in names}
    pages = "".join(page.read_text() for page in FOLDER.parent.rglob("*.md"))
    reports = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.json")]
    assert [name for name in reports if name not in shown and f"{name}.json" not in pages] == []
