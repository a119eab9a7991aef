"""``python -m megatron_patches.refit simulate``: what a refit of a fleet costs each worker, compared with targets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.config_traits import dtype_of, family_from_config
from megatron_patches.refit.models.offline import TrainerOptions
from megatron_patches.refit.progress import Progress, shown_progress
from megatron_patches.refit.simulation.cluster import Sides
from megatron_patches.refit.simulation.models import MODELS, check_live, known_config
from megatron_patches.refit.simulation.simulate import SimulatedFanOut, Simulation, WorkerKind, simulate
from megatron_patches.refit.size_text import parse_size, size_text
from megatron_patches.refit.tools.plan_command import add_cluster_options, cluster_from, of_flag, table_of

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 12
"""Most waves in the table; the JSON has all."""
_FIGURES = ("seconds", "messages", "received_bytes", "sent_bytes", "peers", "requests", "weight_bytes")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``simulate`` to the command line."""
    command = commands.add_parser(
        "simulate",
        help="run the planning of a refit of many engines for some workers of each kind, without GPUs",
        description="Runs what trainer ranks, engine workers and the registry would run to plan a refit, for some "
        "workers of each kind, and the waves in which a version gets to all engines. Ends with status 1 if a target is "
        "missed. Seconds are CPU seconds of one core of this machine.",
    )
    command.add_argument("--model", required=True, help=f"config.json, its directory, or one of {', '.join(MODELS)}")
    add_cluster_options(command)
    command.add_argument("--engines", type=int, default=1, help="how many such engines")
    command.add_argument("--replicas", type=int, help="engines to reach in waves; as many as --engines by default")
    command.add_argument("--workers", type=int, default=1, help="of each kind, how many to run")
    command.add_argument(
        "--requests", type=int, default=64, help="plan the requests of so many engine workers at least"
    )
    command.add_argument("--most-seconds", type=float, default=5.0, help="target: of any worker, and of the registry")
    command.add_argument("--most-worker", type=parse_size, default=parse_size("500MB"), help="target: its messages")
    command.add_argument("--most-registry", type=parse_size, default=parse_size("2GB"), help="target: all messages")
    command.add_argument("--most-over", type=float, default=0.1, help="target: above even sources and least time")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything here")


@dataclass(frozen=True)
class Limit:
    """A figure and its limit.

    Attributes:
        name: name of the figure.
        found: its value.
        most: the limit.
        text: both as text.
    """

    name: str
    found: float
    most: float
    text: str

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        return self.found <= self.most


def main(options: argparse.Namespace) -> int:
    """Runs ``simulate`` and prints the result; returns the exit status."""
    try:
        with shown_progress(True, mostly_quick=True) as progress:
            sides, found = run(options, progress)
            targets = targets_of(options, found)
            if options.json is not None:
                _write(options.json, json.dumps(as_json(options, sides, found, targets), indent=1) + "\n")
    except RefitError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print_simulation(sides, found, targets, sys.stdout)
    return 0 if all(target.met for target in targets) else 1


def run(options: argparse.Namespace, progress: Progress) -> tuple[Sides, Simulation]:
    """Runs the simulation.

    Args:
        options: options of the command line.
        progress: receives each phase.

    Raises:
        RefitError: on any user error, with one line that names it.
    """
    config = known_config(options.model)
    family = family_from_config(config)
    check_live(config)
    trainer, engine, hosts = cluster_from(options)
    if options.workers < 1 or options.requests < 1:
        raise RefitError(
            f"--workers is {options.workers} and --requests is {options.requests}; each must be at least 1"
        )
    sides = of_flag(
        "--engines",
        lambda: Sides(
            family=family,
            trainer=trainer,
            engine=engine,
            engines=options.engines,
            options=TrainerOptions(dtype=dtype_of(config)),
            hosts=hosts,
        ),
    )
    replicas = options.engines if options.replicas is None else options.replicas
    if replicas < 1:
        raise RefitError(f"--replicas is {replicas}; a version gets to one engine at least")
    if options.json is not None:
        _require_writable(options.json)  # before minutes of work
    return sides, simulate(sides, options.workers, options.requests, replicas, options.between_hosts, progress)


def targets_of(options: argparse.Namespace, found: Simulation) -> list[Limit]:
    """Every figure that has a limit."""
    seconds = max(kind.most("seconds") for kind in found.kinds)
    messages = max(worker.received_bytes + worker.sent_bytes for kind in found.kinds for worker in kind.measured)
    registry, through = sum(found.registry_seconds.values()), sum(found.registry_bytes.values())
    most, over = f"{options.most_seconds:g} s", 1 + options.most_over
    balance, fan_out = found.balance, found.fan_out

    return [
        Limit("seconds of a worker", seconds, options.most_seconds, f"{seconds:.2f} s of {most}"),
        Limit("seconds of the registry", registry, options.most_seconds, f"{registry:.2f} s of {most}"),
        Limit(
            "messages of a worker", messages, options.most_worker, _of(size_text(int(messages)), options.most_worker)
        ),
        Limit(
            "through the registry", through, options.most_registry, _of(size_text(int(through)), options.most_registry)
        ),
        Limit(
            "busiest source",
            balance.over_even,
            over,
            f"{balance.over_even:.3f} of an even division's; {over:g} at most",
        ),
        Limit("fan-out", fan_out.over_least, over, f"{fan_out.over_least:.3f} of the least time; {over:g} at most"),
    ]


