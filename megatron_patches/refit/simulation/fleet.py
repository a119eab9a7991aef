"""All parties of a refit without their processes, a registry of what sources hold, and what single parties cost.

After planning, each party says where it runs and where it listens, and both ends of a link greet each other. Names,
addresses and secrets are made up, of the length that real ones have. To tell what a party costs, the code of a real
refit is run for it, and its messages are counted.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.msgpack import decode, encode

from megatron_patches.refit.control.messages import Asked, Held, Model, Orders, Overlap, Step, Wanted
from megatron_patches.refit.memory.loads import Reach
from megatron_patches.refit.parties.agreement import Agreed, agree_as_destination, agree_as_source
from megatron_patches.refit.parties.choosing import Locality
from megatron_patches.refit.parties.registry import Registry, registered
from megatron_patches.refit.parties.terms import LinkOptions, links_of_party, terms_of
from megatron_patches.refit.planning.layouts import Holder, Layout, holder_of, layout_of
from megatron_patches.refit.planning.local import SourceIndex, plan_destination
from megatron_patches.refit.planning.plan import DEFAULT_OPTIONS
from megatron_patches.refit.planning.transfers import Request
from megatron_patches.refit.simulation.cluster import Sides
from megatron_patches.refit.transports.base import Offer, TransportName
from megatron_patches.refit.transports.frames import SECRET_BYTES
from megatron_patches.refit.transports.messages import Hello, encode_message

NOTHING = encode(None)
"""Part and answer of a party in a step in which it only says that it has succeeded."""


class CpuClock:
    """CPU seconds of this process, by phase. Other work on the machine does not count.

    Attributes:
        seconds: CPU seconds by phase.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of its body to ``name``."""
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began


class Fleet:
    """The parties of a refit, and the first trainer rank's registry, to which all sources have registered.

    Args:
        sides: the two sides.

    Attributes:
        sides: the two sides.
        holders: what each trainer rank holds.
        model: the model as sent to all parties, encoded.
        clock: CPU time of the registry, by step.
        through_bytes: bytes to and from the registry, by step.

    Raises:
        RefitError: if model and meshes do not match.
    """

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.clock = CpuClock()
        self.through_bytes: dict[str, int] = defaultdict(int)
        self._registry = Registry(sides.trainer.size)
        self._layouts: dict[int, Layout] = {}
        self.holders: list[Holder] = []
        parts: list[bytes] = []
        for rank in range(sides.trainer.size):
            held = self.held(rank)
            self.holders.append(holder_of(held.manifest))
            parts.append(encode(registered(held, self.holders[-1].layout)))
        parts += [encode(None)] * sides.workers
        self.model = self.tell(Step.DESCRIBING, parts)[0]

    @property
    def told(self) -> Model:
        """:attr:`model`, decoded."""
        return decode(self.model, type=Model)

    def held(self, rank: int) -> Held:
        """What a source registers."""
        # Only the layout is used of sources other than the first.
        shapes = dict(self.sides.family.shapes()) if rank == 0 else {}
        return Held({}, shapes, self.sides.held_by(rank))

    def tell(self, what: str, parts: Sequence[bytes]) -> list[bytes]:
        """The registry's answers in a step to the parts of all parties, in order of party numbers."""
        with without_others(), self.clock.phase(what):
            answers = self._registry.answer(what, list(parts))
        self.through_bytes[what] += sum(map(len, parts)) + sum(map(len, answers))
        return answers

    def layout_wanted_by(self, worker: int) -> Layout:
        """What an engine worker wants. Equal for all engines."""
        place = worker % self.sides.engine.size
        if place not in self._layouts:
            self._layouts[place] = layout_of(self.sides.wanted_by(place))
        return self._layouts[place]

    def layouts_wanted(self) -> list[Layout]:
        """What the workers of one engine want."""
        return [self.layout_wanted_by(place) for place in range(self.sides.engine.size)]

    def overlaps(self) -> list[bytes]:
        """The encoded overlap for each engine worker. Workers that want the same share one object."""
        parts = [encode(Wanted(()))] * self.sides.trainer.size
        places = []
        for place in range(self.sides.engine.size):
            regions = tuple(template.region for template in self.layout_wanted_by(place).templates)
            places.append(encode(Wanted(regions)))
        return self.tell(Step.RECORDING, parts + places * self.sides.engines)[self.sides.trainer.size :]

    def requests_of(self, worker: int, sources: SourceIndex) -> dict[int, list[Request]]:
        """What an engine worker requests of each trainer rank.

        Args:
            worker: the worker.
            sources: the sources that overlap what it wants.
        """
        wanted = self.layout_wanted_by(worker)
        return plan_destination(worker, self.sides.host_of(worker), wanted, sources, DEFAULT_OPTIONS.split_bytes)

    def orders(self, asked: Sequence[bytes]) -> list[bytes]:
        """The encoded orders for each trainer rank, given the engine workers' requests in order."""
        parts = [encode(Asked[list[Request]]({}, ""))] * self.sides.trainer.size
        return self.tell(Step.PLANNING, [*parts, *asked])[: self.sides.trainer.size]

    def connect(self, workers: int) -> list[bytes]:
        """The parties' steps after planning.

        Args:
            workers: how many engine workers' requests have been planned.

        Returns:
            The encoded offers for each party: those of its peers.
        """
        parties = range(self.sides.trainer.size + self.sides.workers)
        self.tell(Step.CHECKING, [NOTHING] * len(parties))
        self.tell(Step.CHOOSING, [encode(self.locality_of(party)) for party in parties])
        planned = parties[: self.sides.trainer.size + workers]
        offers = self.tell(Step.LISTENING, [encode(self.offer_of(party)) for party in planned])
        self.tell(Step.LINKING, [NOTHING] * len(parties))
        return offers

    def locality_of(self, party: int) -> Locality:
        """Where a party runs, as it says in a refit."""
        worker = party - self.sides.trainer.size
        host = self.holders[party].host if worker < 0 else self.sides.host_of(worker)
        return Locality(f"{host:.<47}", "12", nixl=True)

    def offer_of(self, party: int) -> Offer:
        """What a party offers to its peers. Only destinations listen."""
        listens = party >= self.sides.trainer.size
        return Offer(
            address="10.100.100.100:50000" if listens else "",
            slot_bytes=64 << 20,
            memory="cuda",
            reach=Reach.CONTIGUOUS.value,
            secret=bytes(SECRET_BYTES if listens else 0),
        )


