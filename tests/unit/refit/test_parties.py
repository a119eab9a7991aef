"""Trainer ranks and engine workers as threads, over real sockets and shared memory, with random layouts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.control import rendezvous
from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.control.rendezvous import Rendezvous
from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.delta import Base, PayloadKind
from megatron_patches.refit.memory.ports import Bits
from megatron_patches.refit.memory.staging import SLOTS, StagingPool
from megatron_patches.refit.parties import agreement
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.party import Party, open_transport
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.planning.plan import make_plan, plan_for
from megatron_patches.refit.transports.base import Place, TransportName
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd
from tests.support.quick import examples
from tests.support.refit_cases import Case, elements, random_case, region
from tests.unit.refit.transport_cases import usable

POISON = 0xDEADBEEF


def coverable(seed: int) -> Case:
    """A random case in which sources hold everything, several times over."""
    while True:
        case = random_case(seed)
        if any(m.placements for m in case.destinations) and all(m.placements for m in case.sources):
            return case
        seed += 1000


def slowly(case: Case, version: int, fraction: float) -> dict[str, np.ndarray]:
    """Values of which each version changes a share since the one before."""
    found = values(case, 0)
    for number in range(1, version + 1):
        rng = np.random.default_rng(number)
        for array in found.values():
            array[rng.random(array.shape) < fraction] += 1
    return found


def values(case: Case, version: int) -> dict[str, np.ndarray]:
    return {
        n: (np.arange(t.size).reshape(t.shape) * 2654435761 + version).astype(np.uint32) for n, t in case.dense.items()
    }


def memory(manifest: Manifest, dense: dict[str, np.ndarray] | None) -> dict[str, Bits]:
    arrays = {storage.name: np.full(storage.numel, POISON, dtype=np.uint32) for storage in manifest.storages}
    for placement in manifest.placements if dense is not None else ():
        arrays[placement.view.storage][elements(placement.view)] = dense[placement.box.tensor][region(placement.box)]
    return arrays


@dataclass
class Scene:
    """All parties of one case."""

    case: Case
    sources: list[SourceParty]
    destinations: list[DestinationParty]
    assemblies: list[Assembly]

    @property
    def everybody(self) -> list[Party[Any]]:
        return [*self.sources, *self.destinations]

    def each(self, source: Callable[[int], Any], destination: Callable[[int], Any]) -> list[Any]:
        """Runs all parties at once; errors are returned."""

        def run(call: Callable[[int], Any], rank: int) -> Any:
            try:
                return call(rank)
            except PartyFailedError as error:
                return error

        jobs = [(source, rank) for rank in range(len(self.sources))]
        jobs += [(destination, rank) for rank in range(len(self.destinations))]
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(lambda job: run(*job), jobs))

    def prepare(self) -> None:
        shapes = {spec.name: spec.shape for spec in self.case.tensors}
        found = self.each(
            lambda rank: self.sources[rank].prepare(lambda: Held({}, shapes, self.case.sources[rank])),
            lambda rank: self.destinations[rank].prepare(lambda _: self.case.destinations[rank]),
        )
        for answer in found:
            if isinstance(answer, Exception):
                raise answer

    def move(self, version: int, spoil: Callable[[int, dict[str, Bits]], None] = lambda *_: None) -> list[Any]:
        """One version; ``spoil`` may raise in, or damage the memory of, a source."""
        dense = values(self.case, version)
        step, linked = self.assemblies[0].next_step, self.sources[0].linked

        def send(rank: int) -> None:
            held = memory(self.case.sources[rank], dense)
            spoil(rank, held)
            self.sources[rank].push(version, lambda: held)

        def take(rank: int) -> Any:
            manifest = self.case.destinations[rank]
            return self.destinations[rank].receive(version, step, linked, lambda: memory(manifest, None))

        return self.each(send, take)[len(self.sources) :]

    def exchange(self, version: int, held: Callable[[int], Any], room: Callable[[int], Any]) -> list[Any]:
        """One version from what each source looks up to what each destination does; the answers of all."""
        step, linked = self.assemblies[0].next_step, self.sources[0].linked
        return self.each(
            lambda rank: self.sources[rank].push(version, lambda: held(rank)),
            lambda rank: self.destinations[rank].receive(version, step, linked, lambda: room(rank)),
        )

    def change(self, version: int, fraction: float, since: int, known: dict[int, Base | None]) -> list[Any]:
        """One version relative to another, which each destination holds as ``known`` says; the answers of all."""
        step, linked = self.assemblies[0].next_step, self.sources[0].linked
        dense, base = slowly(self.case, version, fraction), slowly(self.case, since, fraction)

        def send(rank: int) -> Any:
            held, before = (memory(self.case.sources[rank], content) for content in (dense, base))
            return self.sources[rank].push(version, lambda: held, Base(since, before) if since else None)

        def take(rank: int) -> Any:
            manifest = self.case.destinations[rank]
            return self.destinations[rank].receive(
                version, step, linked, lambda: memory(manifest, None), base=lambda: known.get(rank)
            )

        found = self.each(send, take)
        for rank, answer in enumerate(found[len(self.sources) :]):
            known[rank] = None if isinstance(answer, Exception) else Base(version, answer)
        return found

    def check(self, version: int, received: list[Any], dense: dict[str, np.ndarray] | None = None) -> None:
        dense = values(self.case, version) if dense is None else dense
        for manifest, found in zip(self.case.destinations, received, strict=True):
            wanted = memory(manifest, dense)
            assert not isinstance(found, Exception), found
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array)


def least_staging(case: Case) -> int:
    """The smallest budget with which every party of a case can have slots of one element."""
    pairs = {(item.source, item.destination) for item in make_plan(*case.sides).transfers}
    most = max(
        sum(pair[side] == rank for pair in pairs)
        for side in (0, 1)
        for rank in range(max(len(case.sources), len(case.destinations)))
    )
    return SLOTS * 8 * max(1, most)


@contextmanager
def scene(
    case: Case,
    transport: TransportName | None,
    staging: int = 512,
    timeout_s: float = 20.0,
    host: str = "127.0.0.1",
    payload: PayloadKind = PayloadKind.WHOLE,
) -> Iterator[Scene]:
    count = len(case.sources)
    server = Rendezvous(count + len(case.destinations), timeout_s, Registry(count).answer, host)
    options = LinkOptions(transport=transport, staging_bytes=staging, sources=count, direct_bytes=8, payload=payload)
    assemblies = [Assembly(server.invitation, i, f"party {i}") for i in range(count + len(case.destinations))]
    sources = [SourceParty(member, options) for member in assemblies[:count]]
    destinations = [DestinationParty(member, options) for member in assemblies[count:]]
    try:
        yield Scene(case, sources, destinations, assemblies)
    finally:
        for source in sources:
            source.close()
        for destination in destinations:
            destination.close()
        server.close()


@pytest.mark.parametrize("transport", usable())
@pytest.mark.parametrize("seed", range(12))
def test_versions_arrive_bit_for_bit(seed: int, transport: TransportName) -> None:
    with scene(coverable(seed), transport, staging=[80, 100, 512, 1 << 20][seed % 4]) as parties:
        parties.prepare()
        for version in (1, 2, 5):
            parties.check(version, parties.move(version))
        for party in parties.everybody:
            assert party.staging.peak_bytes == party.staging.leased_bytes <= party.staging.limit_bytes
    assert all(party.staging.leased_bytes == 0 for party in parties.everybody)


@pytest.mark.parametrize("transport", usable())
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3, 1.0])
def test_versions_arrive_relative_to_the_last_one(fraction: float, transport: TransportName) -> None:
    """Cut over several sources, after a version that went wrong, and to a destination that has no base."""
    case = coverable(int(100 * fraction))
    with scene(case, transport, staging=1 << 20, payload=PayloadKind.DELTA) as parties:
        parties.prepare()
        known: dict[int, Base | None] = {}
        whole = parties.change(1, fraction, 0, known)[0].bytes_by_source
        assert len(whole) == len(case.sources)
        for version in (2, 3):
            answers = parties.change(version, fraction, version - 1, known)
            parties.check(version, answers[len(case.sources) :], slowly(case, version, fraction))
            sent = answers[0].bytes_by_source
            assert all(now <= then for now, then in zip(sent, whole, strict=True))
            assert fraction > 0.0 or sum(sent) == 0
        held = known[0]
        assert held is not None
        for storage in held.memory.values():
            spoiled = np.asarray(storage)
            np.bitwise_xor(spoiled, 1, out=spoiled)
        if fraction < 1.0 and any(held.memory):
            for answer in parties.change(4, fraction, 3, known):
                assert isinstance(answer, PartyFailedError)
                assert re.search(r"DigestError: .* version 4 is not taken", str(answer))
                assert answer.digests_differ
        answers = parties.change(5, fraction, 0, known)
        parties.check(5, answers[len(case.sources) :], slowly(case, 5, fraction))
        known[0] = None
        for answer in parties.change(6, fraction, 5, known) if fraction < 1.0 else ():
            assert isinstance(answer, PartyFailedError)
            assert "destination rank 0, which holds none, what changed since version 5" in str(answer)
            assert not answer.digests_differ
        for party in parties.everybody:
            assert party.staging.peak_bytes <= party.staging.limit_bytes
    assert all(party.staging.leased_bytes == 0 for party in parties.everybody)


@settings(max_examples=examples(40), deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32), room=st.sampled_from([8, 20, 100, 400]), fraction=st.sampled_from([0.05, 0.5]))
def test_any_layout_changes_through_little_staging_memory(seed: int, room: int, fraction: float) -> None:
    case = coverable(seed)
    with scene(case, TransportName.SHM, least_staging(case) + room, payload=PayloadKind.DELTA) as parties:
        parties.prepare()
        known: dict[int, Base | None] = {}
        for version in (1, 2):
            answers = parties.change(version, fraction, version - 1, known)
            parties.check(version, answers[len(case.sources) :], slowly(case, version, fraction))
        for party in parties.everybody:
            assert party.staging.peak_bytes <= least_staging(case) + room


@pytest.mark.parametrize("transport", [TransportName.TCP, TransportName.SHM])
def test_parties_meet_over_ip_version_6(transport: TransportName) -> None:
    with scene(coverable(1), transport, host="::1") as parties:
        parties.prepare()
        assert {member.local_host for member in parties.assemblies} == {"::1"}
        parties.check(1, parties.move(1))


@settings(max_examples=examples(40), deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32), room=st.sampled_from([0, 0, 1, 7, 50, 300]))
def test_any_layout_passes_through_the_least_staging_memory(seed: int, room: int) -> None:
    """Bytes of several links wait for each other in every order that threads come up with, and all arrive."""
    case = coverable(seed)
    with scene(case, TransportName.SHM, staging=least_staging(case) + room) as parties:
        parties.prepare()
        parties.check(1, parties.move(1))
        for party in parties.everybody:
            assert party.staging.peak_bytes <= least_staging(case) + room


@pytest.mark.parametrize("transport", [TransportName.SHM, TransportName.TCP])
@pytest.mark.parametrize("seed", range(3))
def test_tensors_arrive_as_arrays_do(seed: int, transport: TransportName) -> None:
    case = coverable(seed)
    with scene(case, transport, staging=200) as parties:
        parties.prepare()
        dense = values(case, 1)
        held = [memory(manifest, dense) for manifest in case.sources]
        taken = [memory(manifest, None) for manifest in case.destinations]
        answers = parties.exchange(1, lambda rank: as_tensors(held[rank]), lambda rank: as_tensors(taken[rank]))
        parties.check(1, taken)
        for moved in answers[: len(case.sources)]:
            assert moved.staged_bytes == max(party.staging.peak_bytes for party in parties.everybody) > 0
            assert set(moved.seconds) == {"look_up", "allocate", "move", "verify"}
            for part, seconds in moved.seconds.items():
                whose = parties.sources if part == "look_up" else parties.destinations
                assert seconds == max(party.seconds[part] for party in whose) > 0


def as_tensors(arrays: dict[str, Bits]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(bits) for name, bits in arrays.items()}


def test_less_staging_memory_than_links_need_is_refused_on_all() -> None:
    case = coverable(8)
    with scene(case, TransportName.SHM, staging=least_staging(case) - 1) as parties:
        parties.prepare()
        for answer in parties.move(1):
            assert isinstance(answer, PartyFailedError)
            assert re.search(r"StagingError: staging_bytes is \d+; \d+ links take at least \d+ bytes", str(answer))


@pytest.mark.parametrize("transport", usable())
def test_after_a_failure_on_one_source_all_know_why_and_the_next_version_arrives(transport: TransportName) -> None:
    def spoil(rank: int, held: dict[str, Bits]) -> None:
        if rank == 0:
            held.clear()

    case = coverable(1)
    with scene(case, transport, staging=128) as parties:
        parties.prepare()
        parties.check(1, parties.move(1))
        for answer in parties.move(2, spoil):
            assert isinstance(answer, PartyFailedError)
            assert "sending version 2 failed: party 0: TransferError" in str(answer)
            assert "is missing" in str(answer)
        parties.check(3, parties.move(3))


def test_a_destination_that_fails_ends_the_sources_too() -> None:
    case = coverable(2)
    with scene(case, TransportName.SHM, staging=128) as parties:
        parties.prepare()

        def refuse(rank: int) -> dict[str, Bits]:
            raise MemoryError("no room for 7 GB")

        dense = values(case, 1)
        answers = parties.exchange(1, lambda rank: memory(case.sources[rank], dense), refuse)
        assert all(isinstance(answer, PartyFailedError) and "no room for 7 GB" in str(answer) for answer in answers)
        parties.check(2, parties.move(2))


def test_a_destination_that_missed_a_version_takes_part_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine could not be reached: the others fail, and go on together afterwards."""
    monkeypatch.setattr(rendezvous, "_AFTER_FAILURE_S", 2.0)  # for the one that missed it
    case = coverable(3)
    with scene(case, TransportName.SHM, timeout_s=60.0) as parties:
        parties.prepare()
        dense, step = values(case, 1), parties.assemblies[0].next_step
        threading.Timer(0.3, lambda: parties.assemblies[0].fail(step, "listening", "engine unreachable")).start()
        answers = parties.each(
            lambda rank: parties.sources[rank].push(1, lambda: memory(case.sources[rank], dense)), lambda _: None
        )
        failed = answers[: len(case.sources)]
        assert all(isinstance(answer, PartyFailedError) and "engine unreachable" in str(answer) for answer in failed)
        parties.check(2, parties.move(2))


