"""Whatever becomes of a version, an engine is asked what it must be, in the right order, and paused no longer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.layout.manifest import Manifest, Storage
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.source import live
from megatron_patches.refit.trainer.engine_client import PauseMode, SleepMode
from megatron_patches.refit.trainer.engine_control import EngineControl
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession


class Engine:
    """Notes what it is asked, and refuses ``refused`` of it."""

    def __init__(self, name: str = "one", *refused: str) -> None:
        self.name, self._refused = name, refused
        self.asked: list[str] = []
        self._called = threading.Lock()

    def _ask(self, what: str) -> None:
        assert self._called.acquire(blocking=False), "called by two threads"
        self.asked.append(what)
        time.sleep(0.01)
        self._called.release()
        if what.partition(" ")[0] in self._refused:
            raise RefitError(f"{self.name} refuses to {what}")

    def check_up(self) -> None:
        self._ask("check")

    def world_size(self) -> int:
        return 1

    def call(self, call: dict[str, Any]) -> None:
        self._ask(str(call["call"]))

    def commit(self, version: int, *, reset_cache: bool) -> None:
        assert version == 7
        self._ask("commit emptying" if reset_cache else "commit")

    def pause(self, mode: PauseMode) -> None:
        self._ask(f"pause {mode.value}")

    def resume(self, *, reset_cache: bool) -> None:
        self._ask("resume emptied" if reset_cache else "resume")


class Sleeping(Engine):
    """Sleeps, with its memory in parts."""

    def __init__(self, *refused: str, asleep: tuple[str, ...] = ("weights", "kv_cache"), paused: bool = False) -> None:
        super().__init__("one", *refused)
        self.asleep, self._is_paused = set(asleep), paused

    def is_sleeping(self) -> bool:
        return bool(self.asleep) or self._is_paused

    def wake_up(self, tag: str) -> None:
        self._ask(f"wake {tag}")
        self.asleep.discard(tag)
        self._is_paused = False

    def sleep(self) -> None:
        assert not self.asleep, "vLLM does nothing then"
        self._ask("sleep")
        self.asleep = {"weights", "kv_cache"}


class Keeper(Engine):
    """Keeps a version of its own."""

    def set_weight_version(self, version: int) -> None:
        self._ask(f"set {version}")


class Alone:
    """A rendezvous at which nobody is missing."""

    next_step = 3

    def __init__(self, *gone: str) -> None:
        self._gone, self.failed = list(gone), list[str]()

    def gone(self) -> list[str]:
        return self._gone

    def fail(self, step: int, what: str, reason: str) -> None:
        self.failed.append(f"{step} {what} {reason}")


@contextmanager
def controlled(
    engine: Engine,
    in_place: bool,
    mode: PauseMode = PauseMode.WAIT,
    check: Callable[[Any], None] = lambda _: None,
    sleeping: SleepMode = SleepMode.REFUSE,
) -> Iterator[EngineControl]:
    memory = MemoryMode.IN_PLACE if in_place else MemoryMode.BESIDE
    options = RefitOptions(pause=mode, memory=memory, timeout_s=30.0, sleeping=sleeping)
    control = EngineControl(engine, 1, options, check)
    yield control
    control.close()


def receive(control: EngineControl, parties: Alone) -> None:
    control.receive(cast(Any, parties), 7, 3, linked=True)


def nothing() -> None:
    """All goes well."""


def refuse() -> None:
    raise RefitError("it was not so")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("mode", "asked"), [(PauseMode.WAIT, "commit emptying"), (PauseMode.KEEP, "commit")])
def test_an_engine_is_paused_for_a_commit_or_in_place_before_anything_arrives(
    mode: PauseMode, asked: str, in_place: bool
) -> None:
    engine, pause = Engine(), f"pause {mode.value}"
    with controlled(engine, in_place, mode) as control:
        receive(control, Alone())
        control.commit(7, nothing)
        assert engine.asked == ([pause, "receive"] if in_place else ["receive", pause]) + [asked, "resume"]
        assert 0.02 <= control.paused_s < 5  # the time to pause counts


@pytest.mark.parametrize("refused", [(), ("set",)])
def test_an_engine_that_keeps_a_version_of_its_own_is_told_which_serves_before_a_token_is_made(
    refused: tuple[str, ...],
) -> None:
    engine = Keeper("one", *refused)
    with controlled(engine, in_place=False) as control:
        receive(control, Alone())
        control.commit(7, lambda: engine.asked.append("confirmed"))
        assert engine.asked == ["receive", "pause wait", "commit emptying", "confirmed", "set 7", "resume"]


def test_an_engine_whose_workers_did_not_commit_keeps_its_own_version() -> None:
    engine = Keeper()
    with controlled(engine, in_place=False) as control:
        receive(control, Alone())
        with pytest.raises(RefitError, match="it was not so"):
            control.commit(7, refuse)
        assert engine.asked == ["receive", "pause wait", "commit emptying", "resume"]


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_that_does_not_commit_is_resumed(in_place: bool) -> None:
    engine = Engine("one", "commit")
    with controlled(engine, in_place) as control:
        receive(control, Alone())
        with pytest.raises(RefitError, match="one refuses to commit emptying"):
            control.commit(7, refuse)
    assert engine.asked[2:] == ["commit emptying", "abandon", "resume emptied"]


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_that_does_not_say_that_its_weights_are_back_stays_paused(in_place: bool) -> None:
    engine = Engine("one", "commit", "abandon")
    with controlled(engine, in_place) as control:
        receive(control, Alone())
        with pytest.raises(RefitError, match="one stays paused"):
            control.commit(7, nothing)
    assert engine.asked[2:] == ["commit emptying", "abandon"]


@pytest.mark.parametrize(
    ("in_place", "asked"), [(False, ["receive"]), (True, ["pause wait", "receive", "abandon", "resume"])]
)
def test_where_a_version_was_not_received_nothing_is_committed(in_place: bool, asked: list[str]) -> None:
    engine, parties = Engine("one", "receive"), Alone()
    with controlled(engine, in_place) as control:
        receive(control, parties)
        with pytest.raises(RefitError, match="one refuses to receive"):
            control.commit(7, nothing)
    assert engine.asked == asked
    assert parties.failed == ["3 sending version 7 one: one refuses to receive"]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_call_that_fails_late_fails_no_later_step(in_place: bool) -> None:
    engine, parties, later = Engine("one", "receive"), Alone(), Alone()
    with controlled(engine, in_place) as control:
        receive(control, parties)
        receive(control, later)  # in the same push, of all that the version has
        assert parties.failed
        with pytest.raises(RefitError, match="one refuses to receive"):
            control.wait()
    assert engine.asked.count("pause wait") == int(in_place)
    assert len(parties.failed) == len(later.failed) == 1


@pytest.mark.parametrize(
    ("in_place", "asked"), [(False, ["receive"]), (True, ["pause wait", "receive", "abandon", "resume"])]
)
def test_a_version_that_did_not_arrive_is_given_up(in_place: bool, asked: list[str]) -> None:
    engine = Engine()
    with controlled(engine, in_place) as control:
        receive(control, Alone())
        control.wait()
        control.give_up()
        control.give_up()
    assert engine.asked == asked


def test_what_workers_do_not_confirm_is_a_failure() -> None:
    engine = Engine()
    with controlled(engine, False) as control:
        receive(control, Alone())
        with pytest.raises(RefitError, match="it was not so"):
            control.commit(7, refuse)
    assert engine.asked[-1] == "resume"


def test_an_engine_that_cannot_be_paused_receives_nothing_in_place() -> None:
    engine = Engine("one", "pause")
    with (
        controlled(engine, True) as control,
        pytest.raises(RefitError, match=r"one cannot be paused: one refuses"),
    ):
        receive(control, Alone())
    assert engine.asked == ["pause wait"]


def test_no_engine_is_paused_for_a_push_in_place_once_its_workers_have_left() -> None:
    engine = Engine()
    with controlled(engine, True) as control, pytest.raises(RefitError, match="worker 0 has ended"):
        receive(control, Alone("worker 0 has ended"))
    assert engine.asked == []


def joined(engine: Engine, check: Callable[[Any], None] = lambda _: None) -> tuple[str, float, EngineControl]:
    """Why the first step failed, after how many seconds."""
    with controlled(engine, False, check=check) as control:
        member = Assembly(control.rendezvous.invitation, 0, "trainer rank 0")
        began = time.monotonic()
        control.join(member, 1 << 20)

        def wait() -> int:
            while time.monotonic() - began < 40:
                time.sleep(0.05)
                member.check()
            return 0

        with pytest.raises(PartyFailedError) as raised:
            member.exchange("describing the trainer's weights", int, wait)
        took = time.monotonic() - began
        with pytest.raises(RefitError):
            control.wait()
        member.close()
        return str(raised.value), took, control


@pytest.mark.slow
def test_an_engine_that_answers_without_having_joined_fails_the_step_at_once() -> None:
    reason, took, control = joined(Engine())
    here = f"127.0.0.1:{control.rendezvous.invitation.port}"
    assert re.search(f"1 of the workers of one did not join; they must reach {here}, .*host must be an address", reason)
    assert took < 30
    assert (control.workers, control.unreachable) == (1, False)


class Stopped(Engine):
    """An engine whose server has been stopped: it answers nothing until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def world_size(self) -> int:
        self.goes_on.wait(20)
        raise RefitError("it was stopped")