@contextmanager
def without_others() -> Iterator[None]:
    """Excludes existing objects from garbage collection: a real party's memory holds none of the other parties."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def holders_in(overlap: bytes) -> list[Holder]:
    """The sources in an overlap."""
    told = decode(overlap, type=Overlap)
    return [Holder(rank, host, told.layouts[number]) for rank, host, number in told.holders]


def asked_bytes(requests: Mapping[int, list[Request]]) -> bytes:
    """A destination's encoded requests. The digest is a placeholder of the same length."""
    return encode(Asked(dict(requests), "0" * 64))


@dataclass(frozen=True, kw_only=True)
class WorkerCost:
    """Cost of planning and linking for one worker.

    Attributes:
        rank: rank on its side.
        seconds: its CPU seconds, from describing its weights to a proved or checked plan and the terms of its links.
        messages: number of messages sent and received, those between the two ends of a link included.
        received_bytes: bytes of messages received.
        sent_bytes: bytes of messages sent.
        peers: number of sources that it requests from, or of engine workers that request from it. It talks to no others
            but the registry.
        requests: number of requests that it makes or checks.
        weight_bytes: bytes of weights that it receives or sends per version.
    """

    rank: int
    seconds: float
    messages: float
    received_bytes: float
    sent_bytes: float
    peers: float
    requests: float
    weight_bytes: float


class SimulatedSteps:
    """Replaces a party's :class:`megatron_patches.refit.control.assembly.Assembly`; see ``parties/agreement.py``.

    Args:
        party: the party's number.
        answers: encoded answers to the party, by step.

    Attributes:
        party: the party's number.
        answers: encoded answers to the party, by step.
        sent: encoded parts of the party, by step.
        clock: its CPU time, by step.
    """

    def __init__(self, party: int, answers: Mapping[str, bytes]) -> None:
        self.party = party
        self.sent: dict[str, bytes] = {}
        self.clock = CpuClock()
        self.answers = answers

    def exchange[A](self, what: str, kind: type[A], work: Callable[[], object]) -> A:
        """Does this party's part of a step. Returns the prepared answer."""
        with self.clock.phase(what):
            self.sent[what] = encode(work())
            return decode(self.answers[what], type=kind)


