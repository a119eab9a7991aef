"""``benchmarks.refit_meshes``: what it concludes from a push, and that its table is what was found."""

from __future__ import annotations

import io
import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks import refit_meshes
from benchmarks.refit_meshes import Row, engine_arguments, load, main, row, table
from benchmarks.refit_vllm_trainer import Outcome
from benchmarks.vllm_server import ServerError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.simulation.cluster import engine_mesh

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "agreement.md"
REPORT = ROOT / "docs" / "performance" / "refit-meshes-cpu.json"
REPORT_OF_GPUS = ROOT / "docs" / "performance" / "refit-meshes-h200x2.json"


@pytest.mark.parametrize(
    ("kl", "other", "failure", "verdict"),
    [
        (1e-4, 0.5, "", "agrees"),
        (0.02, 0.5, "", "differs"),  # too far apart
        (1e-3, 2e-3, "", "differs"),  # weights of another version would look the same
        (math.nan, 0.5, "", "differs"),
        (1e-4, 0.5, "the worker left", "the worker left"),
    ],
)
def test_two_sides_agree_if_they_differ_little_and_other_weights_much(
    kl: float, other: float, failure: str, verdict: str
) -> None:
    found = Outcome("shm", failure, seconds={"push": [2.0]}, kl=kl, largest_error=0.25, untouched_kl=other)
    options = Namespace(model="tiny", weight_format=WeightFormat.TRAINED, most_kl=1e-2)
    one = row(options, "tp=2", "tp=1", found)
    assert (one.verdict, one.seconds, one.largest) == (verdict, 2.0, 0.25)