def _of(found: str, most: int) -> str:
    return f"{found} of {size_text(most)}"


def as_json(options: argparse.Namespace, sides: Sides, found: Simulation, targets: list[Limit]) -> Mapping[str, object]:
    """All results, for JSON."""
    return {
        "model": options.model,
        "architecture": sides.family.architecture,
        "trainer": {"axes": options.trainer, "ranks": sides.trainer.size},
        "engine": {"axes": options.engine, "ranks": sides.engine.size, "engines": sides.engines},
        "sampled": found.sampled,
        "kinds": [_kind(kind) for kind in found.kinds],
        "registry": {"seconds": dict(found.registry_seconds), "bytes": dict(found.registry_bytes)},
        "balance": {**asdict(found.balance), "over_even": found.balance.over_even},
        "fan_out": _waves(found.fan_out),
        "targets": [{"name": item.name, "found": item.found, "most": item.most, "met": item.met} for item in targets],
    }


def _kind(kind: WorkerKind) -> Mapping[str, object]:
    return {
        "name": kind.name,
        "count": kind.count,
        "measured": [worker.rank for worker in kind.measured],
        **{figure: kind.most(figure) for figure in _FIGURES},
    }


def _waves(found: SimulatedFanOut) -> Mapping[str, object]:
    return {
        "replicas": found.replicas,
        "copies": found.copies,
        "unit_seconds": found.unit_seconds,
        "units": found.units,
        "least_units": found.least_units,
        "waves": [
            {
                "begin": float(wave.begin),
                "end": float(wave.end),
                "committed": list(wave.committed),
                "shares": [[share.server, share.receiver, float(share.speed)] for share in wave.shares],
            }
            for wave in found.waves
        ],
    }


def _require_writable(file: Path) -> None:
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise RefitError(f"--json is {file}, which cannot be written; name another file")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefitError(f"--json is {file}, which cannot be written ({error.strerror}); name another file") from error


_TABLES: Mapping[str, Mapping[str, Callable[[WorkerKind], str]]] = MappingProxyType(
    {
        "planning and linking, one worker of each kind: the most of those run": {
            "workers": lambda kind: str(kind.count),
            "run": lambda kind: str(len(kind.measured)),
            "seconds": lambda kind: f"{kind.most('seconds'):.2f}",
            "messages": lambda kind: f"{kind.most('messages'):.0f}",
            "received": lambda kind: size_text(int(kind.most("received_bytes"))),
            "sent": lambda kind: size_text(int(kind.most("sent_bytes"))),
        },
        "what it links with, and what each version moves": {
            "peers": lambda kind: f"{kind.most('peers'):.0f}",
            "requests": lambda kind: f"{kind.most('requests'):.0f}",
            "weights": lambda kind: size_text(int(kind.most("weight_bytes"))),
        },
    }
)


def print_simulation(sides: Sides, found: Simulation, targets: list[Limit], out: TextIO) -> None:
    """Prints the results as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, highlight=False, width=None if out.isatty() else 120)
    summary = Table.grid(padding=(0, 2))
    engines = f"{sides.engines} x {sides.engine.size}" if sides.engines > 1 else f"{sides.engine.size}"
    asked = f"planned for {found.balance.engines} of {found.engines} engines, and multiplied (sampled)"
    for name, value in (
        ("model", f"{sides.family.architecture}, {len(sides.family.shapes())} tensors"),
        ("trainer", f"{sides.trainer.size} ranks"),
        ("engines", f"{engines} workers"),
        ("requests", asked if found.sampled else "planned for all engine workers"),
    ):
        summary.add_row(name, value)
    console.print(summary)
    for title, columns in _TABLES.items():
        kinds = [(kind.name, *(text_of(kind) for text_of in columns.values())) for kind in found.kinds]
        console.print(table_of(title, ("kind", *columns), kinds, left=1))
    steps = [
        (step, f"{seconds:.2f}", size_text(int(found.registry_bytes[step])))
        for step, seconds in found.registry_seconds.items()
    ]
    console.print(table_of("registry, for all", ("step", "seconds", "messages"), steps, left=1))
    console.print(_wave_table(found.fan_out))
    results = [(target.name, target.text, "met" if target.met else "MISSED") for target in targets]
    console.print(table_of("targets", ("what", "found", ""), results, left=3))


def _wave_table(found: SimulatedFanOut) -> Table:
    title = (
        f"waves to {found.replicas} of such engines; the trainer serves {found.copies:.3g} at a time, one in "
        f"{found.unit_seconds:.3g} s with all bytes between hosts"
    )
    rows, done = [], 0
    for number, wave in enumerate(found.waves[:_ROWS], 1):
        done += len(wave.committed)
        end = f"{float(wave.end) * found.unit_seconds:.3g} s"
        counts = len({share.server for share in wave.shares}), len({share.receiver for share in wave.shares})
        rows.append((str(number), end, *map(str, counts), str(len(wave.committed)), str(done)))
    left_out = f"the first {_ROWS} of {len(found.waves)}; all with --json" if len(found.waves) > _ROWS else None
    return table_of(title, ("wave", "ends", "servers", "served", "committed", "in all"), rows, caption=left_out)