def test_a_party_is_told_what_concerns_it_alone() -> None:
    """Two stages, of which each destination wants one: neither learns of the other's sources."""
    spec = TensorSpec("layers.0.w", (4, 6), "float32")
    specs = [replace(spec, name=f"layers.{layer}.w") for layer in range(2)]

    def rank(number: int, tensor: TensorSpec) -> Manifest:
        place = Placement(tensor.box, View(tensor.name, 0, (4, 6), (6, 1)))
        return Manifest(number, "", (Storage(tensor.name, "float32", 24, 24),), (place,))

    sides = [rank(number, tensor) for number, tensor in enumerate(specs)]
    dense = {tensor.name: np.arange(24).reshape(4, 6) for tensor in specs}
    with scene(Case(specs, sides, sides, dense), TransportName.TCP) as parties:
        parties.prepare()
        for side in (parties.sources, parties.destinations):
            assert [list(party.plan.by_link) for party in side] == [[(0, 0)], [(1, 1)]]
        assert len({party.agreed.digest for party in parties.everybody}) == 1
        assert sum(party.plan.nbytes for party in parties.destinations) == 2 * 24 * 4


def test_a_source_refuses_what_it_does_not_hold_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(*args: Any, **options: Any) -> Any:
        plan, asked = plan_for(*args, **options)
        return plan, {
            source: [msgspec.structs.replace(one, held=99) for one in requests] for source, requests in asked.items()
        }

    monkeypatch.setattr(agreement, "plan_for", more)
    with (
        scene(coverable(4), TransportName.TCP) as parties,
        pytest.raises(PartyFailedError, match=r"checking requests failed: .* for boxes of its template 99"),
    ):
        parties.prepare()


