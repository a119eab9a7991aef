"""Formats the training benchmark's results, of one run or several, as a table and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.train_shapes import GRAPH, SYSTEMS

# Where "none" does not fit, its time is calculated from the speed that it reached here on the same GPUs.
_REFERENCE_SHAPE = "llama8b-8l"
_HEAD = (
    "system", "model", "GPUs", "microbatches", "ms", "spread", "ratio", "to eager none", "tokens/s/GPU",
    "model TFLOP/s", "host ms", "host ratio", "GiB held", "/ closed form", "GiB peak", "exposed ms", "idle ms",
)  # fmt: skip

NOTES = """\
ratio: to "no communication" of the same run, to its CUDA graph for a CUDA graph; ~ to a calculated one.
spread: the fastest and the slowest round, and how many there were. host ms: until the host had enqueued a step, with
its waits for the GPU, if any; an eager step that takes no longer waits for the host. host ratio: to that of eager "no
communication".
GiB held: between two steps, symmetric memory included; closed form: docs/performance.md. exposed, idle: milliseconds of
a traced step on rank 0 in which communication ran and no compute kernel did, and in which nothing ran. A graph's
kernels are on other streams than they were captured on, so what is exposed cannot be told from its trace."""
# Of columns that stand in tables of reports that have them: those of earlier versions do not, or all are in bf16.
_BF16_HEAD = "of bf16"
_BF16_NOTE = """\
of bf16: the step's time, divided by that of the same system in bf16."""
_MOVED_HEAD = "bytes/element"
_MOVED_NOTE = """\
bytes/element: gathered and reduced for each element of a weight in each microbatch, as ETP counts them; N GPUs send
(N - 1) / N of them."""
# A bar that is this much longer than the middle one is cut.
_LONGEST_BAR = 3.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        system: its name.
        model: the name of its shape.
        gpus: how many.
        microbatches: a step and GPU.
        ms: median of a step.
        spread: the fastest and the slowest measurement.
        rounds: how many measurements there were.
        ratio: to "none", to its graph for a graph; None if there is nothing to compare with.
        eager_ratio: to eager "none".
        bf16_ratio: to the same system and model in bf16, among the same reports; None if it is bf16 or has none.
        calculated: whether "none" was calculated.
        tokens: a second and GPU.
        tflops: of the model, a GPU; recomputation would not count.
        host_ms: until the host had enqueued a step; None if not measured.
        host_ratio: to that of eager "none" of the same run.
        held_gib: between two steps; None if not measured.
        closed_form_gib: what has to be held.
        peak_gib: in a step.
        exposed_ms: communication alone, in a traced step; None without a trace, and for a graph.
        idle_ms: nothing, in a traced step.
        bytes_per_element: moved for each element of a weight in each microbatch; None if not counted.
    """

    system: str
    model: str
    gpus: int
    microbatches: int
    ms: float
    spread: tuple[float, float]
    rounds: int
    ratio: float | None
    eager_ratio: float | None
    bf16_ratio: float | None
    calculated: bool
    tokens: float
    tflops: float
    host_ms: float | None
    host_ratio: float | None
    held_gib: float | None
    closed_form_gib: float | None
    peak_gib: float | None
    exposed_ms: float | None
    idle_ms: float | None
    bytes_per_element: float | None


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read reports."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rows(reports: Sequence[dict[str, Any]]) -> list[Row]:
    """What was measured, in the order of the reports."""
    return [_row(result, report, reports) for report in reports for result in report["results"] if result["median"]]


def _row(result: dict[str, Any], report: dict[str, Any], reports: Sequence[dict[str, Any]]) -> Row:
    ms, microbatches, shape = result["median"], result["microbatches"], report["shape"]
    medians = _medians(report)
    eager = medians.get(("none", microbatches))
    calculated = eager is None
    if eager is None:
        eager = _calculated_none(report, microbatches, reports)
    like = medians.get(("none" + GRAPH, microbatches)) if result["system"].endswith(GRAPH) else eager
    host, host_alone = result.get("host_ms") or None, _medians(report, "host_ms").get(("none", microbatches))
    other, trace = sum(result["other_gib"].values()), result.get("trace") or {}
    held = result["allocated_gib"] + other if result["allocated_gib"] else None
    return Row(
        system=result["system"],
        model=model_of(report),
        gpus=report["gpus"],
        microbatches=microbatches,
        ms=ms,
        spread=(min(result["milliseconds"]), max(result["milliseconds"])),
        rounds=len(result["milliseconds"]),
        ratio=ms / like if like else None,
        eager_ratio=ms / eager if eager else None,
        bf16_ratio=_bf16_ratio(result, report, reports),
        calculated=calculated,
        tokens=shape["micro_batch"] * shape["sequence"] * microbatches / ms * 1e3,
        tflops=report["flops_per_microbatch"] * microbatches / ms / 1e9,
        host_ms=host,
        host_ratio=host / host_alone if host and host_alone else None,
        held_gib=held,
        closed_form_gib=sum(result.get("closed_form_gib", {}).values()) or None,
        peak_gib=result["peak_gib"] + other if held else None,
        exposed_ms=None if result["system"].endswith(GRAPH) else trace.get("exposed"),
        idle_ms=trace.get("idle"),
        bytes_per_element=result.get("bytes_per_element"),
    )


def model_of(report: dict[str, Any]) -> str:
    """The name of the shape that a report is about, with its precision if that is not bf16."""
    name, precision = _shape_of(report), _precision_of(report)
    return name if precision == "bf16" else f"{name}, {precision}"


def _shape_of(report: dict[str, Any]) -> str:
    name: str = report.get("shape_name") or report["options"]["shape"]
    return name


def _precision_of(report: dict[str, Any]) -> str:
    precision: str = report.get("options", {}).get("precision", "bf16")
    return precision


def _bf16_ratio(result: dict[str, Any], report: dict[str, Any], reports: Sequence[dict[str, Any]]) -> float | None:
    """What a result takes of the time that the same takes in bf16, in the first report that has it."""
    if _precision_of(report) == "bf16":
        return None
    same = ("device", "gpus", "shape")
    for other in reports:
        if _precision_of(other) == "bf16" and all(other.get(key) == report.get(key) for key in same):
            in_bf16 = _medians(other).get((result["system"], result["microbatches"]))
            if in_bf16:
                return float(result["median"]) / in_bf16
    return None


def _medians(report: dict[str, Any], of: str = "median") -> dict[tuple[str, int], float]:
    return {(r["system"], r["microbatches"]): r[of] for r in report["results"] if r.get(of)}


def _calculated_none(report: dict[str, Any], microbatches: int, reports: Sequence[dict[str, Any]]) -> float | None:
    """Milliseconds of "none" at the FLOP/s of the reference model, on the same GPUs and in the same precision."""
    for other in reports:
        reference = _medians(other).get(("none", microbatches))
        same = all(other[key] == report[key] for key in ("device", "gpus"))
        same = same and _precision_of(other) == _precision_of(report)
        if reference and same and _shape_of(other) == _REFERENCE_SHAPE:
            return reference * report["flops_per_microbatch"] / other["flops_per_microbatch"]
    return None


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, then what the columns mean, then what failed."""
    found = rows(reports)
    head, cells, notes = list(_HEAD), [_cells(row) for row in found], NOTES
    for title, note, digits, values in (
        (_BF16_HEAD, _BF16_NOTE, 3, [row.bf16_ratio for row in found]),
        (_MOVED_HEAD, _MOVED_NOTE, 4, [row.bytes_per_element for row in found]),
    ):
        if any(value is not None for value in values):
            head, notes = [*head, title], f"{notes}\n{note}"
            cells = [[*line, _text(value, digits)] for line, value in zip(cells, values, strict=True)]
    lines = [_line(head), "|" + "---|" * len(head), *map(_line, cells)]
    failed: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        where = model_of(report) + (f" on {report['gpus']} GPUs" if report["gpus"] else "")
        for name, reason in report.get("failures", {}).items():
            failed.setdefault((where, reason), []).append(SYSTEMS.get(name, name))
    listed = [f"- {where}: {'; '.join(names)}: {reason}" for (where, reason), names in failed.items()]
    return "\n".join([*lines, "", notes, *(["", "Failed:", "", *listed] if listed else [])])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row) -> list[str]:
    mark = "~" if row.calculated and row.eager_ratio is not None else ""
    share = row.held_gib / row.closed_form_gib if row.held_gib and row.closed_form_gib else None
    return [
        SYSTEMS.get(row.system, row.system), row.model, str(row.gpus), str(row.microbatches), f"{row.ms:.1f}",
        f"{row.spread[0]:.1f}-{row.spread[1]:.1f} ({row.rounds})", mark + _text(row.ratio, 3),
        mark + _text(row.eager_ratio, 3), f"{row.tokens:.0f}", f"{row.tflops:.0f}", _text(row.host_ms, 1),
        _text(row.host_ratio, 2), _text(row.held_gib, 2), _text(share, 2), _text(row.peak_gib, 2),
        _text(row.exposed_ms, 1), _text(row.idle_ms, 1),
    ]  # fmt: skip


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(reports: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Draw bars: a row for each model and number of GPUs, with the ratios at each number of microbatches, and memory.

    Args:
        reports: what was measured.
        path: where the plot goes; the suffix says the format.
        title: above everything.

    Raises:
        SystemExit: without matplotlib.
        ValueError: if there is no result to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    found = rows(reports)
    cases = list(dict.fromkeys((row.model, row.gpus) for row in found))
    if not cases:
        raise ValueError("these reports have no results to plot")
    counts = sorted({row.microbatches for row in found})
    here = {case: _first_of_each([row for row in found if (row.model, row.gpus) == case]) for case in cases}
    systems = {case: list(dict.fromkeys(row.system for row in here[case])) for case in cases}
    heights = [1.5 + len(systems[case]) for case in cases]
    size = (3.0 + 3.4 * (len(counts) + 1), (0.7 if title else 0.4) + 0.25 * sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    grid = figure.subplots(len(cases), len(counts) + 1, squeeze=False, sharey="row", height_ratios=heights)
    for axes, case in zip(grid, cases, strict=True):
        for axis, count in zip(axes, counts, strict=False):
            measured = [row for row in here[case] if row.microbatches == count]
            if not measured and axis is not axes[0]:
                axis.set_visible(False)
                continue
            _ratios(axis, measured, systems[case])
            axis.set_title(f"{case[0]}, {case[1]} GPUs, microbatches: {count}", fontsize=8)
            axis.set_xlabel("time of a step / without communication", fontsize=7)
        largest = max(row.microbatches for row in here[case])
        held = {row.system: row.held_gib for row in here[case] if row.microbatches == largest and row.held_gib}
        _bars(axes[-1], systems[case], held, {name: f"{gib:.2f}" for name, gib in held.items()}, base=0.0)
        axes[-1].set_title("memory", fontsize=8)
        axes[-1].set_xlabel("GiB held on a rank between two steps", fontsize=7)
        axes[0].set_yticks(range(len(systems[case])), [SYSTEMS.get(name, name) for name in systems[case]])
        axes[0].invert_yaxis()
    figure.savefig(path)


def _first_of_each(found: Sequence[Row]) -> list[Row]:
    """The first row of each system, because "none" is measured in each run."""
    first: dict[tuple[str, int], Row] = {}
    for row in found:
        first.setdefault((row.system, row.microbatches), row)
    return list(first.values())


def _ratios(axis: Any, found: Sequence[Row], systems: Sequence[str]) -> None:
    """Bars that begin at 1, so that their length is the time which communication adds; a far longer one is cut."""
    ratios = {row.system: row.ratio for row in found if row.ratio is not None}
    longest = longest_bar([abs(ratio - 1.0) for ratio in ratios.values()])
    drawn = {name: min(ratio, 1.0 + longest) for name, ratio in ratios.items()}
    texts = {
        row.system: _label(row, cut=ratios[row.system] > drawn[row.system]) for row in found if row.system in ratios
    }
    _bars(axis, systems, drawn, texts, base=1.0)
    axis.axvline(1.0, color="black", linewidth=0.8)


def longest_bar(lengths: Sequence[float]) -> float:
    """How long a bar may be so that the others can be read beside it."""
    positive = [length for length in lengths if length]
    return _LONGEST_BAR * statistics.median(positive) if positive else 0.0


def _label(row: Row, *, cut: bool) -> str:
    if row.system.removesuffix(GRAPH) == "none":
        return f"{row.ms:.1f} ms"
    return ("~" if row.calculated else "") + f"{row.ratio:.3f}" + (" (cut)" if cut else "")


def _bars(
    axis: Any, systems: Sequence[str], values: Mapping[str, float], texts: Mapping[str, str], *, base: float
) -> None:
    """A bar for each value, in the line of its system."""
    colours = {"etp": "tab:green", "none": "tab:gray"}
    lines = [line for line, name in enumerate(systems) if name in values]
    names = [systems[line] for line in lines]
    chosen = [colours.get(name.split("_")[0], "tab:blue") for name in names]
    bars = axis.barh(lines, [values[name] - base for name in names], left=base, color=chosen)
    axis.bar_label(bars, labels=[texts[name] for name in names], fontsize=7, padding=2)
    axis.tick_params(labelsize=7)
    axis.margins(x=0.3)
