"""Time and memory of planning a refit between large clusters, from a configuration alone, on one core.

    python -m benchmarks.refit_plan [--model qwen3-235b|deepseek-v3] [--what destination|source|registry|whole|take]
        [--json FILE]

Each measurement runs in a process of its own. ``destination`` and ``source`` are what one rank computes in a live
refit, with what the others have told it, which is made beforehand and not timed. ``registry`` is what the first trainer
rank does for all others. ``whole`` is what the command ``plan`` does: everything, for all ranks. ``take`` is what all
parties together do before an engine of TP 8 takes versions from another one (only ``total_s`` counts). Without
arguments all are made. Times are seconds of one core's time, which other work on the machine does not add to; memory is
the process's peak (``ru_maxrss``), of which most is preparation where one rank is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from msgspec.msgpack import decode, encode

from benchmarks.command_line import writable_file
from megatron_patches.refit.control.messages import Held, Orders, Step
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.parties.agreement import agree_as_destination, agree_as_source
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.planning.layouts import holder_of, receiver_of
from megatron_patches.refit.planning.local import SourceIndex
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS, PartOf, Plan, plan_for
from megatron_patches.refit.planning.proof import prove, prove_with
from megatron_patches.refit.planning.tensors import unfold_tensors
from megatron_patches.refit.planning.transfers import Moves, Request, check_requests, moves_of
from megatron_patches.refit.simulation.cluster import Sides, describe_cluster, engine_mesh, trainer_mesh
from megatron_patches.refit.simulation.fleet import CpuClock, Fleet, asked_bytes, holders_in, without_others
from megatron_patches.refit.simulation.models import MODELS
from megatron_patches.refit.target.vllm_layout import engine_manifest

WHAT = ("destination", "source", "registry", "whole", "take")
RANK = 5
"""Which destination or source is measured."""


@dataclass(frozen=True)
class Setting:
    """Two clusters, as the command line of ``python -m megatron_patches.refit plan`` takes them."""

    trainer: str
    engine: str


SETTINGS: Mapping[str, Setting] = {
    "qwen3-235b": Setting("tp=4,etp=2,pp=2,ep=32,expert_etp=2,dp=8", "tp=8,dp=8,ep=64"),
    "deepseek-v3": Setting("tp=2,etp=2,pp=4,first=16,ep=32,expert_etp=2,dp=16", "tp=8,dp=32,ep=256"),
}


@dataclass(frozen=True)
class Measurement:
    """One run.

    Attributes:
        model: key of ``SETTINGS``.
        what: one of ``WHAT``.
        describe_s: CPU seconds to describe what the rank holds or wants, or that of all; in the registry, to agree on
            the model.
        plan_s: CPU seconds to plan; on a source, to make transfers of what is asked; in the registry, to find the
            layouts that overlap what each destination wants.
        prove_s: CPU seconds to prove; on a source, to check what is asked; in the registry, to pass requests on.
        total_s: their sum.
        peak_bytes: peak memory of the process.
        transfers: transfers made; 0 in the registry, which makes none.
        moved_bytes: bytes of these transfers.
        busiest_source: bytes of the busiest source over the mean; 0 where the plan is not that of all.
        digest: digest of the plan.
    """

    model: str
    what: str
    describe_s: float
    plan_s: float
    prove_s: float
    total_s: float
    peak_bytes: int
    transfers: int
    moved_bytes: int
    busiest_source: float
    digest: str


def measure(model: str, what: str) -> Measurement:
    """Plans in this process, and measures it."""
    clock = CpuClock()
    sides = _sides(model)
    plan = {"destination": _destination, "source": _source, "registry": _registry, "whole": _whole, "take": _take}[
        what
    ](sides, clock)
    sent = plan.bytes_by_source()
    return Measurement(
        model=model,
        what=what,
        describe_s=clock.seconds["describe"],
        plan_s=clock.seconds["plan"],
        prove_s=clock.seconds["prove"],
        total_s=sum(clock.seconds.values()),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        transfers=len(plan.transfers),
        moved_bytes=plan.nbytes,
        busiest_source=max(sent.values()) * sides.trainer.size / plan.nbytes if what == "whole" else 0.0,
        digest=plan.digest,
    )


def _sides(model: str) -> Sides:
    setting = SETTINGS[model]
    family = family_from_config(MODELS[model])
    return Sides(family=family, trainer=trainer_mesh(setting.trainer), engine=engine_mesh(setting.engine))


def _whole(sides: Sides, clock: CpuClock) -> Plan:
    with clock.phase("describe"):
        cluster = describe_cluster(sides)
    with clock.phase("plan"):
        plan = cluster.plan(DEFAULT_OPTIONS)
    with clock.phase("prove"):
        prove(plan, cluster.sources, cluster.destinations)
    return plan


def _orders(fleet: Fleet) -> list[bytes]:
    """What all engine workers ask of each trainer rank."""
    overlaps = fleet.overlaps()
    asked = (fleet.requests_of(worker, SourceIndex(holders_in(told))) for worker, told in enumerate(overlaps))
    return fleet.orders([asked_bytes(requests) for requests in asked])


def _destination(sides: Sides, clock: CpuClock) -> Plan:
    fleet = Fleet(sides)
    overlap = fleet.overlaps()[RANK]
    with without_others():
        return _plan_and_prove(sides, fleet, overlap, clock)


def _plan_and_prove(sides: Sides, fleet: Fleet, overlap: bytes, clock: CpuClock) -> Plan:
    with clock.phase("describe"):
        unfold_tensors(fleet.told.grids)
        wanted = receiver_of(sides.wanted_by(RANK))
    with clock.phase("plan"):
        holders = holders_in(overlap)
        plan, _ = plan_for(fleet.told.grids, SourceIndex(holders), wanted, DEFAULT_OPTIONS)
        _ = plan.digest
    with clock.phase("prove"):
        prove_with(plan, holders, [wanted])
    return plan


def _source(sides: Sides, clock: CpuClock) -> Plan:
    fleet = Fleet(sides)
    orders = decode(_orders(fleet)[RANK], type=Orders[list[Request]])
    with without_others():
        return _check(sides, fleet, orders, clock)


def _check(sides: Sides, fleet: Fleet, orders: Orders[list[Request]], clock: CpuClock) -> Plan:
    with clock.phase("describe"):
        layout = holder_of(sides.held_by(RANK)).layout
    moves: list[Moves] = []
    for destination, requests in orders.requests:
        with clock.phase("prove"):
            check_requests(requests, layout, RANK, destination)
        with clock.phase("plan"):
            moves += moves_of(requests, layout, RANK, destination)
    with clock.phase("plan"):
        plan = Plan(fleet.told.grids, tuple(moves), PartOf("source", RANK))
        _ = plan.digest
    return plan


def _registry(sides: Sides, clock: CpuClock) -> Plan:
    fleet = Fleet(sides)
    _orders(fleet)
    for phase, step in (("describe", Step.DESCRIBING), ("plan", Step.RECORDING), ("prove", Step.PLANNING)):
        clock.seconds[phase] = fleet.clock.seconds[step]
    return Plan((), ())


class _Meeting:
    """Steps of parties that are threads of this process.

    Args:
        sources: number of sources.
        size: number of parties.
    """

    def __init__(self, sources: int, size: int) -> None:
        registry = Registry(sources)
        self.parts, self.answers = [b""] * size, [b""] * size
        self.what = ""
        self.begin = threading.Barrier(size, lambda: setattr(self, "answers", registry.answer(self.what, self.parts)))
        self.end = threading.Barrier(size)


class _Member:
    """A party of a meeting; see :class:`megatron_patches.refit.parties.agreement.Steps`."""

    def __init__(self, meeting: _Meeting, party: int) -> None:
        self._meeting, self.party = meeting, party

    def exchange[A](self, what: str, kind: type[A], work: Callable[[], object]) -> A:
        meeting = self._meeting
        meeting.what, meeting.parts[self.party] = what, encode(work())
        meeting.begin.wait()
        answer = decode(meeting.answers[self.party], type=kind)
        meeting.end.wait()
        return answer


def _take(sides: Sides, clock: CpuClock) -> Plan:
    mesh = engine_mesh("tp=8,ep=8")
    layouts = [engine_manifest(sides.family.traits, mesh, rank, sides.options.dtype) for rank in range(mesh.size)]
    sources = 1 + mesh.size  # the trainer's first rank describes the model, and holds nothing
    held = [Held({}, dict(sides.family.shapes()), Manifest(0, "", (), ()), partial=True)]
    held += [Held({}, {}, replace(layout, rank=layout.rank + 1)) for layout in layouts]
    meeting = _Meeting(sources, sources + mesh.size)

    def agree(party: int) -> Plan:
        member = _Member(meeting, party)
        if party < sources:
            return agree_as_source(member, lambda: held[party]).plan
        return agree_as_destination(member, lambda _: layouts[party - sources]).plan

    with ThreadPoolExecutor(sources + mesh.size) as pool, clock.phase("agree"):
        return list(pool.map(agree, range(sources + mesh.size)))[sources]


def in_own_process(model: str, what: str) -> Measurement:
    """Measures in a fresh process of one thread."""
    command = [sys.executable, "-m", "benchmarks.refit_plan", "--model", model, "--what", what, "--here"]
    environment, root = {**os.environ, "OMP_NUM_THREADS": "1"}, Path(__file__).parents[1]
    done = subprocess.run(  # noqa: S603 - built above
        command, cwd=root, env=environment, check=True, capture_output=True, text=True, timeout=1800
    )
    return Measurement(**json.loads(done.stdout))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SETTINGS))
    parser.add_argument("--what", choices=WHAT)
    parser.add_argument("--json", type=writable_file, help="write the measurements here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(asdict(measure(options.model, options.what))))
        return
    found = []
    for model in [options.model] if options.model else list(SETTINGS):
        for what in [options.what] if options.what else WHAT:
            one = in_own_process(model, what)
            found.append(asdict(one))
            print(
                f"{model:12} {what:12} describe {one.describe_s:5.1f} s  plan {one.plan_s:5.1f} s  prove "
                f"{one.prove_s:5.1f} s  total {one.total_s:6.1f} s  peak {one.peak_bytes / 2**30:4.2f} GiB  "
                f"{one.transfers} transfers  busiest source {one.busiest_source:.3f}  "
                f"{one.digest[:12]}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
