"""A run pushes to engines that are well, whatever becomes of the others, and all its ranks do the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from megatron_patches.refit import roster as roster_module
from megatron_patches.refit.elastic_session import ElasticSession, OnFailure
from megatron_patches.refit.engines import HttpEngine
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.roster import Roster
from tests.unit.refit.test_exchange import RANKS, Rank, together


class Engine(HttpEngine):
    """An engine that is up or not, as a test says."""

    def __init__(self, url: str, *, is_up: bool = True) -> None:
        super().__init__(url)
        self.is_up, self.asked = is_up, 0

    def check_up(self) -> None:
        self.asked += 1
        if not self.is_up:
            raise RefitError("it does not answer")


class Session:
    """Notes what it is asked; fails as ``failures`` say, one a call that is not None."""

    def __init__(self, exchange: Rank, failures: Sequence[PartyFailedError | None] = ()) -> None:
        self.exchange, self._failures = exchange, list(failures)
        self.asked: list[str] = []

    def prepare(self, engines: Sequence[HttpEngine]) -> str:
        if self.exchange.rank == 0:
            self._do("meet " + " ".join(engine.name.removeprefix("http://") for engine in engines))
        else:
            self._do("meet")
        return "digest"

    def push(self, version: int, *, wait: bool) -> str:
        assert not wait
        self._do(f"push {version}")
        return f"report of {version}"

    def wait(self) -> None:
        self._do("wait")

    def close(self) -> None:
        self.asked.append("close")

    def _do(self, what: str) -> None:
        self.asked.append(what)
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "_AGAIN_S", 0.02)
    monkeypatch.setattr(roster_module, "_COST_FACTOR", 0.0)


@contextmanager
def elastic(
    rank: Rank,
    engines: Sequence[Engine],
    failures: Sequence[PartyFailedError | None] = (),
    on_failure: OnFailure = OnFailure.CONTINUE,
    *,
    wait: bool = False,
) -> Iterator[tuple[ElasticSession, Session, list[str]]]:
    said: list[str] = []
    session = Session(rank, failures)
    under_test = ElasticSession(cast(Any, session), engines, on_failure=on_failure, say=said.append, wait=wait)
    yield under_test, session, said
    under_test.finish()


def down(*names: str) -> PartyFailedError:
    return PartyFailedError("it has ended", [f"http://{name}" for name in names])


def until(roster: Roster, count: int) -> None:
    deadline = time.monotonic() + 10
    while len([lost for lost in roster._lost.values() if lost.answers]) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_engine_that_fails_costs_the_others_no_version_and_comes_back_when_it_answers() -> None:
    engines = [Engine("http://a"), Engine("http://b")]

    def body(rank: Rank) -> tuple[list[Any], list[str], list[str]]:
        with elastic(rank, engines, [None, None, down("a")]) as (under_test, session, said):
            under_test.prepare()
            engines[0].is_up = rank.rank != 0 and engines[0].is_up
            reports: list[Any] = [under_test.push(1), under_test.push(2), under_test.push(3)]
            if rank.rank == 0:
                engines[0].is_up = True
                until(under_test._roster, 1)
            reports.append(under_test.push(4))
        return reports, session.asked, said

    found, _ = together(body)
    reports, asked, said = found[0]
    assert reports == [f"report of {version}" for version in (1, 2, 3, 4)]
    assert asked[:6] == ["meet a b", "push 1", "push 2", "meet b", "push 2", "push 3"]
    assert asked[6:] == ["meet a b", "push 4", "wait", "close"]
    assert "http://a is left out until it answers again, and training goes on; before version 2: it has" in said[0]
    assert said[1] == "refit: http://a answers again, and takes part from version 4 on"
    # Every rank does the same, and hears the same.
    assert [len(asked) for _, asked, _ in found] == [len(asked)] * RANKS
    assert [said for _, _, said in found] == [said] * RANKS


def test_where_no_engine_is_left_weights_are_sent_to_nobody_and_that_is_said_once() -> None:
    engine = Engine("http://a")

    def body(rank: Rank) -> tuple[list[Any], list[str]]:
        with elastic(rank, [engine], [None, down("a")]) as (under_test, _, said):
            under_test.prepare()
            engine.is_up = False
            return [under_test.push(version) for version in (1, 2, 3)], said

    (reports, said), *_ = together(body)[0]
    assert reports == [None] * 3
    assert len(said) == 2
    assert said[1] == "refit: no engine answers; weights are sent to nobody from version 1 on"


def test_a_failure_that_is_no_engines_is_all_of_theirs() -> None:
    """They are tried again, but not at once."""
    engines = [Engine("http://a"), Engine("http://b")]

    def body(rank: Rank) -> list[str]:
        with elastic(rank, engines, [None, PartyFailedError("no memory")]) as (under_test, session, _):
            under_test.prepare()
            assert under_test.push(1) is None
            if rank.rank == 0:
                until(under_test._roster, 2)
            assert under_test.push(2) is not None
        return session.asked

    assert together(body)[0][0] == ["meet a b", "push 1", "meet a b", "push 2", "wait", "close"]


def test_a_run_that_is_to_stop_is_told() -> None:
    def body(rank: Rank) -> None:
        with elastic(rank, [Engine("http://a")], [None, down("a")], OnFailure.STOP) as (under_test, _, _):
            under_test.prepare()
            with pytest.raises(PartyFailedError, match="it has ended"):
                under_test.push(1)

    assert together(body)[0] == [None] * RANKS


@pytest.mark.parametrize(("is_up", "met"), [((True, False), "meet a"), ((False, False), "meet a b")])
def test_a_run_begins_without_engines_that_cannot_be_reached(is_up: tuple[bool, bool], met: str) -> None:
    """Unless none can, which whoever meets them tells."""
    engines = [Engine(f"http://{name}", is_up=up) for name, up in zip("ab", is_up, strict=True)]

    def body(rank: Rank) -> str:
        with elastic(rank, engines) as (under_test, session, _):
            under_test.prepare()
            return session.asked[0]

    assert together(body)[0][0] == met


def test_what_goes_wrong_at_the_first_meeting_ends_the_run_before_its_first_step() -> None:
    def body(rank: Rank) -> None:
        with elastic(rank, [Engine("http://a"), Engine("http://b")], [down("a")]) as (under_test, _, _):
            under_test.prepare()

    assert [str(error) for error in together(body)[0]] == ["it has ended"] * RANKS


def test_an_engine_whose_failure_took_long_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the time goes into engines that are not well, at most."""
    monkeypatch.setattr(roster_module, "_COST_FACTOR", 10.0)
    engines = [Engine("http://a"), Engine("http://b")]
    roster = Roster(engines)
    began = time.monotonic()
    roster.drop(["http://a"], 0.1)
    roster.drop(["http://b"], 1000.0)
    assert roster.present == []
    until(roster, 1)
    assert time.monotonic() - began >= 1.0
    assert roster.take_back() == ["http://a"]
    assert [engine.name for engine in roster.present] == ["http://a"]
    assert (engines[0].asked, engines[1].asked) == (1, 0)
    roster.close()


