"""Draws the losses of long runs, the mean of every few steps, with a line for each variant of each report.

::

    cd docs/performance
    python -m benchmarks.long_run_chart bf16=long-1000.json "block FP8=long-1000-fp8.json" --plot long-1000.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.command_line import positive, writable_file

_NAMES = {"stock": "Megatron, unsharded"}


def means(losses: Mapping[int, float], every: int) -> list[tuple[float, float]]:
    """The last step and the mean loss of each ``every`` consecutive steps; the last ones may be fewer."""
    steps = sorted(losses)
    groups = itertools.batched(steps, every)
    return [(group[-1], sum(losses[step] for step in group) / len(group)) for group in groups]


def read(path: Path) -> dict[str, dict[int, float]]:
    """Losses by variant and step, as ``benchmarks.long_run --json`` has written them."""
    losses = json.loads(path.read_text(encoding="utf-8"))["losses"]
    return {variant: {int(step): loss for step, loss in curve.items()} for variant, curve in losses.items()}


def draw(reports: Mapping[str, Mapping[str, Mapping[int, float]]], every: int, path: Path) -> None:
    """Draw the losses, and below them how far each curve is from that of stock Megatron in the same report.

    Args:
        reports: losses by name of the report, variant and step.
        every: steps of which each point is the mean.
        path: where it goes; the suffix says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), layout="constrained", facecolor="white")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (name, report), colour in zip(reports.items(), ("#1b7837", "#762a83", "#b35806"), strict=False):
        stock = dict(means(report["stock"], every))
        for variant, losses in report.items():
            points = means(losses, every)
            label = f"{name}, {_NAMES.get(variant, f'ETP, {variant}')}"
            style = {"linestyle": "--" if variant == "stock" else "-", "color": colour, "linewidth": 1.2}
            curves.plot(*zip(*points, strict=True), label=label, **style)
            if variant != "stock":
                apart = [(step, loss - stock[step]) for step, loss in points]
                differences.plot(*zip(*apart, strict=True), **style)
    curves.set_ylabel("loss, nats per byte")
    curves.legend(frameon=False, fontsize=9)
    steps = max(len(losses) for report in reports.values() for losses in report.values())
    curves.set_title(f"Loss of a 4-layer GPT, {steps:,} steps, with and without ETP (means of {every})", fontsize=10)
    differences.axhline(0.0, color="#4d4d4d", linewidth=0.8)
    differences.set_ylabel("ETP - unsharded")
    differences.set_xlabel("step")
    for axis in (curves, differences):
        axis.grid(alpha=0.3)
    figure.savefig(path)


def _report(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not Path(path).is_file():
        raise argparse.ArgumentTypeError(
            f"give NAME=FILE with a file that benchmarks.long_run --json wrote, not {text}"
        )
    return name, Path(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the reports that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=_report, metavar="NAME=FILE", help="at most three")
    parser.add_argument("--every", type=positive, default=20, help="steps of which a point is the mean")
    parser.add_argument("--plot", type=writable_file, required=True)
    options = parser.parse_args(arguments)
    reports = {name: read(path) for name, path in options.reports}
    for name, report in reports.items():
        if "stock" not in report:
            parser.error(f"{name}: the report has no variant stock to compare with, only {', '.join(report)}")
    draw(reports, options.every, options.plot)


if __name__ == "__main__":
    main()
