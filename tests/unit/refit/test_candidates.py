"""Who can send a version, and from whom engines that are behind take it."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from typing import Any, cast

import pytest

from megatron_patches.refit.control.messages import Standing, State
from megatron_patches.refit.trainer import fan_out as fan_out_module
from megatron_patches.refit.trainer.fan_out import FanOut, Source, candidates_json, candidates_of
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.trainer.subscription import Subscription
from megatron_patches.refit.trainer.take import Take
from megatron_patches.refit.transports.base import TransportName


def test_the_document_and_its_digest() -> None:
    text = candidates_json(candidates_of(7, [Source("a", "engine", 2, ["b"])], ["c"]))
    found = json.loads(text)
    digest = found["digest"]
    assert found == {
        "schema": 1,
        "version": 7,
        "sources": [{"name": "a", "kind": "engine", "workers": 2, "receivers": ["b"]}],
        "waiting": ["c"],
        "digest": digest,
    }
    assert hashlib.sha256(text.replace(digest, "").encode()).hexdigest() == digest


def test_it_is_refused_over_nccl() -> None:
    with pytest.raises(ValueError, match="fan_out is on and transport is c10d"):
        RefitOptions(fan_out=True, transport=TransportName.C10D)


class Engine:
    """A subscription as far as it matters here."""

    def __init__(self, name: str, serves: int, *, can_send: bool = True) -> None:
        self.name, self.serves, self.workers, self.has_all_workers = name, serves, 2, True
        self.can_send, self.is_late = can_send, False
        self.served: Future[float] = Future()
        self.served.set_result(0.0)
        self.standing = Standing(State.READY, serves, 0.0)
        self.relay, self.check_there, self._ended = None, None, self.served
        self.takes: list[tuple[int, list[str]]] = []
        self._take: Take | None = None
        self.follows, self.gone, self.told = -1, list[str](), list[str | None]()
        self.met: list[str] = []

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def follow(self, version: int) -> None:
        self.follows, self.served = version, Future()

    def end_following(self, reason: str | None) -> None:
        self.follows = -1
        self.told.append(reason)  # whoever waits hears of it a moment later

    @property
    def is_idle(self) -> bool:
        return self._ended.done() and self.has_all_workers and not self.is_late

    def take(self, take: Take) -> Future[float]:
        assert self.is_idle
        self._take, self._ended = take, Future()
        if self.follows < 0:
            self.served = self._ended
        self.met = [server.name for server in take.servers]
        self.takes.append((take.version, self.met))
        return self._ended

    def leave_others(self) -> None:
        self.give_up_taking("detached")

    def give_up_taking(self, reason: str) -> bool:
        assert self._take is not None
        had_not_come = self._take.give_up(reason)
        self._ended.set_result(0.0)
        return had_not_come

    def end(self, *, serves: bool) -> None:
        """It has committed the version or given it up."""
        assert self._take is not None
        self._take.failure = None if serves else "it was lost"
        self.serves = self._take.version if serves else self.serves
        self._ended.set_result(0.0)


def fan_out_of(engines: list[Engine], width: int | None = None) -> FanOut:
    options = RefitOptions(fan_out=True, fan_out_width=width)
    return FanOut(options, 4, lambda: cast("list[Subscription]", engines), set())


def test_a_push_waits_once_for_an_engine_that_does_not_give_up_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung engine must not delay every push."""
    waited: list[int] = []
    monkeypatch.setattr(fan_out_module, "wait", lambda ending, _: waited.append(len(ending)))
    serving, hung = Engine("serving", 7), Engine("hung", 6)
    fan_out = fan_out_of([serving, hung])
    fan_out.look()
    monkeypatch.setattr(hung, "give_up_taking", lambda reason: hung._take is not None and hung._take.give_up(reason))
    for _ in range(3):
        fan_out.hold()
        fan_out.resume()
    assert waited == [1, 0, 0]


def test_those_behind_are_spread_over_engines_and_send_once_they_have_it() -> None:
    first, second, old = Engine("first", 7), Engine("second", 7), Engine("old", 6)
    late, later, gone = Engine("late", -1), Engine("later", -1), Engine("gone", 9)
    gone.has_all_workers = False
    engines = [first, second, old, late, gone]
    fan_out = fan_out_of(engines)
    fan_out.look()
    engines.append(later)
    fan_out.look()
    assert [old.takes, late.takes, later.takes] == [[(7, ["first"])], [(7, ["second"])], []]
    document = fan_out.candidates()
    assert [(one.name, one.receivers) for one in document.sources] == [("first", ["old"]), ("second", ["late"])]
    assert (document.version, document.waiting) == (7, ["later"])
    second.has_all_workers = False
    old.end(serves=True)
    fan_out.look()
    assert later.takes == [(7, ["first"])]
    late.end(serves=False)
    fan_out.look()
    assert late.takes[1:] == [(7, ["old"])]  # it has committed, so it sends as well
    later.end(serves=True)
    late.end(serves=True)
    fan_out.look()
    assert not fan_out.candidates().waiting
    assert [len(one.takes) for one in engines] == [0, 0, 1, 2, 0, 1]


