"""The transport c10d over something that keeps NCCL's order: whatever meets whatever, all ends, with the right bits."""

from __future__ import annotations

import itertools
import re
import selectors
from collections import deque
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.memory.loads import Reach, Terms
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.transports import turns
from megatron_patches.refit.transports.base import Offer, Place
from megatron_patches.refit.transports.c10d import C10dTransport, _Details
from megatron_patches.refit.transports.turns import Turns
from tests.support.refit_cases import Case, Memory, grid
from tests.unit.refit.link_ends import SLOT, Ends
from tests.unit.refit.nccl_model import Batch, Communicator
from tests.unit.refit.test_parties import memory, values

SIZES = [(2, 2), (3, 2), (2, 3), (4, 4)]


def case_of(seed: int, sources: int, destinations: int) -> Case:
    """Every source holds something that every destination wants."""
    rng = np.random.default_rng(seed)
    tensors = [TensorSpec(f"t{index}", tuple(rng.integers(4, 17, 2).tolist()), "float32") for index in range(4)]
    holders, wanting = ([Memory(rng, rank) for rank in range(count)] for count in (sources, destinations))
    turn = itertools.cycle(holders)
    for spec in tensors:
        for row in range(spec.shape[0]):
            next(turn).place(spec.box.with_range(0, row, row + 1))
        for rank in wanting:
            for box in grid(rng, spec) if rng.random() < 0.5 else [spec.box]:
                rank.place(box)
    dense = {spec.name: rng.permutation(spec.numel).reshape(spec.shape) for spec in tensors}
    return Case(tensors, [part.manifest() for part in holders], [part.manifest() for part in wanting], dense)


class StorelessTransport(C10dTransport):
    """The model needs neither GPUs nor a store; opening torch's takes seconds where names are looked up slowly."""

    def details(self) -> bytes:
        return msgspec.msgpack.encode(_Details("", 0, f"GPU of {self._place.party}", "2"))

    def _open_store(self, *_: object, **__: object) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(port=0)


class Unfair(selectors.DefaultSelector):
    """Of the sources whose announcements have come, one at random is heard: as if networks had delayed the others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        return [ready[int(self._rng.integers(len(ready)))]] if ready else []


class Meeting:
    """The ends of a case over the model.

    Args:
        case: what is held and wanted.
        timeout_s: of every wait.
    """

    def __init__(self, case: Case, timeout_s: float = 20.0) -> None:
        self.case, self.plan = case, make_plan(*case.sides)
        self.held = [memory(manifest, values(case, 1)) for manifest in case.sources]
        self.communicator = Communicator(sum(map(len, case.sides[1:])))
        self.ends = Ends(self.plan, self.held, len(case.destinations), "cpu", self._transport, timeout_s)
        for rank, receiver in enumerate(self.ends.receivers):
            receiver._selector.close()
            receiver._selector = Unfair(rank)
        self.terms = dict.fromkeys(self.plan.by_link, Terms(SLOT, Reach.CONTIGUOUS, direct_bytes=8, load_bytes=96))
        assert len(self.terms) == len(case.sources) * len(case.destinations)

    def move(self, versions: tuple[int, ...]) -> None:
        dense = {version: values(self.case, version) for version in versions}
        self.ends.move(
            self.case, self.terms, versions, lambda rank, version: memory(self.case.sources[rank], dense[version])
        )

    def _transport(self, place: Place) -> C10dTransport:
        return StorelessTransport(place, lambda store, party, *_: self.communicator.group(party))  # noqa: ARG005


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, windows and turns of a few boxes."""
    monkeypatch.setattr(turns, "WINDOW_BYTES", 200)
    monkeypatch.setattr(turns, "TURN_BYTES", 400)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sources", "destinations"), SIZES)