def test_a_link_with_another_plan_is_refused() -> None:
    def place(party: int) -> Place:
        return Place(party=party, sources=1, host="127.0.0.1", device="cpu", pool=StagingPool(1 << 10), timeout_s=5.0)

    receiver = ReceivingEnd(place(1), open_transport(TransportName.TCP, place(1)))
    sender = SendingEnd(place(0), open_transport(TransportName.TCP, place(0)))
    offers = {0: sender.offer(512, {}), 1: receiver.offer(512)}
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(sender.connect, offers, {0: 512}, {0: "1" * 64}, lambda: None)
        with pytest.raises(PlanMismatchError, match="source rank 0 follows plan 111111111111, not 000000000000"):
            receiver.connect(offers, {0: 512}, {0: "0" * 64}, lambda: None)
        assert isinstance(dialled.exception(), PartyFailedError)
    for end in (sender, receiver):
        end.close()


def test_shared_memory_leaves_nothing_behind() -> None:
    shared = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    names = set(shared.iterdir())
    with scene(coverable(6), TransportName.SHM) as parties:
        parties.prepare()
        parties.check(1, parties.move(1))
        assert set(shared.iterdir()) <= names


def test_a_source_that_cannot_look_its_memory_up_fails_the_step_at_once() -> None:
    def look_up(rank: int) -> dict[str, Bits]:
        if rank == 0:
            raise RuntimeError("the parameters are others")
        return memory(case.sources[rank], values(case, 1))

    case = coverable(7)
    with scene(case, TransportName.SHM, timeout_s=60.0) as parties:
        parties.prepare()
        started = time.monotonic()
        answers = parties.exchange(1, look_up, lambda rank: memory(case.destinations[rank], None))
        assert time.monotonic() - started < 30
        assert all(isinstance(a, PartyFailedError) and "the parameters are others" in str(a) for a in answers)
        parties.check(2, parties.move(2))


