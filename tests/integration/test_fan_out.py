"""Engines that are behind take the version that others serve, from them, while the trainer's ranks are elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit.control.messages import State
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.session import Fate, OnEngineFailure, RefitSession
from tests.integration.test_subscriptions import CASE, NAMES, Push, costs, expected, late, run, until
from tests.support import plain_engine
from tests.support.plain_engine import PlainEngine

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, Any] = {"on_engine_failure": OnEngineFailure.DROP, "fan_out": True}


def serves(engine: PlainEngine, version: int) -> bool:
    found: int = engine.run("content")[0]
    return found == version


def two_come_late(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 0 is killed while it sends to a late one; both late ones then have the version, without the trainer.

    The other rank takes part in nothing until the next push. It waits in a collective, as in a step of training.
    """
    push(1, wait=True)
    first, seen = session.exchange.rank == 0, dict[str, Any]()
    if first:
        clients[0].run("send_slowly", 0.1)
        clients[0].run("fail_in", "relaying", int(signal.SIGKILL))
        calls = [client.run("calls") for client in clients]
        others = [late(clients, number) for number in (2, 3)]
        for engine in others:
            session.attach(engine)
        until(lambda: bool(json.loads(session.candidates())["sources"][0]["receivers"]))
        seen["during"] = json.loads(session.candidates())
        until(lambda: all(serves(engine, 1) for engine in others))
        until(lambda: {session.state()[engine.name].state for engine in others} == {State.READY})
        seen["late"] = [engine.run("content") for engine in others]
        seen["calls"] = clients[1].run("calls")[len(calls[1]) :]
        seen["after"] = json.loads(session.candidates())
        seen["states"] = {name: one.state for name, one in session.state().items()}
    session.exchange.gather(None)
    seen["fates"] = {name: one.fate for name, one in push(2, wait=True).engines.items()}
    if first:
        seen["found"] = [engine.run("content") for engine in [clients[1], *others]]
    return seen


def test_late_engines_take_the_version_from_others_and_survive_the_death_of_one(tmp_path: Path) -> None:
    seen = run(tmp_path, two_come_late, later=2, **OPTIONS)[0]
    costs = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    joined = [cost for cost in costs if cost["version"] == 1 and cost["serves"] and cost["engine"] in NAMES[2:4]]
    assert {cost["engine"] for cost in joined} == set(NAMES[2:4])
    for cost in joined:
        trainer, *workers = cost["sources"]
        assert (trainer, cost["bytes_by_source"][0]) == ("the trainer's first rank", 0)
        assert {name.rpartition(" worker ")[0] for name in workers} <= set(NAMES[1:4])
        assert sum(cost["bytes_by_source"]) > 0
    assert seen["late"] == [(1, expected(1))] * 2
    assert set(seen["calls"]) == {"relay"}  # it was not paused, and did nothing else
    during = seen["during"]
    assert (during["schema"], during["version"]) == (1, 1)
    assert [source["name"] for source in during["sources"]] == NAMES[:2]
    assert {name for source in during["sources"] for name in source["receivers"]} <= set(NAMES[2:4])
    told = json.dumps({**during, "digest": ""}, separators=(",", ":"))
    assert during["digest"] == hashlib.sha256(told.encode()).hexdigest()
    assert {source["name"] for source in seen["after"]["sources"]} == set(NAMES[1:4])  # the killed one is gone
    assert [source["receivers"] for source in seen["after"]["sources"]] == [[]] * 3
    assert [seen["states"][name] for name in NAMES[2:4]] == [State.READY] * 2
    assert seen["fates"] == {NAMES[0]: Fate.FAILED, **dict.fromkeys(NAMES[1:4], Fate.SERVES)}  # none misses the push
    assert seen["found"] == [(2, expected(2))] * 3