def test_versions_arrive_whatever_the_order(sources: int, destinations: int, seed: int) -> None:
    meeting = Meeting(case_of(seed, sources, destinations))
    assert set(meeting.ends.connect()) == {None}
    meeting.move((1, 2, 3))
    communicator = meeting.communicator
    assert not any(communicator.queues)
    assert [len(peers) for peers in communicator.together[:sources]] == [1] * sources
    assert max(communicator.most[:sources]) > 2  # more than one is under way to one destination
    meeting.ends.close()


def test_one_source_never_lets_its_destination_wait() -> None:
    """Of one load after the other, all within the window are under way at once."""
    source, communicator = Turns(), Communicator(2)
    communicator.met([0, 1])
    size = turns.WINDOW_BYTES // 4
    for _ in range(4):
        assert source.choose([0]) == 0
        source.started(communicator.begin(0, Batch(1, True, deque([torch.zeros(1)]))), size)
    assert source.choose([0]) is None
    for begun in range(20):  # far beyond a turn, as nobody else waits
        communicator.begin(1, Batch(0, False, deque([torch.zeros(1)])))
        assert source.choose([0]) == 0, begun
        source.started(communicator.begin(0, Batch(1, True, deque([torch.zeros(1)]))), size)
        assert source.choose([0]) is None


def test_turns_go_round_and_end() -> None:
    source = Turns()
    pending = Batch(0, True, deque())
    assert source.choose([2, 0, 1]) == 2
    source.started(pending, turns.TURN_BYTES)
    assert source.choose([0, 1, 2]) is None
    assert source.choose([]) is None
    pending.ended.set()
    chosen = []
    for _ in range(4):
        found = source.choose([0, 1, 2])
        assert found is not None
        chosen.append(found)
    assert chosen == [0, 1, 2, 0]
    assert source.choose([0]) == 0


class Play:
    """Sources and destinations that act in a random order, without threads.

    Args:
        seed: of the order.
        sources: how many.
        destinations: how many.
        keep: whether sources take turns.
    """

    def __init__(self, seed: int, sources: int, destinations: int, *, keep: bool) -> None:
        self.rng, self.sources, self.destinations = np.random.default_rng(seed), sources, destinations
        self.communicator = Communicator(sources + destinations)
        self.communicator.met(range(sources + destinations))
        self.left = self.rng.integers(0, 6, (sources, destinations))
        self.turns = [Turns() if keep else None for _ in range(sources)]
        self.announced = np.zeros_like(self.left)

    def source(self, rank: int) -> bool:
        """Begins and announces the next load, if there is one and its turn has come."""
        waiting = np.flatnonzero(self.left[rank]).tolist()
        taken = self.turns[rank]
        chosen = (int(self.rng.choice(waiting)) if waiting else None) if taken is None else taken.choose(waiting)
        if chosen is None:
            return False
        self.left[rank, chosen] -= 1
        self.announced[rank, chosen] += 1
        batch = Batch(self.sources + chosen, True, deque([torch.zeros(1)]))
        pending = self.communicator.begin(rank, batch)
        if taken is not None:
            taken.started(pending, int(self.rng.choice([1, 100, turns.TURN_BYTES])))
        return True

    def destination(self, rank: int) -> bool:
        """Begins to receive what any source has announced."""
        ready = np.flatnonzero(self.announced[:, rank])
        if not ready.size:
            return False
        source = int(self.rng.choice(ready))
        self.announced[source, rank] -= 1
        self.communicator.begin(self.sources + rank, Batch(source, False, deque([torch.zeros(1)])))
        return True

    def ends(self) -> bool:
        """Acts until nobody can; whether all was moved."""
        actors = [(self.source, rank) for rank in range(self.sources)]
        actors += [(self.destination, rank) for rank in range(self.destinations)]
        while any(act(rank) for act, rank in (actors[at] for at in self.rng.permutation(len(actors)))):
            pass
        return not self.left.any() and not any(self.communicator.queues)


