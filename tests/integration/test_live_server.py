"""A server, started as the documentation says: its trainer is killed, it is asked meanwhile, or its cache is full."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.memory import sender
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engine_client import PauseMode
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from tests.integration.live_refit import LONG_PROMPT, PROMPTS, STAGING, fill, kill_in, start
from tests.integration.tiny_models import LLAMA
from tests.support.completion import Completion
from tests.support.launch import RanksFailedError, run_megatron
from tests.support.live_models import Case
from tests.support.vllm_server import PACED, VllmServer, complete, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

CASE = Case(TrainerMesh(etp=2), (), LLAMA)
OF_LONG_TEXTS = LLAMA | {"max_position_embeddings": 128}
PROMPT = PROMPTS[0]
LEASE_S = 4.0
LENGTH, PACE_S = 100, 0.1  # of a request that is paused under way: it takes 10 s


def body(
    rank: int, world_size: int, url: str, version: int, seed: int, memory: MemoryMode, killed: str, note: str = ""
) -> dict[str, float]:
    """Pushes a model. When, and how long it took.

    The first rank is killed at ``killed``, or sends it ``slowly``; with a file ``note`` to write its number to, it is
    stopped instead.
    """
    del world_size
    chunks = start(CASE)
    fill(CASE, chunks, seed)
    engines = [HttpEngine(url)] if rank == 0 else []
    options = RefitOptions(staging_bytes=STAGING, timeout_s=60.0, memory=memory, lease_s=LEASE_S)
    how = signal.SIGSTOP if note else signal.SIGKILL
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        session.prepare()
        if note and rank == 0:
            Path(note).write_text(str(os.getpid()), encoding="utf-8")
        if rank == 0 and killed == "slowly":
            slow_down(sender.Sender, "pack_into")
        if rank == 0 and killed == "sending":
            kill_in(sender.Sender, "pack_into", calls=2, how=how)
        if rank == 0 and killed == "committing":
            kill_in(HttpEngine, "commit", calls=1, how=how)
        if rank == 0 and killed == "resuming":
            kill_in(HttpEngine, "resume", calls=1, how=how)
        began = time.monotonic()
        report = session.push(version)
    for engine in engines:
        engine.close()
    return {"began": began, **report.seconds}


def cached_body(
    rank: int, world_size: int, url: str, version: int, pause: PauseMode, seeds: Sequence[int], asked: Sequence[int]
) -> list[list[Completion]]:
    """Pushes one model after another, and asks each as often as ``asked`` says for what follows a long prompt."""
    del world_size
    chunks, found = start(CASE), []
    engines = [HttpEngine(url)] if rank == 0 else []
    options = RefitOptions(staging_bytes=STAGING, timeout_s=60.0, pause=pause)
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        session.prepare()
        for number, (seed, times) in enumerate(zip(seeds, asked, strict=True)):
            fill(CASE, chunks, seed)
            session.push(version + number)
            found.append([complete(url, LONG_PROMPT, 4) for _ in range(times if rank == 0 else 0)])
    for engine in engines:
        engine.close()
    return found


class Busy(HttpEngine):
    """A server that can be in the midst of an answer when it is paused.

    Attributes:
        is_asked: whether it is, in the pauses to come.
        answer: the last of these, maybe still to come.
        paused: when the last pause had begun, and nothing was under way any more but what it keeps.
    """

    is_asked = False
    answer: Future[Completion]
    paused: float

    def pause(self, mode: PauseMode) -> None:
        """Ask first, and wait for the first tokens."""
        if self.is_asked:
            begun, pool = threading.Event(), ThreadPoolExecutor(max_workers=1)
            self.answer = pool.submit(complete, self.name, PROMPT, LENGTH, begun, pace_s=PACE_S)
            pool.shutdown(wait=False)
            assert begun.wait(60), "the server did not begin to answer"
        super().pause(mode)
        self.paused = time.monotonic()


class Interrupted(NamedTuple):
    """What a server answered before, during and after a push.

    Attributes:
        before: the answer of the old weights.
        during: the answer in whose midst it was paused.
        same: how many tokens of both are the same, with the same probabilities.
        after: what the new weights add to the prompt and these.
        went_on: when the trainer had changed its weights after the push.
        paused: when the pause had begun.
        seconds: of the push's report.
    """

    before: Completion
    during: Completion
    same: int
    after: Completion
    went_on: float
    paused: float
    seconds: dict[str, float]


def interrupting_body(
    rank: int, world_size: int, url: str, version: int, pause: PauseMode
) -> tuple[Interrupted | None, list[Completion]]:
    """Pushes model 2, then 1 while the server answers, without waiting, and 3 instead; and 1 again in peace.

    Returns:
        Of the second push, and the answers to a prompt after the second and the last.
    """
    del world_size
    chunks = start(CASE)
    busy = Busy(url) if rank == 0 else None
    options = RefitOptions(staging_bytes=STAGING, timeout_s=60.0, pause=pause)
    engines = [busy] if busy is not None else []
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        session.prepare()
        fill(CASE, chunks, 2)
        session.push(version)
        before = None
        if busy is not None:
            before, busy.is_asked = complete(url, PROMPT, LENGTH), True
        fill(CASE, chunks, 1)
        report = session.push(version + 1, wait=False)
        fill(CASE, chunks, 3)
        went_on = time.monotonic()
        session.wait()
        found, answers = None, []
        if before is not None and busy is not None:
            during, busy.is_asked = busy.answer.result(60), False
            old = list(zip(before.tokens, before.log_probabilities, strict=True))
            new = list(zip(during.tokens, during.log_probabilities, strict=True))
            same = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(new))
            # Not from the blocks that the interrupted answer has left in the cache, whatever they are of.
            after = complete(url, [*PROMPT, *during.tokens[:same]], max(1, LENGTH - same), salt="another")
            found = Interrupted(before, during, same, after, went_on, busy.paused, dict(report.seconds))
            answers.append(complete(url, PROMPT, 8))
        fill(CASE, chunks, 1)
        session.push(version + 2)
        if rank == 0:
            answers.append(complete(url, PROMPT, 8))
    if busy is not None:
        busy.close()
    return found, answers


def late_body(rank: int, world_size: int, url: str, version: int, late_s: float) -> tuple[float, float]:
    """Prepares a push for which the last rank is late with the description of its weights. When, on the first rank."""
    chunks = start(CASE)
    fill(CASE, chunks, 1)
    engines = [HttpEngine(url)] if rank == 0 else []
    options = RefitOptions(staging_bytes=STAGING, timeout_s=60.0)
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        if rank == world_size - 1:
            describe = session._describe

            def describe_late() -> Held:
                time.sleep(late_s)
                return describe()

            session._describe = describe_late  # type: ignore[method-assign]
        began = time.monotonic()
        session.prepare()
        ended = time.monotonic()
        session.push(version)
    for engine in engines:
        engine.close()
    return began, ended


def slow_down(owner: Any, name: str) -> None:
    """Lets each call of a method take a quarter of a second more."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.25)
        return original(*args, **kwargs)

    setattr(owner, name, method)