def those_behind_catch_up(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 1 is stopped while it commits version 2, engine 2 killed while it receives it; both miss version 3.

    Both come back, and have version 3 before any other is pushed. Then all take version 4.
    """
    first, fates, found = session.exchange.rank == 0, list[dict[str, Fate]](), list[Any]()
    push(1, wait=True)
    if first:
        pid = clients[1].run("pid")
        clients[1].run("fail_in", "committing", int(signal.SIGSTOP))
        clients[2].run("fail_in", "sending", int(signal.SIGKILL))
    session.exchange.gather(None)
    for version in (2, 3):
        fates.append({name: one.fate for name, one in push(version).engines.items()})
    if first:
        until(lambda: serves(clients[0], 3))
        os.kill(pid, signal.SIGCONT)
        again = plain_engine.start(clients[2].address)
        until(lambda: all(serves(engine, 3) for engine in clients))
        found.append([engine.run("content") for engine in clients])
    session.exchange.gather(None)
    fates.append({name: one.fate for name, one in push(4, wait=True).engines.items()})
    if first:
        found.append([engine.run("content") for engine in clients])
        again.kill()
        again.wait()
    return fates, found


def test_engines_that_missed_a_version_take_it_from_others(tmp_path: Path) -> None:
    memory = MemoryMode.IN_PLACE  # so that engines are paused while versions arrive
    (fates, found), other = run(tmp_path, those_behind_catch_up, 3, lag_s=0.5, memory=memory, **OPTIONS)
    assert fates == other[0]
    assert fates[0] == {NAMES[0]: Fate.SENT, NAMES[1]: Fate.SENT, NAMES[2]: Fate.FAILED}
    assert fates[1] == {NAMES[0]: Fate.SENT, NAMES[1]: Fate.LAGS}
    assert fates[2] == {**dict.fromkeys(NAMES[:2], Fate.SERVES), NAMES[2]: Fate.SERVES}
    assert found == [[(version, expected(version))] * 3 for version in (3, 4)]
    told = costs(tmp_path)
    for name in NAMES[1:3]:
        trainer, *servers = told[name, 3]["sources"]
        assert (trainer, told[name, 3]["bytes_by_source"][0]) == ("the trainer's first rank", 0)
        assert {server.rpartition(" worker ")[0] for server in servers} <= set(NAMES[:3]) - {name}


def in_waves(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Each version goes to two of five engines, of which two can send nothing to others.

    While engine 2 sends version 2 to another one, it is killed.
    """
    first, found, left = session.exchange.rank == 0, list[Any](), [*clients[:2], *clients[3:]]
    if first:
        for engine in clients[:2]:
            engine.run("send_nothing")
    session.exchange.gather(None)
    session.prepare()
    reports = [push(1, wait=True)]
    if first:
        found.append([engine.run("content") for engine in clients])
        pid = clients[2].run("pid")
        clients[2].run("fail_in", "relaying", int(signal.SIGKILL))
        clients[2].run("send_slowly", 0.0)
    session.exchange.gather(None)
    reports.append(push(2, wait=True))
    if first:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # if it committed so late that nobody took the version from it
        found.append([engine.run("content") for engine in left])
    reports.append(push(3))
    reports.append(push(4))
    lost = session.wait()
    if first:
        found.append([engine.run("content") for engine in left])
        found.append([engine.run("calls").count("relay") for engine in clients[:2]])
    session.exchange.gather(None)
    return [({name: one.fate for name, one in each.engines.items()}, each.nbytes) for each in reports], lost, found


def test_a_push_reaches_engines_in_waves(tmp_path: Path) -> None:
    (reports, lost, found), other = run(tmp_path, in_waves, 5, lag_s=20.0, fan_out_width=2, **OPTIONS)
    assert (reports, lost) == other[:2]
    nbytes = sum(2 * math.prod(shape) for shape in family_from_config(CASE.config).shapes().values())
    assert reports[0] == (dict.fromkeys(NAMES, Fate.SERVES), 2 * nbytes)
    assert reports[1] == (dict.fromkeys(NAMES, Fate.SERVES), 2 * nbytes)
    assert reports[2][0][NAMES[2]] is Fate.FAILED
    assert reports[3][0] == {**dict.fromkeys(NAMES[:2], Fate.TAKES), **dict.fromkeys(NAMES[3:], Fate.SENT)}
    assert not lost
    assert found[:3] == [[(1, expected(1))] * 5, [(2, expected(2))] * 4, [(4, expected(4))] * 4]
    assert found[3] == [0, 0]  # they were not even asked
    told = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    served = [cost for cost in told if cost["version"] == 4 and cost["serves"]]
    assert sorted(cost["sources"][0] for cost in served) == ["0", "0", *["the trainer's first rank"] * 2]


def one_after_another(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Three versions go to engine 0, and from there to engine 1."""
    for version in (1, 2, 3):
        push(version, wait=True)
    return [(engine.run("content"), engine.run("calls")) for engine in (clients if session.exchange.rank == 0 else [])]


def test_engines_that_meet_again_keep_their_plan(tmp_path: Path) -> None:
    (_, sent), (content, taken) = run(tmp_path, one_after_another, fan_out_width=1, **OPTIONS)[0]
    assert content == (3, expected(3))
    assert (sent.count("relay"), taken.count("receive"), taken.count("meet")) == (3, 3, 1)


def one_takes(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """A push begins while an engine takes the version before."""
    push(1, wait=True)
    first, other = session.exchange.rank == 0, late(clients, 1)
    if first:
        clients[0].run("send_slowly", 0.3)
        session.attach(other)
        until(lambda: other.run("calls").count("receive") == 1)
    session.exchange.gather(None)
    report = push(2, wait=True)
    found = other.run("content") if first else None
    session.exchange.gather(None)
    return {name: one.fate for name, one in report.engines.items()}, found


def test_an_engine_gives_up_what_it_takes_and_takes_part_in_a_push_that_waits_for_no_commit(tmp_path: Path) -> None:
    (fates, found), _ = run(tmp_path, one_takes, count=1, later=1, lag_s=0.0, **OPTIONS)
    assert fates == dict.fromkeys(NAMES[:2], Fate.SERVES)
    assert found == (2, expected(2))


def it_meets_nobody(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """Engine 1 is to take versions from engine 0, and never meets it. The fates of a push after another preparation."""
    call = PlainEngine.call

    def refuse(client: PlainEngine, what: dict[str, Any]) -> None:
        if what["call"] == "meet":
            raise RefitError("no route to engine 0")
        call(client, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainEngine, "call", refuse)
        with pytest.raises(PartyFailedError, match="no route to engine 0"):
            push(1, wait=True)
        session.prepare()
        report = push(2, wait=True)
    return {name: one.fate for name, one in report.engines.items()}


def test_an_engine_that_can_take_nothing_from_others_is_sent_to_after_another_preparation(tmp_path: Path) -> None:
    fates, _ = run(tmp_path, it_meets_nobody, fan_out=True, fan_out_width=1)
    assert fates == dict.fromkeys(NAMES[:2], Fate.SERVES)


def nobody_can_send(session: RefitSession, clients: list[PlainEngine], push: Push) -> Any:
    """What the only engine serves is damaged; then a push begins while it sends."""
    push(1, wait=True)
    first, found, other = session.exchange.rank == 0, list[Any](), late(clients, 1)
    if first:
        clients[0].run("damage", "model.norm.weight")
        session.attach(other)
        until(lambda: other.run("calls").count("receive") == 1)
        until(lambda: session.state()[other.name].state is State.READY)
        found.append(other.run("content"))
        session.detach(other.name)
    session.exchange.gather(None)
    push(2, wait=True)
    if first:
        clients[0].run("send_slowly", 0.3)
        session.attach(other)
        until(lambda: other.run("calls").count("receive") == 2)
    session.exchange.gather(None)
    began = time.monotonic()
    report = push(3, wait=True)
    took = time.monotonic() - began
    if first:
        found.append(other.run("content"))
    session.exchange.gather(None)
    return {name: one.fate for name, one in report.engines.items()}, took, found


@pytest.mark.slow
def test_what_has_changed_is_not_taken(tmp_path: Path) -> None:
    (fates, took, found), _ = run(tmp_path, nobody_can_send, count=1, later=1, **OPTIONS)
    assert found[0] == (-1, {})  # its digest is not that of what the trainer sent
    assert fates == dict.fromkeys(NAMES[:2], Fate.SERVES)  # the late one gave up version 2, to take 3
    assert took < 3.0  # the fleet does not wait for what an engine sends to another
    assert found[1] == (3, expected(3))
