"""Simulates a refit of a fleet: what planning costs each kind of worker and the registry, and how versions fan out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from msgspec.structs import astuple

from megatron_patches.refit.control.messages import Step
from megatron_patches.refit.planning.fan_out import Server, Waiting, Wave, fan_out, least_units
from megatron_patches.refit.planning.grids import size_of
from megatron_patches.refit.planning.layouts import Layout
from megatron_patches.refit.planning.local import SourceIndex, even_shares
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.simulation.cluster import Sides
from megatron_patches.refit.simulation.fleet import (
    Fleet,
    WorkerCost,
    asked_bytes,
    holders_in,
    run_destination,
    run_source,
    without_others,
)


@dataclass(frozen=True, kw_only=True)
class WorkerKind:
    """Workers of one pipeline stage.

    Attributes:
        name: name of the kind.
        count: number of workers.
        measured: the workers that were run: some of each set whose layouts differ only in places. The largest value of
            each figure counts.
    """

    name: str
    count: int
    measured: tuple[WorkerCost, ...]

    def most(self, figure: str) -> float:
        """The largest value of an attribute of :class:`WorkerCost`."""
        return max(float(getattr(worker, figure)) for worker in self.measured)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly trainer ranks send.

    Attributes:
        engines: engines whose requests were planned.
        busiest_bytes: bytes that the busiest trainer rank sends them.
        mean_bytes: mean bytes that trainer ranks send them.
        even_bytes: bytes that the busiest rank would send if all candidates for a part sent an equal share of it.
    """

    engines: int
    busiest_bytes: int
    mean_bytes: float
    even_bytes: float

    @property
    def over_even(self) -> float:
        """Bytes of the busiest trainer rank, relative to an even division."""
        return self.busiest_bytes / self.even_bytes


