"""Processes of a server are killed or stopped in the midst of a push; and what fifty pushes leave behind."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.memory import sender
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from tests.integration.live_refit import PROMPTS, STAGING, fill, start
from tests.integration.test_live_http import corrupt_next_packet
from tests.integration.tiny_models import QWEN3
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.vllm_server import VllmServer, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

CASE = Case(TrainerMesh(etp=2), (), QWEN3)
TIMEOUT_S, LEASE_S = 12.0, 4.0
NAMES = {"engine": "VLLM::Engine", "worker": "VLLM::Worker"}  # with what names of a server's processes begin
PHASES = {"sending": (sender.Sender, "pack_into"), "committing": (HttpEngine, "commit")}


class Fault(NamedTuple):
    """What happens to which process of a server, and when; it happens on the first rank's word.

    Attributes:
        victim: the process's number.
        how: SIGKILL or SIGSTOP.
        phase: ``preparing``, or one of :data:`PHASES`.
    """

    victim: int
    how: signal.Signals
    phase: str


def process_of(server: int, victim: str) -> psutil.Process:
    """The process ``server`` itself, its ``engine``, or its second ``worker``."""
    process = psutil.Process(server)
    if victim == "server":
        return process
    found = [child for child in process.children(recursive=True) if child.name().startswith(NAMES[victim])]
    return max(found, key=lambda child: child.pid)


def body(
    rank: int, world_size: int, url: str, version: int, seed: int, memory: MemoryMode, fault: Fault | None
) -> tuple[str, float]:
    """A push, in whose midst something happens: why it failed, if it did, and for how long it took from then on."""
    del world_size
    chunks = start(CASE)
    fill(CASE, chunks, seed)
    engines = [HttpEngine(url, TIMEOUT_S)] if rank == 0 else []
    options = RefitOptions(staging_bytes=STAGING, timeout_s=TIMEOUT_S, lease_s=LEASE_S, memory=memory)
    happened = [time.monotonic()]
    reason = ""

    def happen() -> None:
        if fault is not None:
            os.kill(fault.victim, fault.how)
            happened[0] = time.monotonic()

    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        try:
            if fault is not None and fault.phase == "preparing" and rank == 0:
                before(session, "_describe", happen)
            session.prepare()
            if fault is not None and fault.phase in PHASES and rank == 0:
                before(*PHASES[fault.phase], happen)
            session.push(version)
        except RefitError as error:
            reason = str(error)
    for engine in engines:
        engine.close()
    return reason, time.monotonic() - happened[0]


def before(owner: Any, name: str, happen: Any) -> None:
    """Lets something happen before the first call of a method."""
    original, happens = getattr(owner, name), itertools.chain([True], itertools.repeat(False))

    def method(*args: Any, **kwargs: Any) -> Any:
        if next(happens):
            happen()
        return original(*args, **kwargs)

    setattr(owner, name, method)


@dataclass
class Served:
    """A server of two workers, and the numbers of what is pushed into it."""

    server: VllmServer
    versions: Iterator[int]

    def push(
        self, seed: int, memory: MemoryMode = MemoryMode.BESIDE, fault: Fault | None = None
    ) -> list[tuple[str, float]]:
        args = (self.server.url, next(self.versions), seed, memory, fault)
        found: list[tuple[str, float]] = run_megatron(body, 2, args=args, timeout_s=120, fresh=fault is not None)
        return found

    def answers(self) -> list[list[float]]:
        return self.server.log_probabilities(PROMPTS)


@contextlib.contextmanager
def serving(folder: Path, *, spawned: bool) -> Iterator[Served]:
    with vllm_server(QWEN3, folder, "--tensor-parallel-size", "2", spawned=spawned) as server:
        yield Served(server, itertools.count(1))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("server"), spawned=True) as started:
        yield started


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("engine", "preparing"),
        ("worker", "preparing"),
        ("server", "sending"),
        ("worker", "sending"),
        ("engine", "committing"),
        ("worker", "committing"),
        ("engine", "sending"),
        ("server", "committing"),
        ("server", "preparing"),
    ],
)
def test_a_process_that_hangs_for_a_while_leaves_old_or_new_weights(served: Served, victim: str, phase: str) -> None:
    """The push ends in time and says which engine kept silent; the server goes on, and takes the next push."""
    served.push(1)
    new = served.answers()
    served.push(2)
    old = served.answers()
    assert new != old
    memory = MemoryMode.IN_PLACE if phase == "sending" else MemoryMode.BESIDE
    process = process_of(served.server.process, victim)
    try:
        found = served.push(1, memory, Fault(process.pid, signal.SIGSTOP, phase))
        assert process.status() == psutil.STATUS_STOPPED
    finally:
        process.resume()
    assert max(seconds for _, seconds in found) < 5 * TIMEOUT_S
    for reason, _ in found:
        assert served.server.url in reason, reason
        assert "trainer rank" not in reason, reason
    assert served.answers() in (old, new)
    served.push(1)
    assert served.answers() == new


@pytest.mark.parametrize(
    ("victim", "phase"),
    [("engine", "preparing"), ("worker", "committing"), ("server", "sending"), ("worker", "sending")],
)
def test_a_process_that_dies_ends_the_push_with_its_reason(victim: str, phase: str, tmp_path: Path) -> None:
    # An engine that is a copy of its server would keep the server's socket open once it is killed.
    with serving(tmp_path, spawned=victim != "worker") as mortal:
        mortal.push(1)
        process = process_of(mortal.server.process, victim)
        found = mortal.push(2, fault=Fault(process.pid, signal.SIGKILL, phase))
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert max(seconds for _, seconds in found) < 3 * TIMEOUT_S
    for reason, _ in found:
        assert mortal.server.url in reason, reason
        assert "trainer rank" not in reason, reason


_SHARED = "/dev/shm/"  # noqa: S108 - read alone


class Footprint(NamedTuple):
    """What processes take: memory, and what the kernel counts, of which a few come and go with requests."""

    resident_mib: float
    threads: int
    descriptors: int
    shared: int
    """Files in /dev/shm that they have mapped, whether they still have a name or not."""

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> Footprint:
        """What they take once they rest: the least in one second, as what a push has closed goes a little later."""
        samples = list[Footprint]()
        for _ in range(10):
            samples.append(cls._now(processes))
            time.sleep(0.1)
        return cls(*map(min, zip(*samples, strict=True)))

    @classmethod
    def _now(cls, processes: list[psutil.Process]) -> Footprint:
        return cls(
            sum(process.memory_info().rss for process in processes) / 2**20,
            sum(process.num_threads() for process in processes),
            sum(process.num_fds() for process in processes),
            len({one.path for process in processes for one in process.memory_maps() if one.path.startswith(_SHARED)}),
        )


def pushing_body(
    rank: int, world_size: int, url: str, version: int, memory: MemoryMode, server: int
) -> tuple[int, list[Footprint], list[Footprint]]:
    """Pushes fifty times, of which every fifth fails: how many did, and what this rank and the server take since."""
    del world_size
    chunks = start(CASE)
    engines = [HttpEngine(url)] if rank == 0 else []
    options = RefitOptions(staging_bytes=STAGING, timeout_s=60.0, memory=memory)
    failures, own, of_server = 0, list[Footprint](), list[Footprint]()
    running = psutil.Process(server)
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        session.prepare()
        for number in range(50):
            fill(CASE, chunks, number)
            if number % 5 == 4 and rank == 1:
                corrupt_next_packet()
            try:
                session.push(version + number)
            except RefitError:
                failures += 1
            if number in (18, 48):  # After a push that succeeds: one that fails leaves connections that are closing.
                own.append(Footprint.of([psutil.Process()]))
                of_server.append(Footprint.of([running, *running.children(recursive=True)]))
    for engine in engines:
        engine.close()
    return failures, own, of_server


@pytest.mark.parametrize("memory", [MemoryMode.BESIDE, MemoryMode.IN_PLACE])
def test_pushes_leave_nothing_behind_whether_they_fail_or_not(served: Served, memory: MemoryMode) -> None:
    version = min(itertools.islice(served.versions, 50))
    args = (served.server.url, version, memory, served.server.process)
    for failures, *footprints in run_megatron(pushing_body, 2, args=args, timeout_s=300):
        assert failures == 10
        for earlier, later in footprints:
            # 30 pushes lie between, 6 of which failed.
            assert later.resident_mib < earlier.resident_mib + 8
            assert later.threads < earlier.threads + 5
            assert later.descriptors < earlier.descriptors + 5
            assert later.shared < earlier.shared + 5