@dataclass
class Served:
    """A server, and the numbers of what is pushed into it."""

    server: VllmServer
    versions: Iterator[int]

    def push(self, seed: int, memory: MemoryMode, killed: str = "", note: str = "") -> dict[str, float]:
        args = (self.server.url, next(self.versions), seed, memory, killed, note)
        seconds: dict[str, float] = run_megatron(body, 2, args=args, timeout_s=120, fresh=bool(killed))[0]
        return seconds

    def take_versions(self, number: int) -> int:
        """The first of so many."""
        return min(itertools.islice(self.versions, number))

    def answers(self, replica: int = 0) -> list[list[float]]:
        return self.server.log_probabilities(PROMPTS, replica=replica)

    def pauses(self) -> tuple[int, int]:
        """How often it was paused, and how often it was resumed, or went on by itself."""
        went_on = self.server.log().count("this server goes on, its caches emptied")
        return self.server.was_asked("sleep"), self.server.was_asked("wake_up") + went_on


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("server")
    with vllm_server(OF_LONG_TEXTS, folder, "--max-model-len", "128", *PACED) as server:
        yield Served(server, itertools.count(1))


@pytest.mark.parametrize(
    ("memory", "killed"),
    [(MemoryMode.BESIDE, "committing"), (MemoryMode.IN_PLACE, "sending"), (MemoryMode.IN_PLACE, "committing")],
)
def test_a_trainer_killed_while_the_server_is_paused(served: Served, memory: MemoryMode, killed: str) -> None:
    served.push(2, memory)
    before = served.answers()
    pauses, resumptions = served.pauses()
    assert pauses == resumptions
    with pytest.raises(RanksFailedError) as raised:
        served.push(1, memory, killed)
    assert {failure.rank: failure.kind for failure in raised.value.failures}[0] == "exit"
    assert served.answers() == before
    assert served.pauses() == (pauses + 1, resumptions + 1)
    seconds = served.push(1, memory)
    assert served.answers() != before
    assert served.pauses() == (pauses + 2, resumptions + 2)
    assert seconds["paused"] > (seconds["send"] if memory is MemoryMode.IN_PLACE else 0)
    served.push(2, memory)
    assert served.answers() == before


