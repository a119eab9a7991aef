"""One worker of a simulated refit: it runs what it would run among processes, and its messages are counted."""

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
    """What planning was for one worker.

    Attributes:
        rank: on its side.
        seconds: CPU seconds of its own, from describing its weights to a plan that is proved or checked.
        received_bytes: of messages.
        sent_bytes: of messages.
        peers: sources that it asks, or engine workers that ask it.
        requests: that it makes, or that it checks.
        weight_bytes: that it receives, or sends, in each version.
    """

    rank: int
    seconds: float
    received_bytes: float
    sent_bytes: float
    peers: float
    requests: float
    weight_bytes: float


class SimulatedSteps:
    """Stands for a party's :class:`megatron_patches.refit.assembly.Assembly`; see ``parties/agreement.py``.

    Args:
        party: the party's number.
        answers: what the party is told, encoded, by step.

    Attributes:
        party: likewise.
        answers: likewise.
        sent: what it said, encoded, by step.
        received_bytes: of all answers so far.
        seconds: CPU seconds of its own, by step.
    """

    def __init__(self, party: int, answers: Mapping[str, bytes]) -> None:
        self.party = party
        self.sent: dict[str, bytes] = {}
        self.received_bytes = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.answers = answers

    def exchange[A](self, what: str, kind: type[A], work: Callable[[], object]) -> A:
        """Does this party's part of a step; what it is told."""
        with self._timed(what):
            self.sent[what] = encode(work())
            answer = self.answers[what]
            self.received_bytes += len(answer)
            return decode(answer, type=kind)

    def gather[T](self, what: str, kind: type[T], work: Callable[[], T]) -> list[T]:  # noqa: ARG002 - the assembly's
        """Does this party's part of a step; its own part, as if it were the only one."""
        with self._timed(what):
            return [work()]

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[what] += time.process_time() - began


def run_destination(fleet: Fleet, rank: int, overlap: bytes) -> WorkerCost:
    """An engine worker plans what it asks of which source, and proves it.

    Args:
        fleet: all others.
        rank: the worker.
        overlap: what it is told of the sources.

    Raises:
        RefitError: if no plan covers what it wants.
    """
    answers = {DESCRIBING: fleet.model, RECORDING: overlap, PLANNING: encode(Orders[list[Request]]([], "", 0))}
    steps = SimulatedSteps(fleet.sides.trainer.size + rank, answers)
    agreed = agree_as_destination(steps, lambda _model: fleet.sides.wanted_by(rank))
    asked = decode(steps.sent[PLANNING], type=Asked[list[Request]])
    return _worker(rank, steps, agreed, len(asked.requests), sum(map(len, asked.requests.values())), 1.0)


def run_source(fleet: Fleet, rank: int, orders: bytes, scale: float) -> WorkerCost:
    """A trainer rank describes what it holds and checks what is asked of it.

    Args:
        fleet: all others.
        rank: the rank.
        orders: what is asked of it.
        scale: how many engines there are for each of those whose requests are in ``orders``. What follows their number
            is multiplied by it.

    Raises:
        RefitError: if it is asked for what it does not hold.
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
    """Keeps the garbage collector from what is there already: what belongs to others is in no worker's memory."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
