"""What a run of GRPO printed and logged is read, summed up and drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.grpo.report import PHASES, Reader, Step, plot, table

PUSH = "refit: version {} sent, 0.56 MB in 0.030 s (19 MB/s), served 0.020 s later"
ITERATION = (
    " [2026-11-25 02:03:23.9] iteration {:8d}/       3 | elapsed time per iteration (ms): 500.0 | "
    "learning rate: 1.000000E-03 | global batch size:   128 | grpo loss: -1.000000E-02 | reward: {:.6E} | "
    "kl engine: {:.6E} | kl reference: 2.500000E-02 | clipped: 0.000000E+00 | loss scale: 1.0 | grad norm: 0.9 |"
)


def entry(step: int, versions: list[list[int]], held_out: float | None) -> dict[str, Any]:
    samples = [{"engine": f"http://{at % 2}", "versions": found} for at, found in enumerate(versions)]
    return {"step": step, "held_out": held_out, "seconds": {"evaluate": 0.05, "sample": 0.2}, "samples": samples}


def read(folder: Path) -> list[Step]:
    log = folder / "log.jsonl"
    reader = Reader(log)
    found = [reader.line("something else"), reader.line(PUSH.format(0))]
    logged = [entry(0, [[0]] * 4, 0.1), entry(1, [[1], [1], [0], [0, 1]], None), entry(2, [[2]] * 4, 0.9)]
    for step, line in enumerate(logged):
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        found += [reader.line(PUSH.format(step + 1)), reader.line(ITERATION.format(step + 1, 0.25 * step, 1e-7))]
    return [step for step in found if step is not None]


def test_steps_are_read_from_what_is_printed_and_logged(tmp_path: Path) -> None:
    steps = read(tmp_path)
    assert [(step.number, step.reward, step.kl, step.held_out) for step in steps] == [
        (0, 0.0, 1e-7, 0.1),
        (1, 0.25, 1e-7, None),
        (2, 0.5, 1e-7, 0.9),
    ]
    assert steps[1].seconds == pytest.approx({"evaluate": 0.05, "sample": 0.2, "push": 0.05, "train": 0.2})
    assert steps[1].sources == Counter(
        {("http://0", (1,)): 1, ("http://1", (1,)): 1, ("http://0", (0,)): 1, ("http://1", (0, 1)): 1}
    )
    assert {step.kl_reference for step in steps} == {0.025}


def test_steps_that_are_logged_before_the_one_that_is_read_are_not_lost(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(entry(step, [[step]], None)) + "\n" for step in range(3)) + '{"step": 3, ')
    reader = Reader(log)
    found = [reader.line(ITERATION.format(step + 1, 0.5, 0.0)) for step in range(3)]
    assert [step.number for step in found if step is not None] == [0, 1, 2]


def test_table_sums_up(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    console.print(table(read(tmp_path), "title"))
    lines = [[cell.strip() for cell in line.split("\u2502")[1:3]] for line in console.export_text().splitlines()]
    found = {cells[0]: cells[1] for cells in lines if len(cells) == 2}
    assert found["reward, first step and last steps"] == "0.000 -> 0.250"
    assert found["accuracy on held-out prompts, first and last"] == "0.100 -> 0.900"
    assert found["samples written by the trainer's version"] == "83.3% of 12"
    assert found["samples written by the version before"] == "8.3% of 12"
    assert found["samples written by several versions"] == "8.3% of 12"
    assert found["seconds per step to push"] == "0.050, 10% of all"
    assert found["KL(trainer || reference), last"] == "2.5e-02"
    assert found["samples from http://0"] == "50.0%, versions 0 to 2"


def test_table_shows_which_versions_each_engine_served() -> None:
    console = Console(record=True, width=120)
    sources = [("http://0", number) for number in range(9)] + [("http://1", number) for number in (0, 1, 5, 7, 8)]
    steps = [
        Step(number, 0.5, 0.0, None, None, dict.fromkeys(PHASES, 0.1), Counter({(engine, (number,)): 4}))
        for engine, number in sources
    ]
    console.print(table(steps, "title"))
    text = console.export_text()
    assert "64.3%, versions 0 to 8 " in text
    assert "35.7%, versions 0 to 1, 5 to 5, 7 to 8 " in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "1.0e+00, 4.0e+00, 6.0e+00"),  # three, three and one
        ([0.5, 0.25], "5.0e-01, 2.5e-01"),
    ],
)
def test_table_shows_whether_the_kl_grows(values: list[float], shown: str) -> None:
    console = Console(record=True, width=120)
    seconds = dict.fromkeys(PHASES, 0.1)
    steps = [Step(number, 0.5, kl, None, None, seconds, Counter()) for number, kl in enumerate(values)]
    console.print(table(steps, "title"))
    (row,) = [line for line in console.export_text().splitlines() if "mean of each third" in line]
    assert row.split("\u2502")[2].strip() == shown


def test_plot_is_drawn(tmp_path: Path) -> None:
    steps = read(tmp_path)
    plot({"with": steps, "without": steps}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