def test_an_engine_is_started_as_its_mesh_says() -> None:
    found = engine_arguments(engine_mesh("tp=2,dp=2,ep=4"), on_gpu=True)
    sizes = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "1", "--data-parallel-size", "2"]
    assert found[:7] == [*sizes, "--enable-expert-parallel"]
    assert "--gpu-memory-utilization" in found
    assert "--gpu-memory-utilization" not in engine_arguments(engine_mesh("tp=2"), on_gpu=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "pigeon=2", "--to", "tp=1"], "'pigeon=2' is not an axis and its size"),
        (["--from", "tp=2", "--to", "tp=2,ep=3"], "ep is 3"),
        (["--from", "pp=2,vpp=2", "--to", "tp=1"], "vpp is not covered here"),
        (["--from", "tp=2"], "--from and --to go together"),
        (["--model", "pigeon", "--from", "tp=2", "--to", "tp=1"], "cannot read pigeon"),
        (["--weight-format", "pigeon", "--from", "tp=2", "--to", "tp=1"], "invalid WeightFormat value: 'pigeon'"),
    ],
)
def test_mistakes_are_told_first(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--device", "cpu"])
    said = capsys.readouterr()
    assert message in said.err
    assert (stopped.value.code, said.out) == (2, "")


def test_rows_that_are_known_are_shown_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "meshes.json"
    known = Row("tiny", "tp=2", "tp=1", 0.5, 2e-4, 0.125, 3.0, "agrees")
    file.write_bytes(msgspec.json.encode({"rows": [known]}))
    arguments = ["--device", "cpu", "--from", "tp=2", "--to", "tp=1", "--json", str(file)]
    assert main(arguments) == 0
    assert load(file) == [known]
    assert "agrees" in capsys.readouterr().out


def test_what_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "meshes.json"
    failed = Row("tiny", "tp=2", "tp=1", math.nan, math.nan, math.nan, math.nan, "the worker left")
    file.write_bytes(msgspec.json.encode({"rows": [failed]}))
    pushed = Row("tiny", "tp=2", "tp=1", 0.5, 2e-4, 0.125, 3.0, "agrees")
    monkeypatch.setattr(refit_meshes, "_pushes", lambda *_: iter([pushed]))
    assert main(["--device", "cpu", "--from", "tp=2", "--to", "tp=1", "--json", str(file)]) == 0
    assert load(file) == [pushed]


def test_no_trainer_is_left_out_where_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def push(options: Namespace, written: object, server: object, trainer: str, *_: object) -> Outcome:
        if trainer == "etp=2":
            raise ServerError("vLLM ended")
        return Outcome("", seconds={"push": [0.5]}, kl=2e-4, largest_error=0.125, untouched_kl=3.0)

    monkeypatch.setattr(refit_meshes, "serve", lambda *_: nullcontext())
    monkeypatch.setattr(refit_meshes, "_push", push)
    file = tmp_path / "meshes.json"
    arguments = ["--device", "cpu", "--from", "tp=2", "etp=2", "pp=2", "--to", "tp=1", "--json", str(file)]
    assert main(arguments) == 1
    verdicts = [(one.trainer, one.verdict) for one in load(file)]
    assert verdicts == [("tp=2", "agrees"), ("etp=2", "vLLM ended"), ("pp=2", "vLLM ended")]


def test_a_format_is_pushed_though_another_one_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "meshes.json"
    known = Row("tiny", "tp=2", "tp=1", 0.5, 2e-4, 0.125, 3.0, "agrees")
    fields = msgspec.to_builtins(known)
    del fields["weights"]  # as files had it before formats were told apart
    file.write_bytes(msgspec.json.encode({"rows": [fields]}))
    pushed = replace(known, kl=0.02, weights=WeightFormat.FP8_BLOCK)
    missing = []

    def push(options: Namespace, written: object, server: object, trainer: str, *_: object) -> Outcome:
        missing.append((options.weight_format, trainer))
        config = msgspec.json.decode((tmp_path / "model" / "config.json").read_bytes())
        assert config == written
        assert config["quantization_config"]["weight_block_size"] == [128, 128]
        return Outcome("", seconds={"push": [0.5]}, kl=0.02, largest_error=0.125, untouched_kl=3.0)

    monkeypatch.setattr("tempfile.TemporaryDirectory", lambda: nullcontext(str(tmp_path)))
    monkeypatch.setattr(refit_meshes, "serve", lambda *_: nullcontext())
    monkeypatch.setattr(refit_meshes, "_push", push)
    arguments = ["--device", "cpu", "--from", "tp=2", "--to", "tp=1", "--json", str(file)]
    assert main([*arguments, "--weight-format", "fp8_block", "--most-kl", "0.03"]) == 0
    assert main([*arguments, "--weight-format", "trained"]) == 0
    assert missing == [("fp8_block", "tp=2")]
    assert load(file) == [known, pushed]
    printed = io.StringIO()
    Console(file=printed, width=200).print(table(load(file)))
    assert [line.split("|")[1].strip() for line in printed.getvalue().splitlines()[3:5]] == ["tiny", "tiny fp8_block"]


@pytest.mark.parametrize(("report", "model", "least"), [(REPORT, "tiny", 12), (REPORT_OF_GPUS, "qwen3-8b", 2)])
def test_page_shows_the_table_of_the_report(report: Path, model: str, least: int) -> None:
    rows = load(report)
    assert len(rows) >= least
    assert {one.verdict for one in rows} == {"agrees"}
    printed = io.StringIO()
    Console(file=printed, width=200).print(table(rows))
    table_of_page = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {model}")]
    printed_rows = [line.strip() for line in printed.getvalue().splitlines() if line.startswith(f"| {model}")]
    assert table_of_page == printed_rows


@pytest.mark.parametrize(("report", "name"), [(REPORT, "cpu"), (REPORT_OF_GPUS, "gpus")])
def test_one_command_makes_the_report(report: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"`--table {name}" in PAGE.read_text() or f"refit_meshes --table {name} " in PAGE.read_text()
    asked = []

    def pushes(options: Namespace, engine: str, *_: object) -> Iterator[Row]:
        for trainer in options.trainers:
            asked.append((options.model, trainer, engine, options.device))
            yield Row(options.model, trainer, engine, 0.5, 2e-4, 0.125, 3.0, "agrees")

    monkeypatch.setattr(refit_meshes, "_pushes", pushes)
    monkeypatch.setattr(refit_meshes, "require_gpus", lambda *_: None)
    assert main(["--table", name, "--json", str(tmp_path / "meshes.json")]) == 0
    device = "cpu" if name == "cpu" else "cuda"
    assert asked == [(one.model, one.trainer, one.engine, device) for one in load(report)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--table", "cpu", "--to", "tp=1"], "give either --table, or --from and --to"),
        ([], "give either --table, or --from and --to"),
    ],
)
def test_a_table_and_meshes_are_not_mixed(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err