def run_destination(fleet: Fleet, rank: int, overlap: bytes, offers: bytes) -> WorkerCost:
    """Runs an engine worker, which plans its requests, proves the plan, and prepares its links.

    Args:
        fleet: the other parties.
        rank: the worker.
        overlap: encoded overlap for the worker.
        offers: encoded offers of the sources from which it draws.

    Raises:
        RefitError: if no plan covers what it wants.
    """
    party, orders = fleet.sides.trainer.size + rank, encode(Orders[list[Request]]([], ""))
    steps = SimulatedSteps(party, _answers(fleet, overlap, orders, offers))
    agreed = agree_as_destination(steps, lambda _model: fleet.sides.wanted_by(rank))
    asked = decode(steps.sent[Step.PLANNING], type=Asked[list[Request]])
    return _linked(fleet, rank, steps, agreed, sum(map(len, asked.requests.values())), 1.0)


def run_source(fleet: Fleet, rank: int, orders: bytes, offers: bytes, scale: float) -> WorkerCost:
    """Runs a trainer rank, which describes what it holds, checks the requests to it, and prepares its links.

    Args:
        fleet: the other parties.
        rank: the rank.
        orders: encoded requests to the rank.
        offers: encoded offers of the engine workers that draw from it.
        scale: number of engines per engine whose requests are in ``orders``. Figures that grow with the number of
            engines are multiplied by it.

    Raises:
        RefitError: if a request is for something that the rank does not hold.
    """
    steps = SimulatedSteps(rank, _answers(fleet, encode(Overlap([], [])), orders, offers))
    agreed = agree_as_source(steps, lambda: fleet.held(rank))
    told = decode(orders, type=Orders[list[Request]])
    return _linked(fleet, rank, steps, agreed, sum(len(found) for _, found in told.requests), scale)


def _answers(fleet: Fleet, overlap: bytes, orders: bytes, offers: bytes) -> Mapping[str, bytes]:
    return {
        Step.DESCRIBING: fleet.model,
        Step.RECORDING: overlap,
        Step.PLANNING: orders,
        Step.CHECKING: NOTHING,
        Step.CHOOSING: encode(TransportName.NIXL),
        Step.LISTENING: offers,
        Step.LINKING: NOTHING,
    }


def _linked(fleet: Fleet, rank: int, steps: SimulatedSteps, agreed: Agreed, requests: int, scale: float) -> WorkerCost:
    """Takes the steps after planning, as ``parties/party.py`` does, except the connections themselves."""
    plan, sources, party = agreed.plan, fleet.sides.trainer.size, steps.party
    transport = steps.exchange(Step.CHOOSING, TransportName, lambda: fleet.locality_of(party))
    mine = fleet.offer_of(party)
    offers = {**steps.exchange(Step.LISTENING, dict[int, Offer], lambda: mine), party: mine}
    options = LinkOptions(transport=None, staging_bytes=mine.slot_bytes, sources=sources)

    def greet() -> None:
        terms_of(plan, links_of_party(plan, party, sources), offers, options, transport)
        hellos.extend(encode_message(Hello(link[0], digest, mine.slot_bytes)) for link, digest in plan.digests.items())
        _ = plan.transfers  # from which packets are cut

    hellos: list[bytes] = []
    steps.exchange(Step.LINKING, type(None), greet)
    seconds = steps.clock.seconds
    fixed = sum(seconds[what] for what in (Step.DESCRIBING, Step.RECORDING, Step.CHOOSING))
    grown = sum(len(steps.answers[what]) for what in (Step.PLANNING, Step.LISTENING))
    greeted = scale * sum(SECRET_BYTES + len(hello) for hello in hellos)
    return WorkerCost(
        rank=rank,
        seconds=fixed + scale * (sum(seconds.values()) - fixed),
        messages=2 * len(steps.sent) + scale * len(hellos),
        received_bytes=sum(map(len, steps.answers.values())) + (scale - 1) * grown + (party >= sources) * greeted,
        sent_bytes=sum(map(len, steps.sent.values())) + (party < sources) * greeted,
        peers=scale * len(plan.by_link),
        requests=scale * requests,
        weight_bytes=scale * plan.nbytes,
    )
