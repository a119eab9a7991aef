"""Formats the results of ``benchmarks.refit`` and ``benchmarks.refit_vllm`` as a table and a plot.

python -m benchmarks.refit_report --links refit.json --servers refit-vllm.json ... --table table.md --plot plot.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import existing_file, require_matplotlib, writable_file

PARTS = ("move", "verify", "commit")
"""The measured parts of a push into a server; the rest is communication between the parties."""

WAYS = {
    "nccl": "vLLM's own: gathered, broadcast whole, load_weights",
    "checkpoint_engine": "checkpoint-engine: gathered, over the host, load_weights",
    "gather+broadcast": "gathered, broadcast whole",
}


@dataclass(frozen=True)
class Row:
    """One way of one run; seconds are medians.

    Attributes:
        case: model and meshes.
        way: its name; with the number of its run if the case has several.
        seconds: by part; ``push`` is the whole.
        prepare_s: once, before the first push; None for a way that prepares nothing.
        gb_per_s: while bytes moved, into all workers; in runs without a server, into the worker that receives most.
        share: of what plain sends reach, in runs that measure it.
        trainer_mib: memory beyond the weights of the busiest trainer rank; None where it was not measured.
        engine_mib: memory beyond the weights of the busiest worker; with a server, of the first way into it.
        beside_mib: the part of ``engine_mib`` that is another copy of the weights, in runs with a server.
        kl: generation KL in nats a token, in runs with a server.
    """

    case: str
    way: str
    seconds: Mapping[str, float]
    prepare_s: float | None
    gb_per_s: float
    share: float | None
    trainer_mib: float | None
    engine_mib: float | None
    beside_mib: float | None
    kl: float | None


def rows(reports: Sequence[dict[str, Any]]) -> list[Row]:
    """All ways of all runs that did not fail.

    A case of several runs has their numbers beside its ways: runs without a server are numbered in the order of
    ``reports``, and so are runs with one.
    """
    cases = [_case(report["options"]) for report in reports]
    numbers = Counter[bool]()
    found = []
    for report, case in zip(reports, cases, strict=True):
        into_server = "engine" not in report["options"]
        numbers[into_server] += 1
        run = f", run {numbers[into_server]}" if cases.count(case) > 1 else ""
        for item in report["outcomes"]:
            if item["failure"]:
                continue
            seconds = {part: statistics.median(values) for part, values in item["seconds"].items()}
            moved = seconds.get("move", seconds["push"])
            has_server = "kl" in item
            # Older reports did not measure this by way, and counted what earlier ways had left.
            measured, made = "made_bytes" in item or not has_server, item.get("made_bytes", {})
            found.append(
                Row(
                    case=case,
                    way=WAYS.get(item["way"], item["way"]) + run,
                    seconds=seconds,
                    prepare_s=item["prepare_s" if has_server else "plan_s"] or None,
                    gb_per_s=item["nbytes"] / moved / 1e9 if has_server else item["gb_per_s"],
                    share=None if has_server else item["share_of_link"],
                    trainer_mib=_mib(item["trainer_bytes"] if measured else None),
                    engine_mib=_mib(item["engine_bytes" if has_server else "worker_bytes"] if measured else None),
                    beside_mib=_mib(made.get("beside")),
                    kl=item["kl"] if has_server else None,
                )
            )
    return found


def failures(reports: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each way of a run that failed."""
    return [
        f"- {_case(report['options'])}: {WAYS.get(item['way'], item['way'])}: {' '.join(item['failure'].split())}"
        for report in reports
        for item in report["outcomes"]
        if item["failure"]
    ]


def _case(options: Mapping[str, str]) -> str:
    return f"{options['model']}, {options['trainer']} to {options.get('engine') or _workers(options)}"


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def _workers(options: Mapping[str, str]) -> str:
    count = len(json.loads(options["engine_gpus"]))
    shared = f", on the same GPU{'s' if count > 1 else ''}" if options["engine_gpus"] == options["trainer_gpus"] else ""
    return f"vLLM TP {count}{shared}"