@pytest.mark.parametrize(("sources", "destinations"), [*SIZES, (1, 5), (5, 1), (7, 3)])
def test_all_ends_in_every_order_and_only_with_turns(sources: int, destinations: int) -> None:
    assert all(Play(seed, sources, destinations, keep=True).ends() for seed in range(60))
    stuck = [seed for seed in range(60) if not Play(seed, sources, destinations, keep=False).ends()]
    assert bool(stuck) == (min(sources, destinations) > 1)


def test_sources_begin_with_different_destinations() -> None:
    firsts = {}
    for sources, destinations in (2, 2), (4, 4), (4, 2), (2, 4):
        meeting = Meeting(case_of(0, sources, destinations))
        senders = [Sender(meeting.plan, rank, held, meeting.terms) for rank, held in enumerate(meeting.held)]
        firsts[sources, destinations] = [next(iter(sender.loads)) for sender in senders]
        meeting.ends.close()
    assert firsts == {(2, 2): [0, 1], (4, 4): [0, 1, 2, 3], (4, 2): [0, 1, 0, 1], (2, 4): [0, 1]}


class Endless:
    """What a device never ends."""

    def done(self) -> bool:
        return False

    def result(self) -> list[int]:
        raise AssertionError


@pytest.mark.usefixtures("small")
def test_whoever_waits_in_vain_says_for_whom_and_ends_what_is_under_way() -> None:
    """A destination's GPU is stuck, and a source's: all end within the time-out, and say what they waited for.

    What is under way has been ended by then: whatever else waits for those GPUs can end, too.
    """
    meeting = Meeting(case_of(0, 3, 2), timeout_s=1.5)
    assert set(meeting.ends.connect()) == {None}
    meeting.communicator.met([3, 4])
    meeting.communicator.begin(3, Batch(4, False, deque([torch.zeros(1)])))  # from who never sends
    senders = [Sender(meeting.plan, rank, held, meeting.terms) for rank, held in enumerate(meeting.held)]
    senders[2]._port.digest = lambda batch: Endless()  # type: ignore[method-assign]  # noqa: ARG005
    unpackers = [Unpacker(meeting.plan, manifest, meeting.terms) for manifest in meeting.case.destinations]
    taken = [memory(manifest, None) for manifest in meeting.case.destinations]
    errors = meeting.ends.attempt(1, senders, unpackers, meeting.held, taken)
    assert all(isinstance(error, PartyFailedError) for error in errors)
    *sources, working, stuck, other = map(str, errors)
    for source in sources:
        assert re.match(r"waited 2 s for (room for a packet to )?destination ranks \[0", source), source
    assert re.match(r"waited 2 s for the own device to .* goes to destination ranks \[", working), working
    assert stuck.startswith("waited 2 s for what source ranks ["), stuck
    assert re.match(r"waited 2 s for (a packet from any of|what) source ranks \[", other), other
    assert meeting.communicator.aborted == set(range(5))
    meeting.ends.close()


def test_two_parties_on_one_gpu_are_refused_by_name() -> None:
    """NCCL alone would say that a GPU is there twice, to some of the parties."""
    with pytest.raises(PartyFailedError, match=r"trainer rank 1 and worker 1 share GPU B, .*the transport cuda_ipc"):
        connect("A", "B", "C", "B")


def test_a_party_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(PartyFailedError, match=r"worker 0 has its weights in host memory, .*the transport tcp or nixl"):
        connect("A", "B", "", "")


def connect(*gpus: str) -> None:
    """Connects two trainer ranks and two workers, as the second of them."""
    offers = [
        Offer(
            address="",
            slot_bytes=8,
            memory="cuda",
            reach=0,
            details=msgspec.msgpack.encode(_Details("", 0, gpu, "2")),
        )
        for gpu in gpus
    ]
    place = Place(party=1, sources=2, host="127.0.0.1", device="cuda:1", pool=StagingPool(64), timeout_s=5.0)
    C10dTransport(place).connect(dict(enumerate(offers)), lambda: None)
