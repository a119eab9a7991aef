"""benchmarks/long_run.py finds what it looks for: losses that differ, memory that grows, variants that do not exist."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import long_run
from benchmarks.long_run import LongRuns
from benchmarks.long_run_ranks import Training, TrainingFailedError
from benchmarks.long_run_training import Step

CURVE = {step: 5.0 - 0.1 * step for step in range(12)}


def runs(tmp_path: Path) -> LongRuns:
    options = argparse.Namespace(ranks=2, steps=12, etp_size=2, arguments="", graph_arguments="--g", variants=["c10d"])
    return LongRuns(options, tmp_path, [])


def recorded(tmp_path: Path, *ranks: list[Step]) -> Training:
    training = Training("one", tmp_path, len(ranks), [])
    for rank, steps in enumerate(ranks):
        lines = "".join(json.dumps(asdict(step)) + "\n" for step in steps)
        (training.folder / f"rank{rank}.jsonl").write_text(lines)
    return training


def steps(loss: float | None, *, allocated_each: int = 0, symmetric_at_the_end: int = 0) -> list[Step]:
    return [
        Step(step, loss, 1.0, 0.0, 1000 + allocated_each * step, 0, 0, symmetric_at_the_end if step == 11 else 0, 0)
        for step in range(12)
    ]


@pytest.mark.parametrize(
    ("found", "good", "said"),
    [
        (CURVE, True, "12 losses, 0 differ"),
        ({step: CURVE[step] for step in (9, 10, 11)}, True, "3 losses, 0 differ"),
        ({**CURVE, 7: CURVE[7] + 1e-7, 9: 3.0}, False, "2 differ, by at most 1.10e+00; bound 0; first at step 7"),
        ({}, False, "are not among"),
        ({30: 1.0}, False, "are not among"),
    ],
)
def test_losses_must_be_the_very_same(tmp_path: Path, found: dict[int, float], good: bool, said: str) -> None:
    subject = runs(tmp_path)
    subject.judge_same("a against b", found, CURVE)
    (verdict,) = subject.verdicts
    assert verdict.good is good
    assert said in verdict.found


@pytest.mark.parametrize(
    ("second", "good", "said"),
    [
        (steps(1.0), True, "allocated +0 B"),
        (steps(1.0, allocated_each=8192), True, "allocated +65536 B"),
        (steps(1.0, allocated_each=9000), False, "allocated +72000 B"),
        (steps(1.0, symmetric_at_the_end=512), False, "symmetric +512 B"),
    ],
)
def test_growing_memory_of_any_rank_is_found(tmp_path: Path, second: list[Step], good: bool, said: str) -> None:
    subject = runs(tmp_path)
    subject.judge_memory("c10d", recorded(tmp_path, steps(1.0), second))
    (verdict,) = subject.verdicts
    assert verdict.good is good
    assert verdict.what == "c10d: memory, step 3 to 11"
    assert said in verdict.found


def test_losses_come_from_the_ranks_that_know_them(tmp_path: Path) -> None:
    assert recorded(tmp_path / "a", steps(None), steps(2.0)).losses() == dict.fromkeys(range(12), 2.0)
    with pytest.raises(TrainingFailedError, match="one: rank 1 has another loss at step 0"):
        recorded(tmp_path / "b", steps(2.0), steps(2.5)).losses()
    with pytest.raises(TrainingFailedError, match="no rank recorded a loss"):
        recorded(tmp_path / "c", steps(None)).losses()


def test_variants_become_megatrons_arguments(tmp_path: Path) -> None:
    subject = runs(tmp_path)
    assert "--etp-size" not in subject.arguments("stock")
    plain = subject.arguments("c10d")
    assert plain[plain.index("--etp-transport") + 1] == "c10d"
    assert "--overlap-param-gather" in plain
    assert "--te-rng-tracker" not in plain
    subject.options.variants = ["c10d", "copy_engine+full_iteration"]
    graphed = subject.arguments("copy_engine+full_iteration")
    assert graphed[graphed.index("--etp-transport") + 1] == "copy_engine"
    assert graphed[graphed.index("--cuda-graph-impl") + 1] == "full_iteration"
    assert "--g" in graphed
    assert "--overlap-param-gather" not in graphed
    assert "--te-rng-tracker" in graphed
    assert "--te-rng-tracker" in subject.arguments("c10d")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--variants stock c10d --kill copy_engine", "--kill copy_engine: not among the variants with shards, c10d"),
        ("--steps 9", "--steps is 9; at least 10 are needed"),
    ],
)
def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    with pytest.raises(SystemExit):
        long_run.main(arguments.split())
    assert said in capsys.readouterr().err