HEADINGS = ("case", "way", "prepare s", "push ms", "moving", "verify", "commit", "paused", "GB/s", "of link", "KL")
MEMORY = ("trainer MiB", "engine MiB", "beside MiB")

NOTES = """\
Times are medians. prepare: once per session: exchanging manifests, planning and proving; with a server also meeting,
and recording what the loader does, and in place allocating the copy on the host; for other engines their own set-up.
push: the whole, with a server until the new weights serve, without one until all workers have verified. moving:
packing, the wire and unpacking, which overlap, on the slowest worker. verify: reading back and comparing digests, on
the slowest worker. commit: until all workers serve the new weights; without a server a copy, after the push. paused:
how long no request is begun. GB/s: into all workers, or without a server into one of them, while moving or else of the
whole push. of link: compared with plain sends in the same run. KL: of generation, in nats per token. MiB: beyond the
weights, of an engine only for the first way into its server; beside is the second copy of the weights, a part of it."""


def table(found: Sequence[Row], failed: Sequence[str] = ()) -> str:
    """Markdown, then what the columns mean, then what failed."""
    headings = (*HEADINGS, *MEMORY)
    lines = [_line(headings), _line(["---"] * len(headings))]
    for row in found:
        parts = [_ms(row.seconds.get(part)) for part in ("push", *PARTS)]
        paused = _ms(row.seconds.get("paused", row.seconds.get("pause")))
        share = "" if row.share is None else f"{row.share:.0%}"
        kl = "" if row.kl is None else f"{row.kl:.1e}"
        memory = ["" if mib is None else f"{mib:.0f}" for mib in (row.trainer_mib, row.engine_mib, row.beside_mib)]
        once = "" if row.prepare_s is None else f"{row.prepare_s:.1f}"
        lines.append(_line([row.case, row.way, once, *parts, paused, f"{row.gb_per_s:.0f}", share, kl, *memory]))
    return "\n".join([*lines, "", NOTES, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def plot(found: Sequence[Row], path: Path) -> None:
    """Draws bars, a panel a case: milliseconds of a push, by part.

    Raises:
        SystemExit: without matplotlib.
        ValueError: if there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    cases = list(dict.fromkeys(row.case for row in found))
    if not cases:
        raise ValueError("these reports have no results to plot")
    heights = [1.5 + sum(row.case == case for row in found) for case in cases]
    figure = Figure(figsize=(9, 0.6 + 0.35 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, case in zip(axes, cases, strict=True):
        here = [row for row in found if row.case == case]
        places = range(len(here))
        left = [0.0] * len(here)
        for part in PARTS:
            widths = [1e3 * row.seconds.get(part, 0.0) for row in here]
            axis.barh(places, widths, left=left, label=part)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        rest = [max(0.0, 1e3 * row.seconds["push"] - begin) for row, begin in zip(here, left, strict=True)]
        bars = axis.barh(places, rest, left=left, label="the rest", color="lightgray")
        axis.bar_label(bars, labels=[f"{1e3 * row.seconds['push']:.0f}" for row in here], fontsize=7, padding=2)
        axis.set_yticks(places, [row.way for row in here])
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.set_xlim(0.0, 1.15e3 * max(row.seconds["push"] for row in here))
        axis.set_title(f"{case}: milliseconds of a push", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside upper center", ncols=len(PARTS) + 1)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads reports, writes what was asked for; the table goes to the standard output as well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", type=existing_file, nargs="*", default=[], help="reports of benchmarks.refit")
    parser.add_argument("--servers", type=existing_file, nargs="*", default=[], help="reports of benchmarks.refit_vllm")
    parser.add_argument("--table", type=writable_file)
    parser.add_argument("--plot", type=writable_file)
    options = parser.parse_args(arguments)
    if not (options.links or options.servers):
        parser.error("name reports: --links, --servers, or both")
    require_matplotlib(parser.error, options.plot)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in (*options.links, *options.servers)]
    found = rows(reports)
    text = table(found, failures(reports))
    print(text, end="")
    if options.table is not None:
        options.table.write_text(text, encoding="utf-8")
    if options.plot is not None:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