def test_servers_that_fail_are_found_and_a_version_is_not_tried_for_ever() -> None:
    servers = [Engine(f"server {number}", 7) for number in range(4)]
    late = Engine("late", 6)
    fan_out = fan_out_of([*servers, late])
    fan_out.look()
    for _ in range(3):
        late.end(serves=False)
        fan_out.look()
    assert late.takes == [(7, ["server 0"]), (7, ["server 1"]), (7, ["server 2"])]
    for one in servers:
        one.serves = 8
    fan_out.look()
    assert late.takes[3:] == [(8, ["server 0"])]
    assert not any(one.takes for one in servers)


def test_nothing_is_taken_while_a_push_begins() -> None:
    first, late, later = Engine("first", 7), Engine("late", 6), Engine("later", 6)
    engines = [first, late]
    fan_out = fan_out_of(engines)
    fan_out.look()
    engines.append(later)
    fan_out.look()
    assert (late.takes, later.takes) == ([(7, ["first"])], [])
    fan_out.hold()
    assert late.is_idle  # what it took was given up
    fan_out.look()
    assert (len(late.takes), len(later.takes)) == (1, 0)
    first.serves = late.serves = 8
    fan_out.resume()
    assert (len(late.takes), later.takes) == (1, [(8, ["first"])])
    fan_out.leave_out(cast(Subscription, later))
    assert later.is_idle


def test_those_that_follow_take_a_version_or_are_told_why_not() -> None:
    engines = [Engine(f"engine {number}", 6) for number in range(4)]
    engines[1].serves = 5
    fan_out = fan_out_of(engines, 1)
    numbered = {number: cast(Subscription, one) for number, one in enumerate(engines)}
    assert fan_out.divide(numbered, [0, 1, 2]) == ([1], [0, 2])  # the one that is furthest behind is sent the version
    seed, *others = engines
    seed.served = seed._ended = Future()  # it receives version 7, and commits it
    for one in others:
        one.follow(7)
    fan_out.look()
    assert not any(one.takes for one in engines)  # not even version 6, which engine 1 lacks
    seed.serves = 7
    seed.served.set_result(0.0)
    fan_out.look()
    fan_out.hold()
    assert [one.takes for one in engines] == [[], [(7, ["engine 0"])], [], []]
    others[0].end(serves=True)
    fan_out.look()
    assert (others[0].told, others[0].follows) == ([None], -1)
    assert [one.takes for one in others[1:]] == [[(7, ["engine 0"])], [(7, ["engine 1"])]]  # a push waits for them
    fan_out.resume()
    seed.has_all_workers = False
    others[1].end(serves=False)
    others[2].has_all_workers, others[2].gone = False, ["it has left"]
    others[2].end(serves=False)
    fan_out.look()
    assert others[1].takes[1:] == [(7, ["engine 1"])]
    others[1].end(serves=False)
    fan_out.look()
    told = "did not take version 7 from other engines"
    assert others[1].told == [f"engine 2 {told}: it was lost"]
    assert others[2].told == [f"engine 3 {told}: it has left"]
    assert fan_out.divide(numbered, [0, 1, 2, 3]) == ([2, 3], [0, 1])  # engine 2 beside the one that is furthest behind


def test_those_that_follow_are_told_if_nobody_has_the_version() -> None:
    seed, first, second = engines = [Engine(name, 6) for name in ("seed", "first", "second")]
    fan_out = fan_out_of(engines, 1)
    first.follow(7)
    second.follow(7)
    fan_out.look()
    for one in (first, second):
        assert one.told == [f"{one.name} did not take version 7 from other engines: nobody sends it"]
    assert not seed.takes


class Committing(Engine):
    """Commits version 7 just before somebody asks whether it has ended: other threads go on while one looks."""

    @property
    def has_ended(self) -> bool:
        if not self._ended.done():
            self.serves = 7
            self._ended.set_result(0.0)
        return True


def test_those_that_follow_do_not_miss_a_commit_that_ends_while_another_thread_looks() -> None:
    seed, first = Committing("seed", 6), Engine("first", 6)
    seed._ended = Future()
    first.follow(7)
    fan_out = fan_out_of([seed, first], 1)
    fan_out.look()
    assert (first.told, first.takes) == ([], [(7, ["seed"])])