def test_a_source_that_cannot_make_links_fails_the_step_at_once_though_looking_up_asks_the_engine() -> None:
    """As the first rank does, whose engine takes part in a step only once it is asked."""
    case, asked = coverable(7), threading.Event()
    with scene(case, TransportName.SHM, timeout_s=60.0) as parties:
        parties.prepare()
        step, source = parties.assemblies[0].next_step, parties.sources[0]
        source._options = replace(source._options, staging_bytes=0)

        def look_up(rank: int) -> dict[str, Bits]:
            if rank == 0:
                asked.set()
            return memory(case.sources[rank], values(case, 1))

        def receive(rank: int) -> object:
            if not asked.wait(20.0):
                return None
            return parties.destinations[rank].receive(1, step, False, lambda: memory(case.destinations[rank], None))

        started = time.monotonic()
        answers = parties.each(lambda rank: parties.sources[rank].push(1, lambda: look_up(rank)), receive)
        assert time.monotonic() - started < 5
        assert all(isinstance(a, PartyFailedError) and "staging_bytes is 0" in str(a) for a in answers)


def fed_by_two() -> tuple[Case, int, int, int]:
    """A random case, a destination, and two sources that send to it."""
    for seed in range(100):
        case = coverable(seed)
        pairs = {(item.destination, item.source) for item in make_plan(*case.sides).transfers}
        for rank in range(len(case.destinations)):
            feeding = sorted(source for destination, source in pairs if destination == rank)
            if len(feeding) > 1:
                return case, rank, feeding[0], feeding[1]
    raise AssertionError("no case has one")


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_while_a_version_waits_each_side_says_for_whom() -> None:
    """For a destination that has no room yet, and then for a source that has not begun."""
    case, taking, sending, late = fed_by_two()
    room, begins = threading.Event(), threading.Event()

    def look_up(rank: int) -> dict[str, Bits]:
        assert rank != late or begins.wait(20.0)
        return memory(case.sources[rank], values(case, 2))

    def make(rank: int) -> dict[str, Bits]:
        assert rank != taking or room.wait(20.0)
        return memory(case.destinations[rank], None)

    with scene(case, TransportName.SHM) as parties, ThreadPoolExecutor(1) as pool:
        parties.prepare()
        parties.check(1, parties.move(1))
        source, destination = parties.sources[sending], parties.destinations[taking]
        assert source.late == []
        under_way = pool.submit(lambda: parties.exchange(2, look_up, make))
        until(lambda: source.late == [taking])
        room.set()
        until(lambda: source.late == [])
        said = re.fullmatch(r"a packet from any of source ranks \[([\d, ]+)\]", destination.awaited)
        assert said is not None
        assert str(late) in said[1].split(", ")
        assert not under_way.done()
        begins.set()
        parties.check(2, under_way.result(20.0)[len(case.sources) :], values(case, 2))


