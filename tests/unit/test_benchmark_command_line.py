"""Benchmarks tell a mistake of their command line before they start any work."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_benchmark_report import report

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ON_CPU = ("--model", "tiny", "--device", "cpu")


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        ("train_step", ["--systems", "none,pigeon"], "--systems pigeon: there is no such system"),
        ("train_step", ["--systems", "none,upstream_gtp,etp_c10d"], "needs an unpatched Megatron"),
        ("train_step", ["--rounds", "0"], "--rounds: 0 is not above 0"),
        ("train_step", ["--warm-up", "-1"], "--warm-up: -1 is below 0"),
        ("train_step", ["--prefetch-depth", "-1"], "--prefetch-depth: -1 is below 0"),
        ("train_step", ["--longest", "nan"], "--longest: nan is not above 0"),
        ("train_step", ["--merge", "/nonexistent.json"], "/nonexistent.json is not a file"),
        ("train_step", ["--shape", "small", "--experts", "4"], "small has no experts"),
        ("run_all", ["--jobs", "ours,pigeon"], "--jobs pigeon: there is no such job"),
        ("run_all", ["--systems", "none,pigeon"], "--systems pigeon: there is no such system"),
        ("run_all", ["--seconds", "-1"], "--seconds: -1 is not above 0"),
        ("run_all", ["--out", f"{__file__}/bench-out"], f"--out: {__file__} is a file; name another folder"),
        ("refit", [*ON_CPU, "--from", "pigeon=2"], "'pigeon=2' is not an axis and its size"),
        ("refit", [*ON_CPU, "--to", "tp=2,ep=3"], "ep is 3"),
        ("refit", [*ON_CPU, "--transports", "pigeon"], "invalid choice: 'pigeon'"),
        ("refit", [*ON_CPU, "--repeats", "0"], "--repeats: 0 is not above 0"),
        ("refit", ["--model", "pigeon", "--device", "cpu"], "cannot read pigeon"),
        ("refit_vllm", ["--model", "pigeon", "--device", "cpu"], "cannot read pigeon"),
        ("refit_vllm", [*ON_CPU, "--ways", "pigeon"], "'pigeon' is not a valid TransportName"),
        ("refit_vllm", [*ON_CPU, "--from", "pigeon=2"], "'pigeon=2' is not an axis and its size"),
        ("refit_report", [], "name reports"),
        ("refit_report", ["--links", "/nonexistent.json"], "/nonexistent.json is not a file"),
        ("long_run", ["--variants", "stock", "pigeon"], "--variants pigeon: give stock or a transport"),
        ("long_run", ["--variants", "c10d+pigeon"], "--variants c10d+pigeon: give stock"),
        ("long_run", ["--etp-size", "3"], "--etp-size 3 does not divide --ranks 2"),
        ("traffic", ["--microbatches", "0"], "--microbatches is 0; it must be at least 1"),
        ("traffic", ["--ranks", "1"], "1 rank has all shards, so nothing moves; start at least 2"),
        ("overlap", ["--repeats", "2"], "at least 3"),
        ("trace_kinds", ["/nonexistent.json", "--passes", "2"], "/nonexistent.json is not a file"),
        ("host_work", ["--repeats", "0"], "--repeats: 0 is not above 0"),
        pytest.param("train_step", [], "this measures GPUs, and there is none", marks=NO_GPU),
        pytest.param("traffic_cost", [], "this measures GPUs, and there is none", marks=NO_GPU),
        ("signals", ["--trips", "0"], "--trips: 0 is not above 0"),
        pytest.param("signals", [], "this measures GPUs, and there is none", marks=NO_GPU),
        pytest.param("overlap", [], "this measures GPUs, and there is none", marks=NO_GPU),
        pytest.param("refit_parts", [], "this measures GPUs, and there is none", marks=NO_GPU),
        pytest.param("refit", [], "this measures GPUs, and there is none", marks=NO_GPU),
    ],
)
def test_mistakes_are_told_first(
    benchmark: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{benchmark}").main(arguments)
    said = capsys.readouterr()
    assert message in said.err
    assert (stopped.value.code, said.out) == (2, "")


@pytest.mark.parametrize(
    "benchmark",
    [
        "long_run",
        "refit",
        "refit_delta",
        "refit_meshes",
        "refit_plan",
        "refit_vllm",
        "train_step",
        "traffic",
        "traffic_cost",
    ],
)
@pytest.mark.parametrize("file", ["/", "/nonexistent/found.json"])
def test_a_report_that_cannot_be_written_is_told_first(
    benchmark: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{benchmark}").main(["--json", file])
    assert stopped.value.code == 2
    assert (
        f"argument --json: {file} cannot be written: name a file in a folder that is there" in capsys.readouterr().err
    )


@NO_GPU
def test_a_server_is_not_started_where_it_has_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="this measures GPUs, and there is none"):
        importlib.import_module("benchmarks.refit_vllm").main(["--folder", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_training_benchmarks_ask_for_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for benchmark in ("train_step", "traffic_cost", "overlap"):
        with pytest.raises(SystemExit):
            importlib.import_module(f"benchmarks.{benchmark}").main([])
        assert f"torchrun --nproc-per-node 4 -m benchmarks.{benchmark}" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["copies", "runs", "pitched"])
def test_parts_between_gpus_need_two(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("benchmarks.refit_parts").main(["--only", part])
    assert stopped.value.code == 2
    assert "this needs 2 GPUs, and there are 1" in capsys.readouterr().err


def test_a_training_benchmark_that_measured_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = report(failures={"none": "rank 0, building: out of memory"})
    (tmp_path / "failed.json").write_text(json.dumps(failed))
    with pytest.raises(SystemExit, match="no system was measured; the table says why"):
        importlib.import_module("benchmarks.train_step").main(["--merge", str(tmp_path / "failed.json")])
    assert "out of memory" in capsys.readouterr().out
