"""Tables, JSON and plot of a sweep: what is predicted beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.sweep.configurations import ParallelConfiguration
from benchmarks.sweep.memory import Training
from benchmarks.sweep.model import Model
from benchmarks.sweep.runs import Outcome, Status
from benchmarks.sweep.step_time import Machine, Seconds, step_seconds, tokens_per_second
from benchmarks.train_shapes import GIB


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits.

    Attributes:
        parallel: its sizes.
        memory: bytes at a step's peak on the fullest rank, by purpose.
        seconds: predicted, of a step.
        command: the command line that trains so.
        outcome: of its run, if it was run.
    """

    parallel: ParallelConfiguration
    memory: Mapping[str, int]
    seconds: Seconds
    command: str
    outcome: Outcome | None = None

    @property
    def gib(self) -> float:
        """Predicted GiB at a step's peak."""
        return sum(self.memory.values()) / GIB

    def timed_on(self, machine: Machine, model: Model, training: Training) -> Candidate:
        """This candidate with its seconds predicted for ``machine``."""
        return replace(self, seconds=step_seconds(model, self.parallel, training, machine))


def predictions(candidates: Sequence[Candidate], model: Model, training: Training, title: str) -> Table:
    """The fastest configurations, as predicted."""
    table = Table(title=title)
    table.add_column("parallel", no_wrap=True)
    for column in ("GiB", "ms", "tokens/s/GPU", "compute"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in candidates:
        seconds = one.seconds.total()
        speed = tokens_per_second(model, one.parallel, training, seconds)
        table.add_row(
            str(one.parallel), _gib(one.gib), _ms(seconds), f"{speed:.0f}", f"{one.seconds.compute / seconds:.0%}"
        )
    return table


def comparison(candidates: Sequence[Candidate], model: Model, training: Training) -> Table:
    """What was run, predicted and measured, the fastest first."""
    table = Table(title="predicted / measured")
    table.add_column("parallel", no_wrap=True)
    for column in ("GiB", "error", "ms", "error", "tokens/s/GPU"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in sorted(candidates, key=_speed_order):
        outcome = one.outcome
        if outcome is None:
            continue
        predicted = one.seconds.total()
        gib = f"{_gib(one.gib)} / {'-' if outcome.gib is None else _gib(outcome.gib)}"
        gib_error = "" if outcome.gib is None else f"{one.gib / outcome.gib - 1:+.1%}"
        if outcome.seconds is None:
            table.add_row(str(one.parallel), gib, gib_error, f"{_ms(predicted)} / {outcome.status}", "", "")
            continue
        table.add_row(
            str(one.parallel),
            gib,
            gib_error,
            f"{_ms(predicted)} / {_ms(outcome.seconds)}",
            f"{predicted / outcome.seconds - 1:+.0%}",
            f"{tokens_per_second(model, one.parallel, training, outcome.seconds):.0f}",
        )
    return table


def say_failures(candidates: Sequence[Candidate], console: Console) -> None:
    """A line for each run that did not end well."""
    for one in candidates:
        if one.outcome is not None and one.outcome.status != Status.OK:
            console.print(f"{one.parallel}: {one.outcome.status}: {one.outcome.reason}", markup=False)


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest that ended well, if one has."""
    measured = [one for one in candidates if one.outcome is not None and one.outcome.status == Status.OK]
    return min(measured, key=_speed_order, default=None)


def as_json(candidates: Sequence[Candidate], machine: Machine, options: Mapping[str, Any]) -> dict[str, Any]:
    """All figures, for JSON."""
    return {
        "options": {name: str(value) for name, value in options.items()},
        "machine": asdict(machine),
        "configurations": [
            {
                "parallel": asdict(one.parallel),
                "predicted": {"seconds": asdict(one.seconds), "total_s": one.seconds.total(), "bytes": one.memory},
                "measured": None
                if one.outcome is None
                else {name: getattr(one.outcome, name) for name in ("status", "seconds", "gib", "reason", "device")},
                "command": one.command,
            }
            for one in candidates
        ],
    }


def plot_formats() -> list[str]:
    """Suffixes of the files that :func:`plot` can write, without dots."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def plot(candidates: Sequence[Candidate], model: Model, training: Training, file: Path) -> None:
    """Memory and speed of the configurations, predicted and measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [str(one.parallel) for one in candidates]
    gpus = candidates[0].parallel.gpus
    figure, (memory, speed) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 1.3 + 0.32 * len(names)), layout="constrained"
    )
    places = list(range(len(names)))
    left = Counter[str]()
    for purpose in dict.fromkeys(purpose for one in candidates for purpose in one.memory):
        widths = [one.memory.get(purpose, 0) / GIB for one in candidates]
        memory.barh(places, widths, left=[left[name] for name in names], label=purpose)
        left.update(dict(zip(names, widths, strict=True)))
    predicted = [tokens_per_second(model, one.parallel, training, one.seconds.total()) for one in candidates]
    speed.barh(places, predicted, color="lightgray", label="predicted")
    for place, one in enumerate(candidates):
        outcome = one.outcome
        if outcome is None or outcome.seconds is None:
            continue
        speed.plot(tokens_per_second(model, one.parallel, training, outcome.seconds), place, "o", color="tab:green")
        if outcome.gib is not None:
            memory.plot(outcome.gib, place, "ko")
    speed.plot([], [], "o", color="tab:green", label="measured")
    memory.plot([], [], "ko", label="measured")
    memory.set_yticks(places, names, fontsize=7)
    memory.invert_yaxis()
    memory.set(title=f"memory of parallel configurations of {gpus} GPUs", xlabel="GiB of a rank at a step's peak")
    speed.set(title="and their speed", xlabel="tokens/s of a GPU")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left", ncols=5, fontsize=7)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=7)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _speed_order(one: Candidate) -> float:
    measured = one.outcome.seconds if one.outcome is not None else None
    return float("inf") if measured is None else measured


def _gib(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.3f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"