def test_an_engine_that_never_answers_is_named() -> None:
    engine = Stopped()
    control = EngineControl(engine, 1, RefitOptions(timeout_s=0.3))
    member = Assembly(control.rendezvous.invitation, 0, "trainer rank 0")
    control.join(member, 1 << 20)
    with pytest.raises(PartyFailedError, match=r"failed: one, which never joined, gave no answer to 'describing' in"):
        member.exchange("describing", int, lambda: 0)
    engine.goes_on.set()
    member.close()
    control.close()


@pytest.mark.parametrize("refused", [(), ("check",)])
def test_an_engine_that_must_not_join_is_not_asked_to(refused: tuple[str, ...]) -> None:
    def check(_: Any) -> None:
        raise RefitError("it has two names")

    engine = Engine("one", *refused)
    reason, took, control = joined(engine, check)
    assert "failed: it has two names" in reason
    assert took < 5
    assert (engine.asked, control.unreachable) == (["check"], bool(refused))


@pytest.mark.parametrize("dead", [False, True])
def test_an_engine_that_refuses_to_join_is_not_waited_for(dead: bool) -> None:
    engine = Engine("one", "join", *(["check"] if dead else []))
    reason, took, control = joined(engine)
    assert "one refuses to join" in reason
    assert took < 5
    assert (engine.asked, control.unreachable) == (["join", "check"], dead)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells_the_names_of_the_whole_model(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every party is sent what each rank tells."""
    manifest = Manifest(rank, "here", (Storage("w", "bfloat16", 4, 4),), ())
    family = SimpleNamespace(shapes=lambda: {"w": (4,)}, config=lambda: {"model_type": "llama"})
    monkeypatch.setattr(live, "describe_rank", lambda *_: SimpleNamespace(family=family, manifest=manifest))
    monkeypatch.setattr(live.MegatronSource, "prepare", lambda _: None)
    session = RefitSession([], [], vocab_size=1)
    session.exchange = cast(Any, SimpleNamespace(rank=rank, size=2))
    held = session._describe()
    assert held.manifest is manifest
    assert held.shapes == ({"w": (4,)} if rank == 0 else {})
    assert held.config.get("torch_dtype") == ("bfloat16" if rank == 0 else None)


@pytest.mark.parametrize(("version", "message"), [(-1, "versions begin with 0"), (3, "not later than 3, which was")])
def test_versions_begin_with_0_and_rise(version: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = RefitSession([], [], vocab_size=1)
    monkeypatch.setattr(session, "_trainer", object())
    if version > 0:
        session.version = version
    with pytest.raises(ValueError, match=message):
        session.push(version)


def test_no_version_is_pushed_once_prepare_has_failed() -> None:
    """With nobody to push to, it would count as pushed."""
    session = RefitSession([], [], vocab_size=1)
    with pytest.raises(PartyFailedError, match="there is no engine to push to"):
        session.prepare()
    with pytest.raises(RefitError, match=r"prepare\(\) has not succeeded"):
        session.push(1)


def test_an_engine_that_is_attached_before_prepare_joins_with_those_that_were_given() -> None:
    engines = [cast(Any, Engine(name, "join", "check")) for name in ("given", "attached")]
    session = RefitSession([], engines[:1], vocab_size=1)
    session._describe = lambda: Held({}, {}, Manifest(0, "here", (), ()))  # type: ignore[method-assign]
    session.attach(engines[1])
    with pytest.raises(PartyFailedError) as raised:
        session.prepare()
    assert sorted(raised.value.engines) == ["attached", "given"]
    session.close()


@pytest.mark.parametrize(("sleeping", "then"), [(SleepMode.WAKE, []), (SleepMode.RESTORE, ["sleep"])])
@pytest.mark.parametrize("asleep", [("weights", "kv_cache"), ("kv_cache",)])
def test_an_engine_that_sleeps_is_woken_for_a_version_and_never_paused(
    sleeping: SleepMode, then: list[str], asleep: tuple[str, ...]
) -> None:
    engine = Sleeping(asleep=asleep)
    with controlled(engine, False, sleeping=sleeping) as control:
        receive(control, Alone())
        control.wait()
        assert engine.asked == ["wake weights", "receive"]
        control.commit(7, lambda: engine._ask("confirm"))
        assert engine.asked == ["wake weights", "receive", "commit emptying", "confirm", "wake kv_cache", *then]
        assert engine.is_sleeping() == bool(then)
        receive(control, Alone())
        control.commit(7, nothing)
        assert engine.is_sleeping() == bool(then)


@pytest.mark.parametrize("engine", [Sleeping(asleep=()), Sleeping(asleep=(), paused=True)], ids=["awake", "paused"])
def test_an_engine_that_does_not_sleep_is_paused_as_ever(engine: Sleeping) -> None:
    with controlled(engine, False, sleeping=SleepMode.RESTORE) as control:
        receive(control, Alone())
        control.commit(7, nothing)
    assert engine.asked[-4:] == ["receive", "pause wait", "commit emptying", "resume"]


def test_an_engine_that_somebody_wakes_meanwhile_is_paused() -> None:
    engine = Sleeping()
    with controlled(engine, False, sleeping=SleepMode.RESTORE) as control:
        receive(control, Alone())
        engine.asleep.clear()
        control.commit(7, nothing)
    assert engine.asked == ["wake weights", "receive", "pause wait", "commit emptying", "resume"]


@pytest.mark.parametrize("refused", ["commit", "confirm", "nothing"])
def test_an_engine_whose_weights_may_be_of_no_version_sleeps_on(refused: str) -> None:
    engine = Sleeping(refused)
    with controlled(engine, False, sleeping=SleepMode.WAKE) as control:
        receive(control, Alone())
        if refused == "nothing":  # it did not arrive
            control.give_up()
        else:
            with pytest.raises(RefitError, match=f"one refuses to {refused}"):
                control.commit(7, lambda: engine._ask("confirm"))
        assert engine.asleep == {"kv_cache"}
        assert control.left_asleep == "; one sleeps on, with its weights awake: push again"
        engine._refused = ()
        receive(control, Alone())
        control.commit(7, nothing)
        assert not engine.is_sleeping()


def test_an_engine_that_cannot_be_put_back_is_told() -> None:
    engine = Sleeping("sleep")
    with controlled(engine, False, sleeping=SleepMode.RESTORE) as control:
        receive(control, Alone())
        message = "one has committed version 7, but could not be woken, or put back to sleep: one refuses to sleep"
        with pytest.raises(RefitError, match=message):
            control.commit(7, nothing)


def test_an_engine_that_cannot_sleep_is_refused() -> None:
    message = "sleeping is wake; one is a Engine, which cannot sleep"
    with controlled(Engine(), False, sleeping=SleepMode.WAKE) as control, pytest.raises(RefitError, match=message):
        receive(control, Alone())


def test_to_wake_an_engine_versions_must_arrive_beside() -> None:
    with pytest.raises(ValueError, match=r"memory is in_place and sleeping is wake: .*; choose memory beside"):
        RefitOptions(memory=MemoryMode.IN_PLACE, sleeping=SleepMode.WAKE)