@pytest.mark.parametrize(
    ("memory", "stopped", "is_new"),
    [
        (MemoryMode.BESIDE, "committing", False),
        (MemoryMode.BESIDE, "resuming", True),
        (MemoryMode.IN_PLACE, "sending", False),
        (MemoryMode.IN_PLACE, "committing", False),
        (MemoryMode.IN_PLACE, "resuming", True),
    ],
)
def test_a_trainer_that_hangs_while_the_server_is_paused(
    served: Served, memory: MemoryMode, stopped: str, is_new: bool, tmp_path: Path
) -> None:
    """The server goes on with the old weights, or the new ones; the trainer is told when it goes on."""
    served.push(1, memory)
    new = served.answers()
    served.push(2, memory)
    old = served.answers()
    note, logged = tmp_path / "process", len(served.server.log())
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as pool:
        pushing = pool.submit(served.push, 1, memory, stopped, str(note))
        while "while it had this server paused" not in served.server.log()[logged:]:
            assert time.monotonic() - began < 60
            time.sleep(0.1)
        try:
            assert served.answers() == (new if is_new else old)
        finally:
            os.kill(int(note.read_text(encoding="utf-8")), signal.SIGCONT)
        if is_new:  # all was done but for what the server has done itself
            assert pushing.result(60)["paused"] > LEASE_S
        else:
            with pytest.raises(RanksFailedError, match=r"heard nothing|ended or closed|has ended"):
                pushing.result(60)
    assert served.answers() == (new if is_new else old)
    log = served.server.log()[logged:]
    assert "this server goes on, its caches emptied" in log
    assert "refit: left the trainer at 127.0.0.1:" in log
    served.push(2, memory)
    assert served.answers() == old


@pytest.mark.parametrize("route", ["pause?mode=keep", "sleep?level=0"])
def test_a_server_that_was_paused_runs_after_a_push(served: Served, route: str) -> None:
    served.push(2, MemoryMode.BESIDE)
    before = served.answers()
    served.server.post(route)
    served.push(1, MemoryMode.BESIDE)
    after = served.answers()
    assert after != before
    served.push(2, MemoryMode.BESIDE)
    assert served.answers() == before


def test_requests_are_answered_while_a_version_arrives_beside(served: Served) -> None:
    """By the old weights, until the new ones serve, and while they are sent."""
    served.push(2, MemoryMode.BESIDE)
    before = served.answers()
    answers: list[tuple[float, float, list[list[float]]]] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        pushing = pool.submit(served.push, 1, MemoryMode.BESIDE, "slowly")
        while not pushing.done():
            asked = time.monotonic()
            answer = served.answers()
            answers.append((asked, time.monotonic(), answer))
    seconds, after = pushing.result(), served.answers()
    assert after != before
    changed = next((index for index, (_, _, answer) in enumerate(answers) if answer != before), len(answers))
    # One has asked twice, before and after.
    assert all(answer == after for _, _, answer in answers[changed + 1 :])
    assert seconds["send"] > 2
    # "send" would be too long: the commit does not wait for the thread that measures it, which may wake later.
    began, moved = seconds["began"], seconds["began"] + seconds["move"]
    meanwhile = [answer for asked, answered, answer in answers if began < asked and answered < moved]
    assert meanwhile
    assert all(answer == before for answer in meanwhile)