def test_a_server_that_leaves_does_not_count_against_one_that_sent_with_it() -> None:
    servers = [Engine("first", 7), Engine("second", 7)]
    late = [Engine(f"late {number}", 6, can_send=False) for number in range(3)]
    for one in late:
        one.follow(7)
    fan_out = fan_out_of([*servers, *late], 2)
    fan_out.look()
    assert [one.takes for one in late] == [[(7, ["first"])], [(7, ["first", "second"])], [(7, ["second"])]]
    servers[0].has_all_workers = False
    for one, serves in zip(late, (False, False, True), strict=True):
        one.end(serves=serves)
    fan_out.look()
    late[0].end(serves=True)
    fan_out.look()
    assert [one.takes[1:] for one in late] == [[(7, ["second"])], [(7, ["second"])], []]
    late[1].end(serves=False)
    fan_out.look()
    assert [one.told for one in late] == [
        [None],
        ["late 1 did not take version 7 from other engines: it was lost"],
        [None],
    ]


def test_a_take_that_ends_as_a_push_begins_is_over_for_its_servers() -> None:
    """The engine is sent the next version before anybody looks again."""
    engines = [Engine("first", 7), Engine("late", 6), Engine("later", 7)]
    _, late, later = engines
    fan_out = fan_out_of(engines)
    fan_out.look()
    assert late.takes == [(7, ["first"])]
    late.end(serves=True)
    late._ended = Future()  # version 8 is on its way
    later.serves = 6
    fan_out.look()
    assert later.takes == [(7, ["first"])]


def test_waves_are_planned_around_engines_that_cannot_send() -> None:
    engines = [Engine(f"engine {number}", 6, can_send=number in {2, 4}) for number in range(6)]
    fan_out = fan_out_of(engines, 2)
    numbered = {number: cast(Subscription, one) for number, one in enumerate(engines)}
    ready = [*range(6)]
    assert fan_out.divide(numbered, ready) == ([2, 4], [0, 1, 3, 5])
    assert fan_out.divide(numbered, [0, 1, 3, 4]) == ([0, 4], [1, 3])
    assert fan_out.divide(numbered, [0, 1, 3]) == ([0, 1, 3], [])  # nobody could take it from another
    engines[0].serves = engines[1].serves = 5
    assert fan_out.divide(numbered, ready) == ([0, 2], [1, 3, 4, 5])  # the oldest, and one that can send
    engines[0].serves = engines[1].serves = 7
    fan_out.look()
    assert not any(one.takes for one in engines)
    assert not fan_out.candidates().sources
    engines[2].serves = 7
    fan_out.look()
    assert [one.takes for one in engines] == [[], [], [], [], [(7, ["engine 2"])], []]  # it will send as well


def test_engines_take_from_those_with_which_they_have_a_plan_if_that_costs_no_time() -> None:
    engines = [Engine(f"engine {number}", 6) for number in range(6)]
    for one, met in zip(engines[2:], (["engine 1"], ["engine 0", "engine 1"], ["engine 0"], []), strict=True):
        one.met = met
    fan_out = fan_out_of(engines)
    engines[0].serves = 7
    fan_out.look()
    assert [one.takes for one in engines] == [[], [], [], [], [(7, ["engine 0"])], []]
    engines[1].serves = 7
    engines[3].is_late = engines[5].is_late = True
    fan_out.look()
    assert [one.takes for one in engines[2:4]] == [[(7, ["engine 1"])], []]
    engines[3].is_late = engines[5].is_late = False
    fan_out.look()
    assert not engines[3].takes  # nobody sends to two at once to keep a plan
    engines[4].end(serves=True)
    fan_out.look()  # nor is anybody waited for
    assert [one.takes for one in (engines[3], engines[5])] == [[(7, ["engine 0"])], [(7, ["engine 4"])]]


def test_nobody_shares_a_server_while_the_trainer_sends_to_others() -> None:
    seed, other, first, second = engines = [Engine(name, 6) for name in ("seed", "other", "first", "second")]
    fan_out = fan_out_of(engines, 2)
    for one in (first, second):
        one.follow(7)
    seed.serves, other._ended = 7, Future()
    fan_out.look()
    assert [first.takes, second.takes] == [[(7, ["seed"])], []]
    other.serves = 7
    other._ended.set_result(0.0)
    fan_out.look()
    assert second.takes == [(7, ["other"])]


def test_a_width_needs_fan_out() -> None:
    for bad in ({"fan_out_width": 1}, {"fan_out": True, "fan_out_width": 0}):
        with pytest.raises(ValueError, match="the width is a number of engines, at least 1, and needs fan_out"):
            RefitOptions(**cast(Any, bad))


def test_where_nobody_serves_a_version_nothing_is_under_way() -> None:
    new = Engine("new", -1)
    fan_out = fan_out_of([new])
    fan_out.look()
    assert (fan_out.candidates().version, new.takes) == (-1, [])
