"""``python -m megatron_patches.refit plan`` and ``verify``: plans for clusters offline, and their proof."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.config_traits import dtype_of, family_from_config, read_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, PartOf, Plan
from megatron_patches.refit.planning.proof import Verdict, prove
from megatron_patches.refit.progress import Phases, Progress, shown_progress
from megatron_patches.refit.simulation.cluster import (
    Cluster,
    Hosts,
    Sides,
    describe_cluster,
    engine_mesh,
    sample_layers,
    trainer_mesh,
)
from megatron_patches.refit.simulation.models import check_live
from megatron_patches.refit.simulation.oracle import memory_needed, verify_in_memory
from megatron_patches.refit.simulation.report import Traffic, traffic_of
from megatron_patches.refit.size_text import parse_size, size_text
from megatron_patches.refit.target.vllm_layout import EngineMesh

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 16
"""Most rows of a table; the JSON has all."""
MOST_ELEMENT_BYTES = 8
_MOST_RANKS = 1 << 14


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``plan`` and ``verify`` to the command line."""
    plan = commands.add_parser(
        "plan",
        help="plan a refit from a config.json and the sizes of both meshes, and prove the plan",
        description="Plans a refit between clusters that need not exist: prints what moves, over which links and in "
        "what time at best, and whether every byte is proved to be written exactly once.",
    )
    which = plan.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="plan only what this trainer rank sends")
    which.add_argument("--engine-rank", type=int, help="plan only what this engine rank receives")
    verify = commands.add_parser(
        "verify",
        help="carry a plan out in memory and compare every byte with a dense model of random bits",
        description="Plans as the command plan does, then moves a random model by the plan within this process and "
        "compares every element of every engine rank with the dense model.",
    )
    verify.add_argument("--seed", type=int, default=0, help="of the random bits")
    verify.add_argument("--staging", type=parse_size, default=parse_size("256MiB"), help="most bytes of a packet")
    verify.add_argument("--max-memory", type=parse_size, default=parse_size("4GiB"), help="most memory to use")
    for command in (plan, verify):
        command.add_argument("--model", type=Path, required=True, help="config.json, or the directory that has it")
        add_cluster_options(command)
        command.add_argument("--within-host", type=parse_size, default=parse_size("450GB"), help="bytes/s of a rank")
        command.add_argument("--json", action="store_true", help="print one JSON object")


