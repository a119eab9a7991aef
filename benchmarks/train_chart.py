"""Draws one chart of the training benchmark: what each system's communication adds to a step.

::

    cd docs/performance
    python -m benchmarks.train_chart h100x2-etp.json h100x2-others.json --plot step-h100x2.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import train_report
from benchmarks.command_line import existing_file, writable_file
from benchmarks.train_shapes import GRAPH, SYSTEMS

_BASES = ("none", "none" + GRAPH)
_OURS, _OTHERS = ("#1b7837", "#7fbf7b"), ("#4d4d4d", "#a6a6a6")
"""Colours of the bars of a system, by number of microbatches: of ETP, and of the others."""


def added(reports: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Percent that communication adds to a step, by system and number of microbatches; the least first.

    Each is relative to "no communication" of its own run, and for a CUDA graph to the graph of it.
    """
    found: dict[str, dict[int, float]] = {}
    for row in train_report.rows(reports):
        if row.system not in _BASES and row.ratio is not None:
            found.setdefault(row.system, {})[row.microbatches] = 100.0 * (row.ratio - 1.0)
    return dict(sorted(found.items(), key=lambda item: item[1][min(item[1])]))


def draw(reports: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw a group of bars for each system.

    Args:
        reports: of one model, on as many GPUs of one kind.
        title: above the chart.
        path: where it goes; the suffix says the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = added(reports)
    counts = sorted({count for of_system in bars.values() for count in of_system})
    thickness = 0.8 / len(counts)
    figure = Figure(figsize=(8.0, 0.6 + 0.5 * len(bars)), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for line, (name, of_system) in enumerate(bars.items()):
        colours = _OURS if name.startswith("etp") else _OTHERS
        for place, count in enumerate(counts):
            if count in of_system:
                height = line + (place - (len(counts) - 1) / 2) * thickness
                bar = axis.barh(height, of_system[count], thickness, color=colours[place % len(colours)])
                axis.bar_label(bar, labels=[f"{of_system[count]:.1f} %"], fontsize=8, padding=3)
    axis.set_yticks(range(len(bars)), [SYSTEMS.get(name, name) for name in bars], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("time that communication adds to a step, percent of the step without it", fontsize=9)
    axis.set_title(title, fontsize=10)
    axis.margins(x=0.1)
    axis.spines[["top", "right"]].set_visible(False)
    shades = [
        Patch(color=_OTHERS[place % 2], label=f"{count} microbatch{'es' * (count > 1)}")
        for place, count in enumerate(counts)
    ]
    axis.legend(handles=shades, loc="upper right", fontsize=9, frameon=False)
    figure.savefig(path)


def title_of(report: dict[str, Any]) -> str:
    """Model, precision, and GPUs of a report."""
    return f"Forward and backward of {train_report.model_of(report)} on {report['gpus']} {report['device']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the reports that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=existing_file, nargs="+", help="reports of benchmarks.train_step")
    parser.add_argument("--title", help="above the chart (default: model and GPUs)")
    parser.add_argument("--plot", type=writable_file, required=True, help="file to write")
    options = parser.parse_args(arguments)
    reports = train_report.load(options.reports)
    draw(reports, options.title or title_of(reports[0]), options.plot)


if __name__ == "__main__":
    main()
