"""One worker of a simulated refit. It runs the code of a real refit, and its messages are counted."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.msgpack import decode, encode

from megatron_patches.refit.parties.agreement import Agreed, agree_as_destination, agree_as_source
from megatron_patches.refit.parties.messages import DESCRIBING, PLANNING, RECORDING, Asked, Orders, Overlap
from megatron_patches.refit.planning.requests import Request
from megatron_patches.refit.simulation.fleet import Fleet


@dataclass(frozen=True, kw_only=True)
class WorkerCost:
    """Cost of planning for one worker.

    Attributes:
        rank: rank on its side.
        seconds: its CPU seconds, from describing its weights to a proved or checked plan.
        received_bytes: bytes of messages received.
        sent_bytes: bytes of messages sent.
        peers: number of sources that it requests from, or of engine workers that request from it.
        requests: number of requests that it makes or checks.
        weight_bytes: bytes of weights that it receives or sends per version.
    """

    rank: int
    seconds: float
    received_bytes: float
    sent_bytes: float
    peers: float
    requests: float
    weight_bytes: float


class SimulatedSteps:
    """Replaces a party's :class:`megatron_patches.refit.assembly.Assembly`; see ``parties/agreement.py``.

    Args:
        party: the party's number.
        answers: encoded answers to the party, by step.

    Attributes:
        party: the party's number.
        answers: encoded answers to the party, by step.
        sent: encoded parts of the party, by step.
        received_bytes: bytes of all answers so far.
        seconds: its CPU seconds, by step.
    """

    def __init__(self, party: int, answers: Mapping[str, bytes]) -> None:
        self.party = party
        self.sent: dict[str, bytes] = {}
        self.received_bytes = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.answers = answers

    def exchange[A](self, what: str, kind: type[A], work: Callable[[], object]) -> A:
        """Does this party's part of a step. Returns the prepared answer."""
        with self._timed(what):
            self.sent[what] = encode(work())
            answer = self.answers[what]
            self.received_bytes += len(answer)
            return decode(answer, type=kind)

    def gather[T](self, what: str, kind: type[T], work: Callable[[], T]) -> list[T]:  # noqa: ARG002 - the assembly's
        """Does this party's part of a step. Returns only its own part."""
        with self._timed(what):
            return [work()]

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[what] += time.process_time() - began


def run_destination(fleet: Fleet, rank: int, overlap: bytes) -> WorkerCost:
    """Runs an engine worker, which plans its requests and proves the plan.

    Args:
        fleet: the other parties.
        rank: the worker.
        overlap: encoded overlap for the worker.

    Raises:
        RefitError: if no plan covers what it wants.
    """
    answers = {DESCRIBING: fleet.model, RECORDING: overlap, PLANNING: encode(Orders[list[Request]]([], "", 0))}
    steps = SimulatedSteps(fleet.sides.trainer.size + rank, answers)
    agreed = agree_as_destination(steps, lambda _model: fleet.sides.wanted_by(rank))
    asked = decode(steps.sent[PLANNING], type=Asked[list[Request]])
    return _worker(rank, steps, agreed, len(asked.requests), sum(map(len, asked.requests.values())), 1.0)


def run_source(fleet: Fleet, rank: int, orders: bytes, scale: float) -> WorkerCost:
    """Runs a trainer rank, which describes what it holds and checks the requests to it.

    Args:
        fleet: the other parties.
        rank: the rank.
        orders: encoded requests to the rank.
        scale: number of engines per engine whose requests are in ``orders``. Figures that grow with the number of
            engines are multiplied by it.

    Raises:
        RefitError: if a request is for something that the rank does not hold.
    """
    steps = SimulatedSteps(rank, {DESCRIBING: fleet.model, RECORDING: encode(Overlap([], [])), PLANNING: orders})
    agreed = agree_as_source(steps, lambda: fleet.held(rank))
    told = decode(orders, type=Orders[list[Request]])
    return _worker(rank, steps, agreed, len(told.requests), sum(len(found) for _, found in told.requests), scale)


def _worker(rank: int, steps: SimulatedSteps, agreed: Agreed, peers: int, requests: int, scale: float) -> WorkerCost:
    fixed = sum(steps.seconds[what] for what in (DESCRIBING, RECORDING))
    orders = len(steps.answers[PLANNING])
    return WorkerCost(
        rank=rank,
        seconds=fixed + scale * (sum(steps.seconds.values()) - fixed),
        received_bytes=steps.received_bytes + (scale - 1) * orders,
        sent_bytes=sum(map(len, steps.sent.values())),
        peers=scale * peers,
        requests=scale * requests,
        weight_bytes=scale * agreed.plan.nbytes,
    )


@contextmanager
def without_others() -> Iterator[None]:
    """Excludes existing objects from garbage collection: a real worker's memory holds none of the other parties."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