@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_a_push_that_waits_goes_on_when_the_version_serves(on_failure: OnFailure) -> None:
    """An engine that does not commit it is left out, and the others, which serve it, are not sent it again."""
    engines = [Engine("http://a"), Engine("http://b")]
    failures = [None, None, None, None, down("a")]

    def body(rank: Rank) -> tuple[list[Any], list[str], list[str]]:
        reports: list[Any] = []
        with elastic(rank, engines, failures, on_failure, wait=True) as (under_test, session, said):
            under_test.prepare()
            reports.append(under_test.push(1))
            engines[0].is_up = False
            if on_failure is OnFailure.STOP:
                with pytest.raises(PartyFailedError, match="it has ended"):
                    under_test.push(2)
            else:
                reports += [under_test.push(2), under_test.push(3)]
        return reports, session.asked, said

    (reports, asked, said), *_ = together(body)[0]
    begin = ["meet a b", "push 1", "wait", "push 2", "wait"]
    if on_failure is OnFailure.STOP:
        assert (reports, asked) == (["report of 1"], [*begin, "wait", "close"])
    else:
        assert reports == [f"report of {version}" for version in (1, 2, 3)]
        assert asked == [*begin, "meet b", "push 3", "wait", "wait", "close"]
        assert "http://a is left out until it answers again, and training goes on; at version 2: it has" in said[0]