def test_requests_are_answered_while_the_parties_prepare(served: Served) -> None:
    """However long a trainer rank takes; they wait only while workers look at their models."""
    served.push(2, MemoryMode.BESIDE)
    before, late_s = served.answers(), 6.0
    answered: list[tuple[float, float, list[list[float]]]] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        preparing = pool.submit(
            run_megatron, late_body, 2, args=(served.server.url, served.take_versions(1), late_s), timeout_s=120
        )
        while not preparing.done():
            asked = time.monotonic()
            answer = served.answers()
            answered.append((asked, time.monotonic(), answer))
    began, ended = preparing.result()[0]
    assert ended - began > late_s
    meanwhile = [(asked, done, answer) for asked, done, answer in answered if began < asked and done < ended]
    assert max(done - asked for asked, done, _ in meanwhile) < late_s / 2
    assert len(meanwhile) > 3
    assert all(answer == before for *_, answer in meanwhile)
    assert served.answers() != before


def test_every_replica_of_a_server_gets_the_weights(served: Served, tmp_path: Path) -> None:
    """They answer as a server without replicas does that was given the same."""
    expected = {}
    for seed in (1, 2):
        served.push(seed, MemoryMode.BESIDE)
        expected[seed] = served.answers()
    assert expected[1] != expected[2]
    with vllm_server(LLAMA, tmp_path, "--data-parallel-size", "2") as server:
        replicated = Served(server, itertools.count(1))
        for seed, memory in ((1, MemoryMode.BESIDE), (2, MemoryMode.IN_PLACE), (1, MemoryMode.BESIDE)):
            replicated.push(seed, memory)
            assert [replicated.answers(replica) for replica in (0, 1)] == [expected[seed]] * 2


@pytest.mark.parametrize("pause", [PauseMode.WAIT, PauseMode.KEEP])
def test_nothing_is_read_from_the_cache_of_older_weights(served: Served, pause: PauseMode) -> None:
    """The server answers as it did before it had ever seen the weights that it has cached a prompt with."""
    seeds = {PauseMode.WAIT: (10, 11, 10), PauseMode.KEEP: (12, 13, 12)}[pause]
    args = (served.server.url, served.take_versions(3), pause, seeds, (1, 2, 1))
    ((unseen,), (other, again), (found,)) = run_megatron(cached_body, 2, args=args, timeout_s=120)[0]
    assert [unseen.cached, other.cached, again.cached] == [0, 0, 64]
    assert other != unseen
    assert again.tokens == other.tokens
    assert found == unseen


@pytest.mark.parametrize("pause", list(PauseMode))
def test_a_request_under_way_ends_or_goes_on_as_the_pause_says_while_the_trainer_has_gone_on(
    served: Served, pause: PauseMode
) -> None:
    """Weights that the trainer changes while engines commit reach no engine."""
    args = (served.server.url, served.take_versions(3), pause)
    interrupted, (at_once, in_peace) = run_megatron(interrupting_body, 2, args=args, timeout_s=180)[0]
    before, during, same, after, went_on, paused, seconds = interrupted
    assert at_once == in_peace
    assert at_once.tokens != before.tokens[:8]
    assert set(seconds).isdisjoint({"commit", "paused"})
    assert during.cached == before.cached == after.cached == 0
    match pause:
        case PauseMode.WAIT:
            assert during == before
            assert went_on < paused
        case PauseMode.ABORT:
            assert during.ended == "abort"
            assert 0 < same == len(during.tokens) < LENGTH
        case PauseMode.KEEP:
            assert during.ended == "length"
            assert 0 < same < LENGTH
            assert during.tokens[same:] == after.tokens
            assert during.log_probabilities[same:] == after.log_probabilities
