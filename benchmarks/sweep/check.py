"""Compares the memory and time models with measurements of ``benchmarks.train_step``.

::

    python -m benchmarks.sweep.check docs/performance/h200x2-etp.json docs/performance/h200x4-etp.json

The time model is calibrated on one step of each report: of "none" with one microbatch, or else of the first system.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import existing_file
from benchmarks.sweep.configurations import ParallelConfiguration
from benchmarks.sweep.memory import Training, needed, resident
from benchmarks.sweep.model import Model
from benchmarks.sweep.step_time import Machine, calibrated, step_seconds
from benchmarks.train_shapes import GIB, Shape, expert_parallel, shards

# Systems that the models describe: Megatron's own parallelism and ETP, without CUDA graphs.
_SYSTEMS = ("none", "dp", "tp", "ep", "etp_c10d", "etp_copy_engine", "etp_c10d_ep2", "etp_copy_engine_ep2")


@dataclass(frozen=True)
class Row:
    """A measurement, and what the models are asked about it.

    Attributes:
        report: name of the file.
        system: of :data:`benchmarks.train_shapes.SYSTEMS`.
        microbatches: of a step, on a GPU.
        model: the model.
        parallel: what the system is.
        training: forward and backward, without optimizer, with gradients in bf16.
        held_gib: measured between two steps, symmetric memory included.
        peak_gib: measured within a step, symmetric memory included.
        seconds: measured, of a step; None if it was not timed.
    """

    report: str
    system: str
    microbatches: int
    model: Model
    parallel: ParallelConfiguration
    training: Training
    held_gib: float
    peak_gib: float
    seconds: float | None

    def predicted_gib(self) -> tuple[float, float]:
        """Predicted GiB between two steps, and within one."""
        held = resident(self.model, self.parallel, 0, self.training)
        peak = needed(self.model, self.parallel, self.training)
        return sum(held.values()) / GIB, sum(peak.values()) / GIB

    def predicted_s(self, machine: Machine) -> float:
        """Predicted seconds of a step."""
        return step_seconds(self.model, self.parallel, self.training, machine).total()


def rows(paths: Iterable[Path]) -> Iterator[Row]:
    """The measurements of reports that the models describe."""
    for path in paths:
        content = json.loads(path.read_text())
        for result in content["results"]:
            # Older reports lack a figure, and a system that failed has none.
            if result["system"] in _SYSTEMS and result.get("allocated_gib") and "other_gib" in result:
                yield _row(path.stem, content, result)


def time_error(base: Row, row: Row) -> float:
    """Relative error of a predicted step, calibrated on another one; both must have been timed."""
    if base.seconds is None or row.seconds is None:
        raise ValueError(f"{base.system} or {row.system} of {row.report} was not timed")
    machine = calibrated(Machine(), base.predicted_s, base.seconds)
    return row.predicted_s(machine) / row.seconds - 1


def _row(report: str, content: dict[str, Any], result: dict[str, Any]) -> Row:
    system, gpus, shape = result["system"], content["gpus"], Shape(**content["shape"])
    cut = shards(system, gpus)
    etp = cut if system.startswith("etp") else 1
    parallel = ParallelConfiguration(
        gpus=1 if system == "none" else gpus,
        tp=cut if system == "tp" else 1,
        ep=expert_parallel(system, gpus),
        etp=etp,
        expert_etp=etp if shape.experts else 1,
    )
    training = Training(
        # All GPUs of a tensor-parallel group work on a microbatch, and a step has as many more.
        result["microbatches"] * parallel.gpus,
        grad_bytes=2,
        optimizer=False,
        precision=content["options"].get("precision") or "bf16",
        transport="c10d" if "c10d" in system else "copy_engine",
        prefetch_depth=int(content["options"].get("prefetch_depth", 1)),
    )
    model = Model(shape, tied=False, qkv_bias=False, qk_norm=shape.experts > 0, flags=())
    other, median = sum(result["other_gib"].values()), result["median"]
    return Row(
        report,
        system,
        result["microbatches"],
        model,
        parallel,
        training,
        result["allocated_gib"] + other,
        result["peak_gib"] + other,
        median and median / 1000,
    )


def _table(title: str, found: Sequence[Row]) -> Table:
    """The table of one report."""
    table = Table(title=f"{title}: measured, and the error of what is predicted")
    table.add_column("system", no_wrap=True)
    for column in ("GiB held", "error", "GiB peak", "error", "ms", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    timed = [row for row in found if row.seconds is not None]
    base = min(timed, key=lambda row: (row.system != "none", row.microbatches), default=None)
    for row in found:
        held, peak = row.predicted_gib()
        table.add_row(
            f"{row.system} x{row.microbatches}",
            f"{row.held_gib:.2f}",
            f"{held / row.held_gib - 1:+.1%}",
            f"{row.peak_gib:.2f}",
            f"{peak / row.peak_gib - 1:+.1%}",
            "" if row.seconds is None else f"{1000 * row.seconds:.0f}",
            "" if base is None or row.seconds is None else "base" if row is base else f"{time_error(base, row):+.1%}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=existing_file, nargs="+")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    for path in options.reports:  # each on its own: reports in several folders may have one name
        found = list(rows([path]))
        console.print(_table(str(path), found) if found else f"{path}: nothing in it is predicted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
