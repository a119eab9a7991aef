"""The runner of the benchmark's jobs: what it does with processes that die, hang or never start."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_all
from benchmarks.run_all import (
    Ended,
    Job,
    Time,
    cannot_run,
    jobs,
    possible,
    run_job,
    run_jobs,
    summarise,
    what_went_wrong,
)
from benchmarks.train_shapes import SYSTEMS
from tests.unit.test_benchmark_report import report, result

JOB = Job("ours", "ours", ("none", "etp_c10d", "none_graph"), 200.0, ("--shape", "test"))


class Processes:
    """Stands in for torchrun: writes the reports of a script, one a start."""

    def __init__(self, *script: tuple[Ended, dict[str, Any] | None]) -> None:
        self.script = list(script)
        self.started: list[tuple[tuple[str, ...], Time]] = []

    def __call__(self, job: Job, path: Path, time_: Time) -> Ended:
        self.started.append((job.systems, time_))
        ended, written = self.script.pop(0)
        if written is not None:
            path.write_text(json.dumps(written))
        return ended


def _report(doing: str, timed: tuple[str, ...] = (), **failures: str) -> dict[str, Any]:
    results = [{"system": name, "median": 1.0} for name in timed]
    return {"doing": doing, "failures": failures, "results": results, "shape_name": "test", "gpus": 4, "device": "x"}


def _failures(path: Path) -> dict[str, str]:
    failures: dict[str, str] = json.loads(path.read_text())["failures"]
    return failures


def _run(out: Path, deadline: float, start: Processes) -> None:
    run_job(JOB, out, deadline, start, wanted_by=deadline)


def _soon() -> float:
    return time.monotonic() + 1000


def test_a_job_that_is_through_runs_once(tmp_path: Path) -> None:
    start = Processes((Ended(0, ""), _report("", ("none", "etp_c10d", "none_graph"))))
    _run(tmp_path, _soon(), start)
    ((systems, given),) = start.started
    assert (systems, given.limit_s) == (JOB.systems, 200.0)


def test_a_hang_after_the_last_result_is_no_failure(tmp_path: Path) -> None:
    _run(tmp_path, _soon(), Processes((Ended(None, ""), _report("", JOB.systems))))
    assert _failures(tmp_path / "ours.json") == {}


def test_a_job_goes_on_without_the_system_it_died_at(tmp_path: Path) -> None:
    start = Processes(
        (Ended(1, "CUDA error"), _report("etp_c10d: timing x1", ("none",))),
        (Ended(0, ""), _report("", ("none", "none_graph"))),
    )
    _run(tmp_path, _soon(), start)
    assert [systems for systems, _ in start.started] == [JOB.systems, ("none", "none_graph")]
    assert _failures(tmp_path / "ours.json") == {
        "etp_c10d": "etp_c10d: timing x1: the process ended with 1; CUDA error"
    }
    assert json.loads((tmp_path / "ours.json").read_text())["results"]
    assert _failures(tmp_path / "ours-2.json") == {}


def test_failures_that_the_process_survived_are_not_tried_again(tmp_path: Path) -> None:
    start = Processes((Ended(None, ""), _report("none_graph: building", ("none",), etp_c10d="rank 0, building: no")))
    _run(tmp_path, _soon(), start)
    assert len(start.started) == 1
    assert set(_failures(tmp_path / "ours.json")) == {"etp_c10d", "none_graph"}
    assert "took too long" in _failures(tmp_path / "ours.json")["none_graph"]


def test_a_process_that_never_began_loses_all_its_systems_and_says_why(tmp_path: Path) -> None:
    _run(tmp_path, _soon(), Processes((Ended(1, "ImportError: no te"), None)))
    assert _failures(tmp_path / "ours.json") == dict.fromkeys(
        JOB.systems, "start: the process ended with 1; ImportError: no te"
    )


def test_nothing_starts_when_the_time_is_up(tmp_path: Path) -> None:
    start = Processes()
    _run(tmp_path, time.monotonic() + 5, start)
    assert start.started == []
    assert _failures(tmp_path / "ours.json") == dict.fromkeys(JOB.systems, "not run: the time was up")


def test_a_job_gets_no_more_time_than_is_left(tmp_path: Path) -> None:
    start = Processes((Ended(0, ""), _report("", JOB.systems)))
    _run(tmp_path, time.monotonic() + 100, start)
    assert 90 < start.started[0][1].limit_s <= 100


def test_jobs_share_the_time_and_may_use_what_earlier_ones_left(tmp_path: Path) -> None:
    three = [
        Job(name, "ours", ("none",), limit, ("--shape", "test")) for name, limit in (("a", 300), ("b", 100), ("c", 100))
    ]
    through = (Ended(0, ""), _report("", ("none",)))
    start = Processes(through, through, through)
    run_jobs(three, tmp_path, time.monotonic() + 250, start)
    wanted = [given.wanted_s for _, given in start.started]
    # The first should take 3/5 of 250 s, less start and end; it took none, and the others may take all they want.
    assert wanted == pytest.approx([115, 65, 65], abs=5)
    assert [given.limit_s for _, given in start.started] == pytest.approx([250, 100, 100], abs=5)


def test_jobs_come_in_order_of_importance_and_know_their_systems() -> None:
    every = jobs(("big", "small", "moe", "theirs", "ours"))
    together = ["ours", "theirs", "moe-ours", "moe-theirs", "small-ours", "small-theirs"]
    assert [job.name for job in every[:6]] == together
    assert [job.kind for job in every[6:]] == ["big"] * len(every[6:])
    assert {system for job in every for system in job.systems} == set(SYSTEMS)
    assert all("upstream_gtp" not in job.systems or not any(s.startswith("etp") for s in job.systems) for job in every)
    assert all(job.systems[0] == "none" for job in every[:6])
    assert [job.name for job in jobs(["small"])] == ["small-ours", "small-theirs"]


def test_jobs_of_several_precisions_follow_each_other() -> None:
    every = jobs(["ours", "moe"], ["bf16", "fp8_block"])
    assert [job.name for job in every] == [
        *("ours", "ours-fp8_block"),
        *("moe-ours", "moe-ours-fp8_block", "moe-theirs", "moe-theirs-fp8_block"),
    ]
    assert every[1].arguments == (*every[0].arguments, "--precision", "fp8_block")
    assert every[1].systems == every[0].systems


def test_an_unknown_precision_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all", "--precisions", "bf16,fp4"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "--precisions fp4: there is no such precision; choose from bf16, fp8_block" in capsys.readouterr().err


def test_jobs_are_left_with_what_is_wanted_and_can_run() -> None:
    moe = jobs(["moe"])
    assert "etp_copy_engine_ep2" in moe[0].systems
    assert [job.systems for job in possible(moe, 4)] == [job.systems for job in moe]
    assert possible(moe, 2)[0].systems == ("none", "ep", "etp_copy_engine", "etp_c10d")
    assert [(job.name, job.systems) for job in possible(moe, 2, ["none", "dp"])] == [
        ("moe-ours", ("none",)),
        ("moe-theirs", ("none", "dp")),
    ]
    assert [job.name for job in possible(moe, 2, ["ep"])] == ["moe-ours"]


def test_seconds_of_each_system_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report("", JOB.systems) | {"seconds": {"none": 11.6, "etp_c10d": 20.2}}
    _run(tmp_path, _soon(), Processes((Ended(0, ""), report)))
    assert capsys.readouterr().out == "ours: none 12 s, etp_c10d 20 s\n"


def test_a_profile_goes_where_no_report_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert run_all.torchrun(2, profile=True)(JOB, tmp_path / "ours.json", Time(9.0, 9.0)).code == 0
    command = (tmp_path / "ours.log").read_text()
    assert command.endswith(f"--shape test --profile {tmp_path}/profiles/ours.json\n")


def test_a_real_process_is_ended_in_time_and_its_log_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = tmp_path / "stalled"
    stalled.write_text("#!/bin/sh\necho 'RuntimeError: stuck'\nexec sleep 60\n")
    stalled.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stalled))
    begun = time.monotonic()
    ended = run_all.torchrun(2)(JOB, tmp_path / "ours.json", Time(1.0, 1.0))
    assert ended == Ended(None, "RuntimeError: stuck")
    assert time.monotonic() - begun < 20


def test_a_process_that_does_not_end_once_all_is_measured_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = tmp_path / "stalled"
    stalled.write_text(f"#!/bin/sh\necho '{json.dumps(_report(''))}' > {tmp_path}/ours.json\nexec sleep 60\n")
    stalled.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stalled))
    monkeypatch.setattr(run_all, "_END_S", 0.5)
    begun = time.monotonic()
    ended = run_all.torchrun(2)(JOB, tmp_path / "ours.json", Time(50.0, 50.0))
    assert ended.code is None
    assert time.monotonic() - begun < 20


def test_reports_of_an_earlier_run_are_not_taken_for_this_one(tmp_path: Path) -> None:
    others = ("small-ours.json", "ours-more.json")
    for name in ("ours.json", "ours-2.json", *others):
        (tmp_path / name).write_text(json.dumps(_report("", JOB.systems)))
    _run(tmp_path, _soon(), Processes((Ended(1, "ImportError: no te"), None)))
    assert set(_failures(tmp_path / "ours.json")) == set(JOB.systems)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["ours.json", *others])


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("one\nTraceback\n  torch.OutOfMemoryError: 2 GiB\nlast\n", "torch.OutOfMemoryError: 2 GiB"),
        ("one\nlast\n\n", "last"),
        ("", "it wrote nothing"),
    ],
)
def test_the_first_error_of_a_log_is_its_reason(log: str, line: str) -> None:
    assert what_went_wrong(log) == line


def test_a_machine_without_gpus_is_told_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all", "--gpus", "64", "--out", "/nonexistent/never/made"])
    with pytest.raises(SystemExit) as stopped:
        run_all.main()
    assert str(stopped.value).startswith("The training benchmark cannot run here: ")
    assert "It needs NVIDIA GPUs" in str(stopped.value)
    assert capsys.readouterr().out == ""


def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "_PROBE", "print('noise'); print(2)")
    assert cannot_run(2) == ""
    assert cannot_run(4) == "it needs 4 GPUs and PyTorch sees 2"


def test_a_summary_is_made_of_whatever_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, time.monotonic(), Processes())
    with pytest.raises(SystemExit, match="Nothing was measured"):
        summarise(tmp_path, [JOB])
    assert "not run: the time was up" in (tmp_path / "table.md").read_text()
    assert "no plot: these reports have no results" in capsys.readouterr().out


def test_a_summary_shows_precisions_beside_each_other(tmp_path: Path) -> None:
    for name, ms, options in (("theirs", 99.0, {}), ("ours-fp8_block", 80.0, {"precision": "fp8_block"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(result("none", 1, ms), options=options)))
    (tmp_path / "ours.json").write_text(json.dumps(report(result("none", 1, 100.0))))
    summarise(tmp_path, jobs(["ours", "theirs"], ["bf16", "fp8_block"]))
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| no comm")]
    assert [line.split(" | ")[4] for line in lines] == ["100.0", "80.0", "99.0"]
    assert [line.split(" | ")[-1] for line in lines] == [" |", "0.800 |", " |"]


def test_a_summary_leaves_out_reports_of_other_jobs(tmp_path: Path) -> None:
    for name, ms in (("ours", 100.0), ("ours-2", 101.0), ("ours-fp8_block", 80.0), ("theirs", 99.0), ("more", 98.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(result("none", 1, ms))))
    summarise(tmp_path, [JOB])
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| no comm")]
    assert [line.split(" | ")[4] for line in lines] == ["100.0", "101.0"]


def test_a_mixture_of_experts_has_a_plot_of_its_own(tmp_path: Path) -> None:
    dense = report(result("none", 1, 100.0), result("etp_c10d", 1, 110.0))
    moe = report(result("none", 1, 250.0), result("ep", 1, 217.0), shape="qwen3-30b-a3b-6l")
    for name, written in (("ours", dense), ("moe-ours", moe)):
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
    summarise(tmp_path, jobs(["ours", "moe"]))
    dense_drawn, moe_drawn = ((tmp_path / f"{name}.svg").read_text() for name in ("plot", "plot-moe"))
    assert "<!-- Mixture of experts -->" in moe_drawn
    assert "qwen3" in moe_drawn
    assert "qwen3" not in dense_drawn
    assert "llama8b-8l" in dense_drawn
    table = (tmp_path / "table.md").read_text()
    assert table.index("llama8b-8l") < table.index("qwen3-30b-a3b-6l")