def add_cluster_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of both sides."""
    command.add_argument("--from", dest="trainer", required=True, help="trainer's axes: tp=2,etp=2,pp=2,ep=2,dp=2")
    command.add_argument("--to", dest="engine", required=True, help="axes of one engine: tp=4,ep=4,dp=1")
    command.add_argument("--ranks-per-host", type=int, default=8, help="on both sides")
    command.add_argument("--colocated", action="store_true", help="trainer and engine share their hosts")
    command.add_argument("--between-hosts", type=parse_size, default=parse_size("50GB"), help="bytes/s of a rank")


def cluster_from(options: argparse.Namespace) -> tuple[TrainerMesh, EngineMesh, Hosts]:
    """What :func:`add_cluster_options` was given: both meshes, and where their ranks run.

    Raises:
        RefitError: if a value is invalid.
    """
    trainer = of_flag("--from", lambda: trainer_mesh(options.trainer))
    engine = of_flag("--to", lambda: engine_mesh(options.engine))
    for flag, size in (("--from", trainer.size), ("--to", engine.size)):
        if size > _MOST_RANKS:
            raise RefitError(f"{flag} has {size} ranks; at most {_MOST_RANKS} can be planned for")
    hosts = of_flag(
        "--ranks-per-host", lambda: Hosts(ranks_per_host=options.ranks_per_host, colocated=options.colocated)
    )
    return trainer, engine, hosts


@dataclass(frozen=True, kw_only=True)
class PlanOutcome:
    """What the commands print.

    Attributes:
        architecture: class in ``transformers``.
        trainer: the trainer's axes.
        engine: the engine's axes.
        cluster: both sides.
        plan: the plan, or one rank's part.
        traffic: its bytes and minimum times.
        verdict: the result of the proof.
        comparison: what ``verify`` compared; None for ``plan``.
        seconds: duration of each phase.
    """

    architecture: str
    trainer: Mapping[str, int]
    engine: Mapping[str, int]
    cluster: Cluster
    plan: Plan
    traffic: Traffic
    verdict: Verdict
    comparison: Mapping[str, Any] | None
    seconds: Mapping[str, float]

    def as_json(self) -> Mapping[str, object]:
        """All results, for JSON."""
        part = self.plan.part
        return {
            "architecture": self.architecture,
            "tensors": len(self.plan.tensors),
            "model_bytes": sum(spec.nbytes for spec in self.plan.tensors),
            "trainer": {"ranks": len(self.cluster.sources), **self.trainer},
            "engine": {"ranks": len(self.cluster.destinations), **self.engine},
            "part": None if part is None else {"side": part.side, "rank": part.rank},
            "transfers": len(self.plan.transfers),
            "bytes": self.plan.nbytes,
            "bytes_within_hosts": self.traffic.bytes_within_hosts,
            "sent": {str(rank): nbytes for rank, nbytes in self.traffic.sent.items()},
            "received": {str(rank): nbytes for rank, nbytes in self.traffic.received.items()},
            "links": [asdict(link) for link in self.traffic.links],
            "egress_seconds": self.traffic.egress_seconds,
            "ingress_seconds": self.traffic.ingress_seconds,
            "least_seconds": self.traffic.least_seconds,
            "proof": {
                "verdict": "proved",
                "elements": self.verdict.elements,
                "boxes": self.verdict.boxes,
                "conversions": [str(item) for item in self.verdict.conversions],
            },
            "comparison": self.comparison,
            "plan_digest": self.plan.digest,
            "seconds": self.seconds,
        }


def run(options: argparse.Namespace, progress: Progress) -> PlanOutcome:
    """Plans and proves; also executes the plan if the command is ``verify``.

    Args:
        options: options of the command line.
        progress: receives each phase.

    Raises:
        RefitError: on any user error, with one line that names it.
    """
    trainer, engine, hosts = cluster_from(options)
    if options.command == "verify" and options.staging < MOST_ELEMENT_BYTES:
        raise RefitError(
            f"--staging is {options.staging}; a packet must hold one element of {MOST_ELEMENT_BYTES} bytes"
        )
    config = read_config(options.model)
    family = family_from_config(config)
    check_live(config)
    phases = Phases(progress)
    with phases.phase("describe"):
        kept = TrainerOptions(dtype=dtype_of(config))
        cluster = describe_cluster(Sides(family=family, trainer=trainer, engine=engine, options=kept, hosts=hosts))
    with phases.phase("plan"):
        plan = cluster.plan(DEFAULT_OPTIONS, _part(options))
    with phases.phase("prove"):
        verdict = prove(plan, cluster.sources, cluster.destinations)
    comparison = None
    if options.command == "verify":
        with phases.phase("verify"):
            comparison = _compare(options, cluster, plan)
    return PlanOutcome(
        architecture=family.architecture,
        trainer=asdict(trainer),
        engine=asdict(engine),
        cluster=cluster,
        plan=plan,
        traffic=traffic_of(
            plan,
            cluster.sources,
            cluster.destinations,
            within_host=options.within_host,
            between_hosts=options.between_hosts,
        ),
        verdict=verdict,
        comparison=comparison,
        seconds=phases.seconds,
    )


def of_flag[T](flag: str, make: Callable[[], T]) -> T:
    """The value of a flag.

    Raises:
        RefitError: with the flag's name if the value is invalid.
    """
    try:
        return make()
    except ValueError as error:
        raise RefitError(f"{flag}: {error}") from error


def _part(options: argparse.Namespace) -> PartOf | None:
    for name, side in (("rank", "source"), ("engine_rank", "destination")):
        rank = getattr(options, name, None)
        if rank is not None:
            if rank < 0:
                raise RefitError(f"there is no rank {rank}; ranks are numbered from 0")
            return PartOf("source" if side == "source" else "destination", rank)
    return None


def _compare(options: argparse.Namespace, cluster: Cluster, plan: Plan) -> Mapping[str, Any]:
    """Moves the model, or as many of its layers as fit into memory. Returns what was compared."""
    needed = memory_needed(cluster.tensors, cluster.sources, cluster.destinations)
    layers: dict[str, Any] = {}
    if needed > options.max_memory:
        sample = sample_layers(cluster, options.max_memory, options.seed)
        cluster = sample.cluster
        plan = cluster.plan(DEFAULT_OPTIONS)
        prove(plan, cluster.sources, cluster.destinations)
        layers = {"layers": sample.layers, "of_layers": sample.of_layers, "left_out": sample.left_out}
    compared = verify_in_memory(plan, cluster.sources, cluster.destinations, options.seed, options.staging)
    return {**asdict(compared), **layers}


def main(options: argparse.Namespace) -> int:
    """Runs ``plan`` or ``verify`` and prints the result; returns the exit status."""
    try:
        with shown_progress(True, mostly_quick=True) as progress:
            outcome = run(options, progress)
    except RefitError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    out = sys.stdout
    if options.json:
        out.write(json.dumps(outcome.as_json()) + "\n")
    else:
        print_outcome(outcome, out)
    return 0


def print_outcome(outcome: PlanOutcome, out: TextIO) -> None:
    """Prints the outcome as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, highlight=False, width=None if out.isatty() else 120)
    plan, traffic = outcome.plan, outcome.traffic
    summary = Table.grid(padding=(0, 2))
    for name, value in _summary(outcome):
        summary.add_row(name, value)
    console.print(summary)
    for side, moved, totals in (("source", "sent", traffic.sent), ("destination", "received", traffic.received)):
        mean = plan.nbytes / max(1, len(totals))
        largest = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:_ROWS]
        rows = [(str(rank), size_text(nbytes), f"{nbytes / mean:.3f}") for rank, nbytes in largest]
        caption = _left_out(len(totals))
        console.print(table_of(f"bytes by {side} rank", ("rank", moved, "of the mean"), rows, caption=caption))
    links = [
        (str(link.source), str(link.destination), size_text(link.nbytes), "host" if link.same_host else "network")
        for link in sorted(traffic.links, key=lambda item: (-item.nbytes, item.source, item.destination))[:_ROWS]
    ]
    columns, caption = ("source", "destination", "sent", "over"), _left_out(len(traffic.links))
    console.print(table_of("bytes by link", columns, links, caption=caption))


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0, caption: str | None = None
) -> Table:
    """A table, whose first ``left`` columns are aligned to the left, and others to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _summary(outcome: PlanOutcome) -> list[tuple[str, str]]:
    plan, traffic = outcome.plan, outcome.traffic
    trainer, engine = (len(side) for side in (outcome.cluster.sources, outcome.cluster.destinations))
    model = size_text(sum(spec.nbytes for spec in plan.tensors))
    rows = [
        ("model", f"{outcome.architecture}, {len(plan.tensors)} tensors, {model}"),
        ("from", f"{_axes(outcome.trainer)}: {trainer} ranks"),
        ("to", f"{_axes(_as_given(outcome.engine))}: {engine} ranks"),
        ("part", "all of the plan" if plan.part is None else str(plan.part)),
        ("moved", f"{size_text(plan.nbytes)} in {len(plan.transfers)} transfers"),
        ("within hosts", size_text(traffic.bytes_within_hosts)),
        ("least time", f"egress {traffic.egress_seconds:.4g} s, ingress {traffic.ingress_seconds:.4g} s"),
        ("proof", _proved(outcome)),
    ]
    rules = Counter(f"{item.dtype}, {item.rule}" for item in outcome.verdict.conversions)
    rows += [("converted", f"{count} parameters of engine ranks: {rule}") for rule, count in sorted(rules.items())]
    if outcome.comparison is not None:
        compared = outcome.comparison
        if "layers" in compared:
            rows.append(("sampled", f"{compared['layers']} of {compared['of_layers']} layers fit into --max-memory"))
            if compared["left_out"]:
                rows.append(("not verified", f"{', '.join(compared['left_out'])}: allow more --max-memory"))
        rows.append(("compared", f"{compared['elements']} elements equal those of the dense model"))
        rows.append(("padding", f"{compared['untouched']} elements are as they were"))
        rows.append(("staged", f"{size_text(compared['peak_staged_bytes'])} at most"))
    rows.append(("digest", plan.digest))
    rows.append(("took", ", ".join(f"{name} {value:.2f} s" for name, value in outcome.seconds.items())))
    return rows


def _as_given(engine: Mapping[str, int]) -> dict[str, int]:
    """The axes of an :class:`EngineMesh` as ``--to`` accepts them."""
    sizes = {name: engine[name] for name in ("tp", "pp", "dp")}
    return sizes | {"ep": sizes["tp"] * sizes["dp"] if engine["expert_parallel"] else 1}


def _axes(mesh: Mapping[str, int]) -> str:
    plain = {**asdict(TrainerMesh()), **_as_given(asdict(EngineMesh()))}
    return ", ".join(f"{name}={value}" for name, value in mesh.items() if value != plain[name]) or "one rank"


def _proved(outcome: PlanOutcome) -> str:
    if outcome.plan.part is not None and outcome.plan.part.side == "source":
        return f"proved: {outcome.verdict.transfers} transfers read what is held and go where they are wanted"
    return f"proved: {outcome.verdict.elements} elements of {outcome.verdict.boxes} boxes are each written exactly once"


def _left_out(count: int) -> str | None:
    return f"the largest {_ROWS} of {count}; all with --json" if count > _ROWS else None
