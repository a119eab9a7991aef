"""One worker of a simulated refit. It runs the code of a real refit, and its messages are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.msgpack import decode, encode

from megatron_patches.refit.control.messages import Asked, Orders, Overlap, Step
from megatron_patches.refit.parties.agreement import Agreed, agree_as_destination, agree_as_source
from megatron_patches.refit.parties.terms import LinkOptions, links_of_party, terms_of
from megatron_patches.refit.planning.requests import Request
from megatron_patches.refit.simulation.fleet import NOTHING, CpuClock, Fleet
from megatron_patches.refit.transports.base import Offer, TransportName
from megatron_patches.refit.transports.frames import SECRET_BYTES
from megatron_patches.refit.transports.messages import Hello, encode_message


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