def test_leaving_in_another_thread_ends_what_a_party_waits_for_and_its_links() -> None:
    case = coverable(9)
    with scene(case, TransportName.SHM, timeout_s=60.0) as parties:
        parties.prepare()
        parties.check(1, parties.move(1))
        step = parties.assemblies[0].next_step

        def leave(rank: int) -> None:
            if not rank:
                time.sleep(1.0)
                for party in parties.destinations:
                    party.leave()

        started = time.monotonic()
        answers = parties.each(
            leave,
            lambda rank: parties.destinations[rank].receive(
                2, step, True, lambda: memory(case.destinations[rank], None)
            ),
        )
        assert time.monotonic() - started < 30
        assert all(isinstance(answer, PartyFailedError) for answer in answers[len(case.sources) :])
        assert not any(party.linked or party.staging.leased_bytes for party in parties.destinations)


FIRST_USE = """
import sys, threading
from megatron_patches.refit.control.messages import Model, decode, encode

sys.setswitchinterval(1e-6)
payload, found, together = encode(Model({}, ())), [], threading.Barrier(16)


def read():
    together.wait()
    found.append(decode(payload, Model))


threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert [encode(one) for one in found] == [payload] * 16
"""


def test_threads_may_read_a_message_of_a_new_kind_at_once() -> None:
    """As several engines do that join together. msgspec alone crashes three processes of four."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
