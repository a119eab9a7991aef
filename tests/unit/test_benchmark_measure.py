"""How often the training benchmark measures: as often as its time allows, slow systems in fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import train_measure
from benchmarks.train_measure import Result, Run, RunOptions
from benchmarks.train_timing import steps_within


class Pretended(Run):
    """A run whose work takes no time but on its own clock: so many seconds a measurement and a trace."""

    def __init__(self, options: RunOptions, *, timing: float = 1.0, tracing: float = 0.5) -> None:
        super().__init__(options)
        self.clock = 0.0
        self.took = {"timing": timing, "tracing": tracing, "building": 0.0}
        self.done: list[str] = []

    def _try(self, name: str, doing: str, work: Callable[[], None]) -> None:
        del work
        self.clock += self.took[doing.split(maxsplit=1)[0]]
        self.done.append(f"{name} {doing}")
        if doing == "building":
            for microbatches in self.options.microbatches:
                self.results[name, microbatches] = Result(name, microbatches)

    def _spent(self) -> float:
        return self.clock / self.options.seconds

    def _note(self, doing: str) -> None:
        pass

    def report(self) -> dict[str, Any]:
        return {}

    def count(self, what: str) -> int:
        return sum(what in done for done in self.done)


def _run(seconds: float, monkeypatch: pytest.MonkeyPatch, **took: float) -> Pretended:
    monkeypatch.setattr(train_measure, "_allocate_workspaces", lambda: None)
    run = Pretended(RunOptions(systems=("none", "tp"), shape="test", seconds=seconds), **took)
    run.measure()
    return run


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    # A round takes 4 s: the second would end after 8, the third after 12, and 90 % of the time are for rounds.
    [(math.inf, 3), (14.0, 3), (13.0, 2), (9.0, 2), (8.0, 1), (1.0, 1)],
)
def test_a_round_begins_if_it_would_end_in_time(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(seconds, monkeypatch)
    assert run.count("tp timing x1") == run.count("none timing x4") == rounds


def test_only_the_fewest_microbatches_are_traced_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(math.inf, monkeypatch)
    assert [done for done in run.done if "tracing" in done] == ["none tracing x1", "tp tracing x1"]
    assert _run(4.2, monkeypatch).count("tracing") == 1
    assert _run(1.0, monkeypatch).count("tracing") == 0


class FailsWhileBuilding(Pretended):
    """On this rank after one microbatch was prepared; on others maybe before."""

    def _try(self, name: str, doing: str, work: Callable[[], None]) -> None:
        super()._try(name, doing, work)
        if name == "tp" and doing == "building":
            del self.results["tp", 4]
            self.failures["tp"] = "rank 1, building: out of memory"


def test_what_was_not_built_on_all_ranks_is_measured_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks draw lots about must be the same everywhere."""
    monkeypatch.setattr(train_measure, "_allocate_workspaces", lambda: None)
    run = FailsWhileBuilding(RunOptions(systems=("none", "tp"), shape="test"))
    run.measure()
    assert run.count("none timing") == 6
    assert run.count("tp timing") == run.count("tp tracing") == 0


@pytest.mark.parametrize(
    ("longest", "steps", "seconds", "expected"),
    [
        (1.0, 5, 0.1, 5),
        (1.0, 5, 0.3, 3),
        (1.0, 5, 0.4, 2),
        (1.0, 5, 7.0, 2),
        (1.0, 1, 7.0, 1),
        (0.5, 20, 0.004, 20),
        (math.inf, 5, 7.0, 5),
        (1.0, 5, 0.0, 5),
    ],
)
def test_slow_steps_are_averaged_over_fewer(longest: float, steps: int, seconds: float, expected: int) -> None:
    assert steps_within(longest, steps, seconds) == expected