@dataclass(frozen=True, kw_only=True)
class SimulatedFanOut:
    """How a version reaches all replicas of an engine.

    Attributes:
        replicas: number of replicas.
        copies: how many of them the trainer serves at full speed at a time.
        unit_seconds: seconds in which a replica receives a version at full speed, with all bytes between hosts.
        waves: the waves, in order.
        least_units: lower bound on the time of any schedule.
    """

    replicas: int
    copies: float
    unit_seconds: float
    waves: tuple[Wave, ...]
    least_units: float

    @property
    def units(self) -> float:
        """Time of all waves, in units."""
        return float(self.waves[-1].end)

    @property
    def over_least(self) -> float:
        """That time, relative to the lower bound."""
        return self.units / self.least_units


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The results.

    Attributes:
        engines: number of engines.
        kinds: kinds of workers, trainer first.
        registry_seconds: CPU seconds of the registry on the first trainer rank, by step.
        registry_bytes: bytes to and from the registry, by step.
        balance: how evenly trainer ranks send.
        fan_out: the waves.
    """

    engines: int
    kinds: tuple[WorkerKind, ...]
    registry_seconds: Mapping[str, float]
    registry_bytes: Mapping[str, float]
    balance: Balance
    fan_out: SimulatedFanOut

    @property
    def sampled(self) -> bool:
        """Whether requests were planned for only some of the engines."""
        return self.balance.engines < self.engines


def simulate(
    sides: Sides, workers: int, requests: int, replicas: int, bytes_per_s: float, progress: Progress
) -> Simulation:
    """Runs the simulation.

    Args:
        sides: trainer and engines.
        workers: how many workers of each kind describe, plan and prove as in a real refit; at least one. Workers whose
            layouts differ only in places are of one kind.
        requests: plan the requests of at least this many engine workers, at least one, in whole engines. They determine
            what each trainer rank sends.
        replicas: number of engines that the version reaches in waves.
        bytes_per_s: bandwidth of an engine worker, in each direction.
        progress: receives each phase.

    Raises:
        RefitError: if model and meshes do not match, or no plan covers what engines want.
    """
    progress.phase("describe", 0)
    fleet = Fleet(sides)
    overlaps = fleet.overlaps()
    engines = min(sides.engines, math.ceil(requests / sides.engine.size))
    scale = sides.engines / engines
    progress.phase("plan", 0)
    asked, balance = _requests(fleet, engines, overlaps)
    orders = fleet.orders(asked)
    offers = fleet.connect(len(asked))
    progress.phase("run workers", 0)
    with without_others():
        wanting = _run(
            _kinds("engine", fleet.layouts_wanted(), lambda rank: rank // sides.engine.tp % sides.engine.pp),
            workers,
            lambda rank: run_destination(fleet, rank, overlaps[rank], offers[sides.trainer.size + rank]),
            sides.engines,
        )
        holding = _run(
            _kinds(
                "trainer", [holder.layout for holder in fleet.holders], lambda rank: sides.trainer.coordinates(rank).pp
            ),
            workers,
            lambda rank: run_source(fleet, rank, orders[rank], offers[rank], scale),
        )
    grows = {step: scale if step in (Step.PLANNING, Step.LISTENING) else 1.0 for step in fleet.clock.seconds}
    received = max(kind.most("weight_bytes") for kind in wanting)
    return Simulation(
        engines=sides.engines,
        kinds=(*holding, *wanting),
        registry_seconds={step: fleet.clock.seconds[step] * by for step, by in grows.items()},
        registry_bytes={step: fleet.through_bytes[step] * by for step, by in grows.items()},
        balance=balance,
        fan_out=_fan_out(replicas, received, balance.busiest_bytes / engines, bytes_per_s),
    )


def _requests(fleet: Fleet, engines: int, overlaps: Sequence[bytes]) -> tuple[list[bytes], Balance]:
    """The encoded requests of the workers of some engines, and their balance."""
    sides = fleet.sides
    sent = dict.fromkeys(range(sides.trainer.size), 0)
    even: dict[int, float] = defaultdict(float)
    asked: list[bytes] = []
    for place in range(sides.engine.size):
        index, wanted = SourceIndex(holders_in(overlaps[place])), fleet.layout_wanted_by(place)
        for rank in range(place, engines * sides.engine.size, sides.engine.size):
            requests = fleet.requests_of(rank, index)
            for source, found in requests.items():
                sent[source] += sum(request.nbytes for request in found)
            for source, share in even_shares(sides.host_of(rank), wanted, index, DEFAULT_OPTIONS.split_bytes).items():
                even[source] += share
            asked.append(asked_bytes(requests))
    by_rank = [asked[place * engines + engine] for engine in range(engines) for place in range(sides.engine.size)]
    return by_rank, Balance(
        engines=engines,
        busiest_bytes=max(sent.values()),
        mean_bytes=sum(sent.values()) / len(sent),
        even_bytes=max(even.values()),
    )


def _fan_out(replicas: int, received: float, sent: float, bytes_per_s: float) -> SimulatedFanOut:
    """The waves, if the trainer is as fast as its busiest rank.

    Args:
        replicas: number of engines that want the version.
        received: bytes that the busiest worker of an engine receives.
        sent: bytes that the busiest trainer rank sends an engine.
        bytes_per_s: bandwidth of either.
    """
    exact = Fraction(received) / Fraction(sent)
    # Round down to whole copies, or to simple fractions: many different fractions take long to compute and gain little.
    parts = 64 << math.floor(1 / exact).bit_length() - 1 if exact < 1 else 8 if exact < 8 else 1
    copies = Fraction(math.floor(parts * exact), parts)
    waves = fan_out(
        [Server(name="trainer", copies=copies)], [Waiting(name=f"engine {number}") for number in range(replicas)]
    )
    return SimulatedFanOut(
        replicas=replicas,
        copies=float(copies),
        unit_seconds=received / bytes_per_s,
        waves=waves,
        least_units=float(least_units(exact, replicas)),
    )


def _run(
    kinds: Mapping[str, Sequence[Sequence[int]]], count: int, run: Callable[[int], WorkerCost], times: int = 1
) -> list[WorkerKind]:
    """Runs workers of each kind. The number of workers is ``times`` the number of ranks."""
    return [
        WorkerKind(
            name=name,
            count=times * sum(map(len, alike)),
            measured=tuple(run(rank) for ranks in alike for rank in _spread(ranks, count)),
        )
        for name, alike in kinds.items()
    ]


def _kinds(side: str, layouts: Sequence[Layout], stage_of: Callable[[int], int]) -> dict[str, list[list[int]]]:
    """Ranks by pipeline stage, grouped by layouts that differ only in places."""
    stages: dict[int, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, layout in enumerate(layouts):
        stages[stage_of(rank)][_sizes(layout)].append(rank)
    return {
        f"{side}, stage {stage}" if len(stages) > 1 else side: list(alike.values())
        for stage, alike in sorted(stages.items())
    }


def _sizes(layout: Layout) -> object:
    """What layouts of one kind have in common."""
    return tuple(
        sorted(
            (
                template.region.tensor,
                size_of(template.region.axes),
                template.region.box.shape,
                astuple(layout.kind(template)),
            )
            for template in layout.templates
        )
    )


def _spread(ranks: Sequence[int], count: int) -> list[int]:
    """``count`` ranks at even distances, or all."""
    count = min(count, len(ranks))
    return [ranks[index * len(ranks) // count] for index in range(count)]
