"""Two engines of one training, each a process: whatever becomes of one, the other has each version in time."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron_patches.refit.control.kv_scales import KVScales
from megatron_patches.refit.control.messages import Standing, State
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer import roster
from megatron_patches.refit.trainer.session import Fate, OnEngineFailure, PushReport, RefitOptions, RefitSession
from megatron_patches.refit.trainer.telemetry import Telemetry
from tests.integration.live_refit import STAGING, fill, start, value
from tests.integration.tiny_models import QWEN3
from tests.support import plain_engine
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.plain_engine import PlainEngine
from tests.support.template import Process

pytestmark = pytest.mark.timeout(300)

CASE = Case(TrainerMesh(etp=2), (), QWEN3)
LEASE_S = 3.0
NAMES = [f"engine {number}" for number in range(5)]


@contextlib.contextmanager
def engines(folder: Path, count: int) -> Iterator[list[tuple[str, Process]]]:
    """Addresses and processes of engines."""
    started = []
    try:
        for number in range(count):
            address = str(folder / f"{number}.sock")
            started.append((address, plain_engine.start(address)))
        yield started
    finally:
        for _, process in started:
            process.kill()
            process.wait()


def expected(seed: int) -> dict[str, str]:
    """What an engine holds of model ``seed``."""
    shapes = family_from_config(CASE.config).shapes()
    found = {}
    for name, shape in shapes.items():
        content = value(TensorSpec(name, tuple(shape), "bfloat16").box, tuple(shape), seed).bfloat16()
        found[name] = plain_engine.digest(name, content.contiguous().view(-1).view(dtype=_int16()).numpy().tobytes())
    return found


def _int16() -> Any:
    import torch

    return torch.int16


Push = Callable[..., PushReport]
Scene = Callable[[RefitSession, list[PlainEngine], Push], Any]


def late(clients: list[PlainEngine], number: int) -> PlainEngine:
    """An engine that the session does not know yet."""
    return PlainEngine(NAMES[number], clients[0].address.replace("0.sock", f"{number}.sock"), 20.0)


def body(rank: int, world_size: int, addresses: list[str], scene: Scene, options: dict[str, Any]) -> Any:
    """Runs a scene on this rank."""
    del world_size
    chunks = start(CASE)
    clients = [PlainEngine(NAMES[number], address, 20.0) for number, address in enumerate(addresses)]
    settings = RefitOptions(staging_bytes=STAGING, timeout_s=20.0, lease_s=LEASE_S, **options)
    telemetry = Telemetry(Path(addresses[0]).with_name("costs.jsonl")) if rank == 0 else None
    session = RefitSession(chunks, clients if rank == 0 else [], vocab_size=37, options=settings, telemetry=telemetry)

    def push(version: int, *, wait: bool = False, seed: int | None = None, kv_scales: Any = None) -> PushReport:
        fill(CASE, chunks, version if seed is None else seed)
        return session.push(version, wait=wait, kv_scales=kv_scales)

    roster._AGAIN_S, roster._COST_FACTOR = 0.2, 0.0
    with contextlib.closing(session):
        session.prepare()
        return scene(session, clients, push)


def run(folder: Path, scene: Scene, count: int = 2, later: int = 0, **options: Any) -> list[Any]:
    """What a scene finds with ``count`` engines that the session knows from the beginning, and ``later`` others."""
    with engines(folder, count + later) as started:
        addresses = [address for address, _ in started[:count]]
        found: list[Any] = run_megatron(body, 2, args=(addresses, scene, options), timeout_s=150)
        return found


def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def costs(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What versions cost, by engine and version."""
    lines = [json.loads(line) for line in (folder / "costs.jsonl").read_text().splitlines()]
    found = {(line["engine"], line["version"]): line for line in lines}
    assert len(found) == len(lines)
    return found


