"""Reads the results of a GRPO run from its output, and shows them as a table and a plot."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_FIELD = re.compile(r"\| ([\w ()]+): (\S+)")
_PUSH = re.compile(r"refit: version (\d+) sent, \S+ MB in (\S+) s .*served (\S+) s later")
PHASES = ("sample", "evaluate", "train", "push")
LAST = 5  # the final reward is the mean of this many steps


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        number: from 0; the number of steps that the trainer's weights had been trained for.
        reward: mean over its samples.
        kl: estimate of KL(engine || trainer) before the step, in nats per token.
        kl_reference: estimate of KL(trainer || reference), in nats per token; None without a reference.
        held_out: accuracy on held-out prompts; None if it was not measured.
        seconds: time per phase.
        sources: number of samples per engine and versions; there are several if weights changed during generation.
    """

    number: int
    reward: float
    kl: float
    kl_reference: float | None
    held_out: float | None
    seconds: dict[str, float]
    sources: Counter[tuple[str, tuple[int, ...]]]


class Reader:
    """Parses steps from the output and the log of a training run.

    Args:
        log: the file of ``--grpo-log``.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, 0
        self._pushes: dict[int, float] = {}
        self._logged: dict[int, Any] = {}  # by step: output may be read late, when the next step is already logged

    def line(self, line: str) -> Step | None:
        """The step that a printed line completes; None if it completes none."""
        if push := _PUSH.search(line):
            self._pushes[int(push[1])] = float(push[2]) + float(push[3])
        if not (iteration := _ITERATION.search(line)):
            return None
        number = int(iteration[1]) - 1
        fields = dict(_FIELD.findall(line))
        self._logged.update((entry["step"], entry) for entry in self._new_entries())
        logged = self._logged.pop(number)
        seconds = {**logged["seconds"], "push": self._pushes.get(number + 1, 0.0)}
        seconds["train"] = float(fields["elapsed time per iteration (ms)"]) / 1000 - sum(seconds.values())
        return Step(
            number=number,
            reward=float(fields["reward"]),
            kl=float(fields["kl engine"]),
            kl_reference=float(fields["kl reference"]) if "kl reference" in fields else None,
            held_out=logged["held_out"],
            seconds=seconds,
            sources=Counter((sample["engine"], tuple(sample["versions"])) for sample in logged["samples"]),
        )

    def _new_entries(self) -> Iterator[dict[str, Any]]:
        text = self._log.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may not be complete yet
        yield from map(json.loads, lines[self._read :])
        self._read = len(lines)


def reward_at_end(steps: Sequence[Step]) -> float:
    """Mean reward of the last steps."""
    return fmean(step.reward for step in steps[-LAST:])


def table(steps: Sequence[Step], title: str) -> Table:
    """The results of one run as a table."""
    found = Table(title=title, show_header=False)
    found.add_row("reward, first step and last steps", f"{steps[0].reward:.3f} -> {reward_at_end(steps):.3f}")
    accuracy = [step.held_out for step in steps if step.held_out is not None]
    if accuracy:
        found.add_row("accuracy on held-out prompts, first and last", f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    kl = [step.kl for step in steps]
    found.add_row("KL(engine || trainer), median, largest, last", f"{median(kl):.1e}, {max(kl):.1e}, {kl[-1]:.1e}")
    found.add_row("KL(engine || trainer), mean of each third", ", ".join(f"{fmean(part):.1e}" for part in _thirds(kl)))
    if steps[-1].kl_reference is not None:
        found.add_row("KL(trainer || reference), last", f"{steps[-1].kl_reference:.1e}")
    lags, engines = Counter[str](), dict[str, Counter[int]]()
    for step in steps:
        for (engine, versions), number in step.sources.items():
            lags[_lag(step.number, versions)] += number
            engines.setdefault(engine, Counter())[versions[0]] += number
    total = sum(lags.values())
    for lag, number in sorted(lags.items()):
        found.add_row(f"samples written by {lag}", f"{number / total:.1%} of {total}")
    for engine, numbers in sorted(engines.items()) if len(engines) > 1 else ():
        found.add_row(f"samples from {engine}", f"{numbers.total() / total:.1%}, versions {_ranges(sorted(numbers))}")
    seconds = sum(sum(step.seconds.values()) for step in steps)
    for phase in PHASES:
        spent = sum(step.seconds[phase] for step in steps)
        found.add_row(f"seconds per step to {phase}", f"{spent / len(steps):.3f}, {spent / seconds:.0%} of all")
    return found


def _thirds(values: Sequence[float]) -> list[Sequence[float]]:
    """Values of the beginning, the middle and the end of a run, in this order; fewer if there are fewer values."""
    size = -(-len(values) // 3)
    return [values[at : at + size] for at in range(0, len(values), size)]


def _lag(step: int, versions: Sequence[int]) -> str:
    if len(set(versions)) > 1:
        return "several versions"
    behind = step - versions[0]
    return {0: "the trainer's version", 1: "the version before"}.get(behind, "older versions")


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: ``0 to 6, 31 to 60``."""
    starts = [at for at in range(len(numbers)) if at == 0 or numbers[at] > numbers[at - 1] + 1]
    ends = [at - 1 for at in [*starts[1:], len(numbers)]]
    return ", ".join(f"{numbers[start]} to {numbers[end]}" for start, end in zip(starts, ends, strict=True))


def plot(runs: Mapping[str, Sequence[Step]], file: Path) -> None:
    """Plot reward, accuracy and KL of each run by step, and the first run's time per phase."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rewards, kl, seconds) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, steps in runs.items():
        numbers = [step.number for step in steps]
        (line,) = rewards.plot(numbers, [step.reward for step in steps], label=f"{name}: reward")
        measured = [(step.number, step.held_out) for step in steps if step.held_out is not None]
        if measured:
            rewards.plot(*zip(*measured, strict=True), "o--", color=line.get_color(), label=f"{name}: held out", ms=4)
        kl.plot(numbers, [step.kl for step in steps], label=f"{name}: at most {max(step.kl for step in steps):.1e}")
    rewards.set(title="reward and held-out accuracy", xlabel="step", ylim=(0, 1.02))
    kl.set(title="KL(engine || trainer)", xlabel="step", ylabel="nats per token")
    steps = next(iter(runs.values()))
    by_phase = [[step.seconds[phase] for step in steps] for phase in PHASES]
    seconds.stackplot([step.number for step in steps], by_phase, labels=PHASES)
    seconds.set(title=f"seconds per step ({next(iter(runs))})", xlabel="step")
    for axes in (rewards, kl, seconds):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)  # hides no line
    figure.savefig(file, dpi=100)
    plt.close(figure)
