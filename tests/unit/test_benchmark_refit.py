"""The refit benchmark, small and on the CPU: every way arrives whole and is measured."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import refit_vllm_adapters
from benchmarks.refit import main
from benchmarks.refit_ranks import Outcome
from benchmarks.refit_report import main as report
from benchmarks.refit_vllm import main as main_vllm
from tests.unit.test_performance_documents import REFIT

RECEIVED = 1_707_008
"""Bytes of the first worker of TP 2 of the tiny model: norms, half of each matrix, and 512 of the 1000 tokens' rows."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_way_is_measured_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    command = ["--model", "tiny", "--device", "cpu", "--repeats", "2", "--transports", "shm", "tcp"]
    assert main([*command, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["outcomes"]
    assert [item["way"] for item in found] == ["gather+broadcast", "shm", "tcp"]
    for item in found:
        assert {len(values) for values in item["seconds"].values()} == {2}
        assert item["gb_per_s"] > 0 < item["share_of_link"]
        assert item["gb_per_s"] * statistics.median(item["seconds"]["move"]) == pytest.approx(RECEIVED / 1e9)
    assert all(item["plan_s"] > 0 < item["worker_bytes"] for item in found[1:])
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_block_fp8_is_measured_and_checked(tmp_path: Path, model: str) -> None:
    file = tmp_path / "found.json"
    command = ["--model", model, "--device", "cpu", "--repeats", "1", "--transports", "tcp"]
    assert main([*command, "--weight-format", "fp8_block", "--to", "tp=1", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["outcomes"]
    assert found["way"] == "tcp"
    assert found["gb_per_s"] > 0


@pytest.mark.slow
def test_a_way_that_fails_says_why_and_the_next_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", "tiny", "--device", "cpu", "--repeats", "1", "--transports", "cuda_ipc", "tcp"]
    assert main(command) == 1
    rows = capsys.readouterr().out.splitlines()
    assert "cuda_ipc moves memory of GPUs and this party's storages are on cpu" in rows[2]
    assert rows[3].startswith("tcp ")
    assert "failed" not in rows[3]


def test_reports_become_a_table_and_a_plot(tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "docs" / "performance"
    links = [str(kept / f"{name}.json") for name in REFIT if "vllm" not in name]
    servers = [str(kept / f"{name}.json") for name in REFIT if "vllm" in name]
    found, drawn = tmp_path / "table.md", tmp_path / "plot.svg"
    assert report(["--links", *links, "--servers", *servers, "--table", str(found), "--plot", str(drawn)]) == 0
    assert found.read_text() == (kept / "refit.md").read_text()
    assert "milliseconds of a push" in drawn.read_text() or drawn.stat().st_size > 5000


def test_a_way_that_failed_is_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model": "tiny", "trainer": "etp=2", "engine": "tp=2"}
    found = asdict(Outcome("tcp", seconds={"push": [0.5], "move": [0.4]}, gb_per_s=1.0))
    failed = asdict(Outcome("nixl", failure="no link to rank 3:\nrefused"))
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"options": options, "outcomes": [found, failed]}))
    assert report(["--links", str(file)]) == 0
    assert capsys.readouterr().out.endswith("\nFailed:\n\n- tiny, etp=2 to tp=2: nixl: no link to rank 3: refused\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "etp=2"], "names 1 GPUs; --from has 2 ranks"),
        (["--ways", "checkpoint_engine"], "the same where it shares them"),
        (["--device", "cpu"], "nccl needs GPUs"),
        (["--weight-format", "fp8_block"], "nccl sends weights as they are trained, not in fp8_block"),
    ],
)
def test_a_server_benchmark_that_cannot_run_says_so_before_it_starts_one(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main_vllm(arguments)


class _Served:
    """What a publisher's handle gives, at once."""

    nbytes, reason = 1, None

    @property
    def engines(self) -> dict[str, _Served]:
        return {"engine": self}

    def result(self, _timeout_s: float) -> _Served:
        return self

    def publish(self, _version: int) -> _Served:
        return self


@pytest.mark.parametrize(("way", "parts"), [("merged", {"push", "send", "merge"}), ("adapter", {"push", "send"})])
def test_only_a_merge_is_a_part_of_a_push(way: str, parts: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = object.__new__(refit_vllm_adapters.AdapterTrainer)
    trainer._factors, trainer._version = [], 1
    trainer._task = SimpleNamespace(timeout_s=1.0, gpus=())
    monkeypatch.setattr(trainer, "_put_together", lambda *, merged: time.sleep(0.2))  # noqa: ARG005 - as it is called
    seconds = trainer._push(_Served(), Outcome(way), way)
    assert seconds.keys() == parts
    assert (seconds["push"] >= 0.2) == (way == "merged")
    assert seconds["push"] - seconds["send"] == pytest.approx(seconds.get("merge", 0.0), abs=0.05)