def both_serve(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    report = push(1, wait=True)
    found = [client.run("content") for client in clients] if session.exchange.rank == 0 else []
    session.exchange.gather(None)
    return {name: one.fate for name, one in report.engines.items()}, found


def test_each_engine_serves_what_the_trainer_pushed(tmp_path: Path) -> None:
    (fates, found), (fates_of_other, _) = run(tmp_path, both_serve)
    assert fates == fates_of_other == {"engine 0": Fate.SERVES, "engine 1": Fate.SERVES}
    assert found == [(1, expected(1))] * 2
    told = costs(tmp_path)
    assert set(told) == {("engine 0", 1), ("engine 1", 1)}
    nbytes = sum(2 * math.prod(shape) for shape in family_from_config(CASE.config).shapes().values())
    for cost in told.values():
        assert cost["serves"]
        assert all(cost["bytes_by_source"])  # each of both ranks sends
        assert sum(cost["bytes_by_source"]) == nbytes
        assert all(cost["seconds"][part] > 0 for part in ("plan", "wait", "move", "verify", "commit", "pause"))
        assert cost["seconds"]["pause"] <= cost["seconds"]["commit"]


def changes_alone(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """The bytes of each version, and what both serve at last."""
    reports, first = [push(1, seed=1, wait=True), push(2, seed=1, wait=True)], session.exchange.rank == 0
    if first:
        clients[1].run("spoil")
    session.exchange.gather(None)
    for version, seed in ((3, 1), (4, 1), (5, 2), (6, 2)):
        reports.append(push(version, seed=seed, wait=True))
    found = [client.run("content") for client in clients] if first else []
    session.exchange.gather(None)
    return [[report.engines[name].nbytes for name in NAMES[:2]] for report in reports], found


def test_an_engine_gets_what_changed_since_the_version_that_it_serves_or_all(tmp_path: Path) -> None:
    """All after its weights were damaged, which digests tell, or if it serves no known version."""
    (sent, found), (sent_by_other, _) = run(tmp_path, changes_alone, payload="delta")
    nbytes = sum(2 * math.prod(shape) for shape in family_from_config(CASE.config).shapes().values())
    assert sent == sent_by_other == [[nbytes, nbytes], [0, 0], [0, nbytes], [0, 0], [nbytes, nbytes], [0, 0]]
    assert found == [(6, expected(2))] * 2
    told = costs(tmp_path)
    assert told["engine 0", 3]["bytes_by_source"] == [0, 0]
    assert all(told["engine 1", 3]["bytes_by_source"])  # both ranks have sent all, in the same push
    assert told["engine 1", 3]["serves"]


def one_misses_a_version(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 1 commits version 2 so slowly that it misses version 3. The bytes of version 4, and what both serve."""
    first, pid = session.exchange.rank == 0, 0
    push(1, seed=1, wait=True)
    if first:
        pid = clients[1].run("pid")
        clients[1].run("fail_in", "committing", int(signal.SIGSTOP))
    session.exchange.gather(None)
    push(2, seed=1)
    missed = push(3, seed=1).engines[NAMES[1]].fate
    if first:
        os.kill(pid, signal.SIGCONT)
    until(lambda: session.state()[NAMES[1]].state is State.READY)
    session.exchange.gather(None)
    report = push(4, seed=1, wait=True)
    found = [client.run("content") for client in clients] if first else []
    session.exchange.gather(None)
    return missed, [report.engines[name].nbytes for name in NAMES[:2]], found


def test_an_engine_that_missed_a_version_gets_all_of_the_next(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"payload": "delta", "on_engine_failure": OnEngineFailure.DROP, "lag_s": 0.5}
    missed, sent, found = run(tmp_path, one_misses_a_version, **settings)[0]
    assert missed is Fate.LAGS
    assert sent == [0, sum(2 * math.prod(shape) for shape in family_from_config(CASE.config).shapes().values())]
    assert found == [(4, expected(1))] * 2


@dataclass
class Fault:
    """What happens to engine 1.

    Attributes:
        how: SIGSTOP or SIGKILL.
        state: in which it happens.
    """

    how: signal.Signals
    state: str


def one_fails(fault: Fault, session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 1 fails in a state, is left out, and comes back. What each rank saw, and what both serve at last."""
    first = session.exchange.rank == 0
    waited = collectives(session)
    push(1, wait=True)
    serves, standing = list[float](), list[Standing]()
    pid, watching = 0, None
    if first:
        pid = clients[1].run("pid")
        clients[1].run("fail_in", fault.state, int(fault.how))
        watching = threading.Thread(target=watch, args=(session, clients[0], serves, standing, fault.state))
        watching.start()
    fates, took = [], []
    for version in (2, 3, 4):
        began = time.monotonic()
        fates.append({name: one.fate for name, one in push(version).engines.items()})
        took.append(time.monotonic() - began)
    longest = max(waited)
    if watching is not None:
        watching.join()
        until(lambda: clients[0].run("content")[0] == 4)
    again = None
    if first and fault.how is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    elif first:
        again = plain_engine.start(clients[1].address)
    version = until_all_serve(push, 5, 2)
    found = [client.run("content") for client in clients] if first else []
    if again is not None:
        again.kill()
        again.wait()
    return Seen(took, serves, standing, fates, found, version, session.state(), longest)


class Seen(NamedTuple):
    """What a rank saw.

    Attributes:
        took: seconds of the pushes of versions 2, 3 and 4, during which engine 1 fails.
        serves: seconds until engine 0 served version 2.
        standing: what engine 1 was at when it did.
        fates: what became of the engines in these pushes.
        found: what the engines serve at last.
        version: its number.
        states: what the subscriptions are at, at last.
        waited: the longest time in a collective, in seconds.
    """

    took: list[float]
    serves: list[float]
    standing: list[Standing]
    fates: list[dict[str, Fate]]
    found: list[tuple[int, dict[str, str]]]
    version: int
    states: Mapping[str, Standing]
    waited: float


def collectives(session: RefitSession) -> list[float]:
    """Seconds of each collective from now on."""
    gather, waited = session.exchange.gather, list[float]()

    def timed(value: Any) -> list[Any]:
        began = time.monotonic()
        try:
            return gather(value)
        finally:
            waited.append(time.monotonic() - began)

    session.exchange.gather = timed  # type: ignore[method-assign]
    return waited


def watch(
    session: RefitSession, engine: PlainEngine, serves: list[float], standing: list[Standing], state: str
) -> None:
    """Notes after how many seconds an engine serves version 2, and what engine 1 is at then, or a moment later."""
    began = time.monotonic()
    until(lambda: engine.run("content")[0] == 2)
    serves.append(time.monotonic() - began)
    # The other engine may still receive the last bytes of what it then stops committing.
    latest = time.monotonic() + 1.0
    while session.state()["engine 1"].state.value != state and time.monotonic() < latest:
        time.sleep(0.02)
    standing.append(session.state()["engine 1"])


def until_all_serve(push: Push, version: int, count: int) -> int:
    """Pushes until all engines serve a version. Returns its number."""
    while [one.fate for one in push(version, wait=True).engines.values()] != [Fate.SERVES] * count:
        time.sleep(0.1)
        version += 1
        assert version < 400
    return version


@pytest.mark.parametrize(
    ("how", "state", "memory"),
    [
        (signal.SIGSTOP, "sending", MemoryMode.BESIDE),
        (signal.SIGSTOP, "sending", MemoryMode.IN_PLACE),
        (signal.SIGSTOP, "committing", MemoryMode.BESIDE),
        (signal.SIGKILL, "sending", MemoryMode.BESIDE),
        (signal.SIGKILL, "committing", MemoryMode.IN_PLACE),
    ],
)
def test_an_engine_that_fails_costs_the_other_nothing_and_comes_back(
    tmp_path: Path, how: signal.Signals, state: str, memory: MemoryMode
) -> None:
    options: dict[str, Any] = {"on_engine_failure": OnEngineFailure.DROP, "lag_s": 0.5, "memory": memory}
    of_ranks = run(tmp_path, functools.partial(one_fails, Fault(how, state)), **options)
    seen: Seen = of_ranks[0]
    assert seen.serves[0] < 2.0  # whatever the other does
    assert max(seen.took) < LEASE_S + 2.0
    assert sorted(seen.took)[1] < 2.0  # it is waited for once
    assert [fates["engine 0"] for fates in seen.fates] == [Fate.SENT] * 3
    assert Fate.FAILED in [fates.get("engine 1") for fates in seen.fates] or state == "committing"
    if how is signal.SIGSTOP:
        assert seen.standing[0].state == (State.SENDING if state == "sending" else State.COMMITTING)
        assert seen.standing[0].waits_for == (("worker 0",) if state == "sending" else ("engine 1",))
        if state == "committing":
            assert [fates["engine 1"] for fates in seen.fates] == [Fate.SENT, Fate.LAGS, Fate.LAGS]
    assert seen.found == [(seen.version, expected(seen.version))] * 2
    assert {name: one.state for name, one in seen.states.items()} == dict.fromkeys(NAMES[:2], State.READY)
    assert of_ranks[1].fates == seen.fates
    assert max(one.waited for one in of_ranks) < 1.0  # no rank waits in a collective while an engine is waited for


def some_come_late(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Of four engines two are attached late and one is killed while it receives; another hangs while it joins."""
    first, took = session.exchange.rank == 0, []

    def timed(version: int) -> dict[str, Fate]:
        began = time.monotonic()
        found = {name: one.fate for name, one in push(version).engines.items()}
        took.append(time.monotonic() - began)
        return found

    fates = [timed(1)]
    if first:
        clients[1].run("fail_in", "sending", int(signal.SIGKILL))
        for number in (2, 3, 4):
            clients.append(late(clients, number))
            if number == 4:
                clients[4].run("fail_in", "joining", int(signal.SIGSTOP))
            session.attach(clients[number])
    version = 2
    while True:
        fates.append(timed(version))
        if [fates[-1].get(name) for name in NAMES[2:4]] == [Fate.SENT] * 2:
            break
        time.sleep(0.1)
        version += 1
        assert version < 100
    if first:
        session.detach(NAMES[4])
        session.detach(NAMES[0])
    version += 1
    fates.append(timed(version))
    session.wait()
    found = [clients[number].run("content") for number in (0, 2, 3)] if first else []
    return took, fates, found, version


def test_engines_come_and_go_at_any_time(tmp_path: Path) -> None:
    (took, fates, found, version), other = run(
        tmp_path, some_come_late, later=3, on_engine_failure=OnEngineFailure.DROP
    )
    assert max(took) < 3.0
    assert fates[0] == dict.fromkeys(NAMES[:2], Fate.SENT)
    assert {name: fates[1][name] for name in NAMES[:2]} == {NAMES[0]: Fate.SENT, NAMES[1]: Fate.FAILED}
    assert all(of_version[NAMES[0]] is Fate.SENT for of_version in fates[:-1])
    assert all(Fate.SENT is not of_version.get(NAMES[4]) for of_version in fates)
    assert fates[-1] == {**dict.fromkeys((NAMES[0], NAMES[4]), Fate.LEFT), **dict.fromkeys(NAMES[2:4], Fate.SENT)}
    assert found == [(version - 1, expected(version - 1)), *[(version, expected(version))] * 2]
    assert other[1] == fates


def one_comes_between_pushes(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 2 joins while no rank is in a push, and another one is attached and detached again meanwhile."""
    push(1, wait=True)
    first = session.exchange.rank == 0
    if first:
        for number in (2, 3):
            clients.append(late(clients, number))
            session.attach(clients[-1])
        session.detach(NAMES[3])
    until(lambda: NAMES[2] in session.state() and session.state()[NAMES[2]].state is State.READY)
    session.exchange.gather(None)
    fates = {name: one.fate for name, one in push(2, wait=True).engines.items()}
    found = [client.run("content") for client in clients] if first else []
    session.exchange.gather(None)
    return fates, found, [one.state for one in session.state().values()]


def test_an_engine_that_joins_between_two_pushes_takes_the_second(tmp_path: Path) -> None:
    (fates, found, states), other = run(tmp_path, one_comes_between_pushes, later=2)
    assert fates == other[0] == {**dict.fromkeys(NAMES[:3], Fate.SERVES), NAMES[3]: Fate.LEFT}
    assert found == [*[(2, expected(2))] * 3, (-1, {})]
    assert states == other[2] == [State.READY] * 3


def scales_come_with_versions(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """The first rank alone has scales: none at first, then good ones of two layers, bad ones, and other good ones."""
    first, found, reasons = session.exchange.rank == 0, [], []

    def give(version: int, given: dict[int | str, KVScales] | None) -> None:
        scales = given if first else None
        try:
            push(version, wait=True, kv_scales=scales)
        except PartyFailedError as error:
            reasons.append(str(error))
        session.exchange.gather(None)
        if first:
            found.append([client.run("content") for client in clients])
        session.exchange.gather(None)

    give(1, None)
    give(2, {0: KVScales(k_scale=0.5, v_scale=0.25), "x": KVScales(k_scale=1.5, v_scale=2.0, q_scale=4.0)})
    give(3, None)
    give(4, {0: KVScales(k_scale=0.5, v_scale=0.0)})
    give(4, {0: KVScales(k_scale=8.0, v_scale=16.0)})
    if first:
        clients[1].run("know", dict.fromkeys(expected(5), "bfloat16") | dict.fromkeys(SCALES_OF_0, "float32"))
    give(5, {1: KVScales(k_scale=1.0, v_scale=1.0)})
    session.prepare()
    give(5, None)
    return found, reasons


SCALES_OF_0 = ("kv_scales/0/k_scale", "kv_scales/0/v_scale")


def test_scales_of_the_first_rank_serve_with_a_version_on_all_engines_or_on_none(tmp_path: Path) -> None:
    """An engine that cannot take them keeps all from being sent, and those of before are sent on."""
    (found, reasons), (_, reasons_of_other) = run(tmp_path, scales_come_with_versions)

    def held(version: int, **scales: float) -> list[tuple[int, dict[str, str]]]:
        values = {f"kv_scales/{name.replace('__', '/')}": np.float32(value) for name, value in scales.items()}
        digests = {name: plain_engine.digest(name, value.tobytes()) for name, value in values.items()}
        return [(version, expected(version) | digests)] * 2

    two = {"0__k_scale": 0.5, "0__v_scale": 0.25, "x__k_scale": 1.5, "x__v_scale": 2.0, "x__q_scale": 4.0}
    other = {"0__k_scale": 8.0, "0__v_scale": 16.0}
    wanted = [held(1), held(2, **two), held(3, **two), held(3, **two), held(4, **other), held(4, **other)]
    assert found == [*wanted, held(5, **other)]
    assert reasons == reasons_of_other
    assert len(reasons) == 2
    assert "v_scale of layer 0 is 0.0" in reasons[0]
    assert "the engine has no kv_scales/1/k_scale" in reasons[1]


def one_is_killed(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 1 is killed while it receives, and the session is one that raises."""
    push(1, wait=True)
    if session.exchange.rank == 0:
        clients[1].run("fail_in", "sending", int(signal.SIGKILL))
    with pytest.raises(PartyFailedError) as raised:
        push(2, wait=True)
    session.exchange.gather(None)
    found = [clients[0].run("content")] if session.exchange.rank == 0 else []
    session.prepare(clients[:1])
    push(3, wait=True)
    found += [clients[0].run("content")] if session.exchange.rank == 0 else []
    return raised.value.engines, found


def test_a_push_that_raises_names_the_engine_and_the_other_one_serves_the_version(tmp_path: Path) -> None:
    (culprits, found), (culprits_of_other, _) = run(tmp_path, one_is_killed)
    assert culprits == culprits_of_other == ("engine 1",)
    assert found == [(2, expected(2)), (3, expected(3))]
    told = costs(tmp_path)
    assert [key for key, cost in told.items() if not cost["serves"]] == [("engine 1", 2)]
    lost = told["engine 1", 2]
    assert lost["bytes_by_source"] == []
    assert lost["reason"]
    assert [told["engine 0", version]["seconds"]["plan"] > 0 for version in (1, 2, 3)] == [True, False, True]


def one_rank_cannot_settle(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Completing a gather fails on one rank, once."""
    push(1, wait=True)
    source, began = session._source, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if session.exchange.rank == 1:
            patch.setattr(source, "settle", _raise)
        with pytest.raises(PartyFailedError) as raised:
            push(2, wait=True)
    took = time.monotonic() - began
    session.prepare()
    push(3, wait=True)
    found = [client.run("content") for client in clients] if session.exchange.rank == 0 else []
    return str(raised.value), took, found


def _raise() -> None:
    raise RuntimeError("the gather did not end")


def test_a_rank_whose_weights_do_not_settle_fails_the_push_of_all(tmp_path: Path) -> None:
    (reason, took, found), (reason_of_other, *_) = run(tmp_path, one_rank_cannot_settle)
    assert reason == reason_of_other
    assert "trainer rank 1" in reason
    assert "the gather did not end" in reason
    assert took < LEASE_S
    assert found == [(3, expected(3))] * 2


def settles_when_asked(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """The first rank's weights settle once both engines have been asked to receive them."""
    push(1, wait=True)
    asked = threading.Semaphore(0)
    settle, call = session._source.settle, PlainEngine.call

    def ask(client: PlainEngine, *arguments: Any, **options: Any) -> Any:
        asked.release()
        return call(client, *arguments, **options)

    def settle_late() -> None:
        assert all(asked.acquire(timeout=10.0) for _ in clients)
        settle()

    with pytest.MonkeyPatch.context() as patch:
        if session.exchange.rank == 0:
            patch.setattr(PlainEngine, "call", ask)
            patch.setattr(session._source, "settle", settle_late)
        push(2, wait=True)
    return [client.run("content") for client in clients] if session.exchange.rank == 0 else []


def test_engines_get_ready_while_weights_settle(tmp_path: Path) -> None:
    found, _ = run(tmp_path, settles_when_asked)
    assert found == [(2, expected(2))] * 2


def settles_slowly(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Notes on the first rank when weights have settled, and when an engine whose weights they overwrite is paused."""
    push(1, wait=True)
    noted: list[str] = []
    settle, pause = session._source.settle, PlainEngine.pause

    def note_pause(client: PlainEngine, mode: Any) -> None:
        noted.append("paused")
        pause(client, mode)

    def settle_late() -> None:
        time.sleep(0.5)
        settle()
        noted.append("settled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainEngine, "pause", note_pause)
        patch.setattr(session._source, "settle", settle_late)
        push(2, wait=True)
    return noted, [client.run("content") for client in clients] if session.exchange.rank == 0 else []


def test_an_engine_that_must_pause_to_receive_is_asked_once_weights_have_settled(tmp_path: Path) -> None:
    (noted, found), (noted_by_other, _) = run(tmp_path, settles_slowly, memory=MemoryMode.IN_PLACE)
    assert (noted, noted_by_other) == (["settled", "paused", "paused"], ["settled"])
    assert found == [(2, expected(2))] * 2
