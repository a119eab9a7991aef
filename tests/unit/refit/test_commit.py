"""Whatever becomes of a commit, each engine is asked what it must be, in the right order, and paused no longer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_patches.refit import session as session_module
from megatron_patches.refit.commit import Commit, Pauses
from megatron_patches.refit.engines import PauseMode
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.manifest import Manifest, Storage
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.session import RefitOptions, RefitSession


class Engine:
    """Notes what it is asked, and refuses ``refused`` of it."""

    def __init__(self, name: str, *refused: str) -> None:
        self.name, self._refused = name, refused
        self.asked: list[str] = []
        self.may_answer = threading.Event()  # ... to what it is "slow" at
        self.may_answer.set()
        self.slow = ""

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.slow:
            self.may_answer.wait(30)
        if what.partition(" ")[0] in self._refused:
            raise RefitError(f"{self.name} refuses to {what}")

    def world_size(self) -> int:
        return 1

    def call(self, call: dict[str, Any]) -> None:
        self._ask(str(call["call"]))

    def commit(self, version: int, *, reset_cache: bool) -> None:
        assert version == 7
        self._ask("commit emptying" if reset_cache else "commit")

    def pause(self, mode: PauseMode) -> None:
        self._ask(f"pause {mode.value}")
        time.sleep(0.01)

    def resume(self, *, reset_cache: bool) -> None:
        self._ask("resume emptied" if reset_cache else "resume")


def nothing() -> None:
    """All goes well."""


def refuse() -> None:
    raise RefitError("it was not so")


def commit(*engines: Engine, in_place: bool, pauses: Pauses, received: Any = nothing, confirm: Any = nothing) -> Commit:
    return Commit(7, engines, pauses, received=received, confirm=confirm, in_place=in_place, timeout_s=30.0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("mode", "asked"), [(PauseMode.WAIT, "commit emptying"), (PauseMode.KEEP, "commit")])
def test_a_commit_pauses_and_resumes_each_engine(mode: PauseMode, asked: str, in_place: bool) -> None:
    engines, pauses = [Engine("one"), Engine("two")], Pauses(mode)
    if in_place:
        pauses.begin_all(engines)
        assert [engine.asked for engine in engines] == [[f"pause {mode.value}"]] * 2
    under_test = commit(*engines, in_place=in_place, pauses=pauses)
    under_test.start()
    under_test.check()
    assert [engine.asked for engine in engines] == [[f"pause {mode.value}", asked, "resume"]] * 2
    assert 0.01 <= pauses.longest_s < 5  # the time to pause counts


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_that_does_not_commit_is_resumed_and_the_others_commit(in_place: bool) -> None:
    engines, pauses = [Engine("one", "commit"), Engine("two")], Pauses(PauseMode.WAIT)
    if in_place:
        pauses.begin_all(engines)
    under_test = commit(*engines, in_place=in_place, pauses=pauses, confirm=refuse)
    under_test.start()
    with pytest.raises(PartyFailedError, match="version 7 failed: one refuses to commit emptying") as raised:
        under_test.check()
    assert raised.value.engines == ("one",)
    assert engines[0].asked == ["pause wait", "commit emptying", "abandon", "resume emptied"]
    assert engines[1].asked == ["pause wait", "commit emptying", "resume"]


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_that_does_not_say_that_its_weights_are_back_stays_paused(in_place: bool) -> None:
    engines, pauses = [Engine("one", "commit", "abandon"), Engine("two")], Pauses(PauseMode.ABORT)
    if in_place:
        pauses.begin_all(engines)
    under_test = commit(*engines, in_place=in_place, pauses=pauses)
    under_test.start()
    with pytest.raises(PartyFailedError, match="one stays paused") as raised:
        under_test.check()
    assert raised.value.engines == ("one",)
    assert engines[0].asked == ["pause abort", "commit emptying", "abandon"]
    assert engines[1].asked == ["pause abort", "commit emptying", "resume"]


@pytest.mark.parametrize(
    ("in_place", "asked"),
    [(False, ["pause wait", "resume"]), (True, ["pause wait", "abandon", "resume"])],
)
def test_where_a_version_was_not_received_nobody_commits(in_place: bool, asked: list[str]) -> None:
    engines, pauses = [Engine("one"), Engine("two")], Pauses(PauseMode.WAIT)
    if in_place:
        pauses.begin_all(engines)
    under_test = commit(*engines, in_place=in_place, pauses=pauses, received=refuse)
    under_test.start()
    with pytest.raises(PartyFailedError, match=r"^committing version 7 failed: it was not so$"):
        under_test.check()
    assert [engine.asked for engine in engines] == [asked] * 2


def test_instead_of_a_commit_engines_go_on_with_the_old_weights() -> None:
    engines, pauses = [Engine("one", "abandon"), Engine("two")], Pauses(PauseMode.WAIT)
    pauses.begin_all(engines)
    stuck = commit(*engines, in_place=True, pauses=pauses, received=refuse).give_up()
    ((name, reason),) = stuck
    assert name == "one"
    assert "one stays paused" in str(reason)
    assert [engine.asked for engine in engines] == [["pause wait", "abandon"], ["pause wait", "abandon", "resume"]]
    assert commit(*engines, in_place=False, pauses=pauses).give_up() == []


def test_what_workers_do_not_confirm_is_a_failure() -> None:
    engine, pauses = Engine("one"), Pauses(PauseMode.WAIT)
    under_test = commit(engine, in_place=False, pauses=pauses, confirm=refuse)
    under_test.start()
    with pytest.raises(PartyFailedError, match=r"^committing version 7 failed: it was not so$"):
        under_test.check()
    assert engine.asked == ["pause wait", "commit emptying", "resume"]


def test_where_one_engine_cannot_be_paused_none_is() -> None:
    engines, pauses = [Engine("one"), Engine("two", "pause")], Pauses(PauseMode.WAIT)
    with pytest.raises(RefitError, match=r"two cannot be paused.*two refuses to pause wait"):
        pauses.begin_all(engines)
    assert [engine.asked for engine in engines] == [["pause wait", "resume"], ["pause wait"]]


def slow_engine(name: str, slow: str) -> Engine:
    engine = Engine(name)
    engine.slow = slow
    engine.may_answer.clear()
    return engine


def test_an_engine_that_does_not_answer_keeps_no_other_one_paused() -> None:
    """When a version that came in place is given up."""
    engines, pauses = [slow_engine("one", "abandon"), Engine("two")], Pauses(PauseMode.WAIT)
    pauses.begin_all(engines)
    giving_up = threading.Thread(target=commit(*engines, in_place=True, pauses=pauses).give_up)
    giving_up.start()
    deadline = time.monotonic() + 10
    while "resume" not in engines[1].asked and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engines[1].asked == ["pause wait", "abandon", "resume"]
    assert engines[0].asked == ["pause wait", "abandon"]
    engines[0].may_answer.set()
    giving_up.join(30)
    assert engines[0].asked == ["pause wait", "abandon", "resume"]


def test_whatever_goes_wrong_while_workers_are_asked_is_a_failure() -> None:
    def confirm() -> None:
        raise OSError("the network is down")

    under_test = commit(Engine("one"), in_place=False, pauses=Pauses(PauseMode.WAIT), confirm=confirm)
    under_test.start()
    with pytest.raises(PartyFailedError, match=r"^committing version 7 failed: the network is down$"):
        under_test.check()


def test_no_engine_is_paused_for_a_push_in_place_once_its_workers_have_left() -> None:
    engine = Engine("one")
    session = RefitSession([], [engine], vocab_size=1, options=RefitOptions(memory=MemoryMode.IN_PLACE))
    session._party = cast(Any, object())
    session._assembly = cast(Any, SimpleNamespace(gone=lambda: ["worker 0 has ended"], next_step=0))
    with pytest.raises(RefitError, match="worker 0 has ended"):
        session.push(1)
    assert engine.asked == []


def test_a_rank_that_ends_by_itself_waits_for_the_commit_and_for_no_other_rank() -> None:
    engine, pauses = slow_engine("one", "commit emptying"), Pauses(PauseMode.WAIT)
    session = RefitSession([], [engine], vocab_size=1)
    session._commit = Commit(7, [engine], pauses, received=nothing, confirm=refuse, in_place=False, timeout_s=5.0)
    session._commit.start()
    threading.Timer(0.2, engine.may_answer.set).start()
    with pytest.raises(RefitError, match="committing version 7 failed: it was not so"):
        session.end()
    assert engine.asked == ["pause wait", "commit emptying", "resume"]
    session.end()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells_the_names_of_the_whole_model(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every party is sent what each rank tells."""
    manifest = Manifest(rank, "here", (Storage("w", "bfloat16", 4, 4),), ())
    family = SimpleNamespace(shapes=lambda: {"w": (4,)}, config=lambda: {"model_type": "llama"})
    monkeypatch.setattr(session_module, "describe_rank", lambda *_: SimpleNamespace(family=family, manifest=manifest))
    monkeypatch.setattr(session_module, "LiveMemory", lambda *_: None)
    session = RefitSession([], [], vocab_size=1)
    session.exchange = cast(Any, SimpleNamespace(rank=rank, size=2))
    held = session._describe()
    assert held.manifest is manifest
    assert held.shapes == ({"w": (4,)} if rank == 0 else {})
    assert held.config.get("torch_dtype") == ("bfloat16" if rank == 0 else None)


@pytest.mark.parametrize(("version", "message"), [(-1, "versions begin with 0"), (3, "not later than 3, which was")])
def test_versions_begin_with_0_and_rise(version: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = RefitSession([], [], vocab_size=1)
    monkeypatch.setattr(session, "_party", object())
    monkeypatch.setattr(session, "_assembly", object())
    if version > 0:
        session.version = version
    with pytest.raises(ValueError, match=message):
        session.push(version)


def test_while_a_commit_is_under_way_no_version_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would resume the engine while the next version is on its way."""
    engine, pauses = slow_engine("one", "commit emptying"), Pauses(PauseMode.WAIT)
    session = RefitSession([], [engine], vocab_size=1, options=RefitOptions(timeout_s=0.2))
    stuck = Commit(7, [engine], pauses, received=nothing, confirm=nothing, in_place=False, timeout_s=0.2)
    session._commit = stuck
    stuck.start()
    for _ in range(2):
        with pytest.raises(
            RefitError, match=r"committing version 7 failed: .* did not say within 0 s each that it serves"
        ):
            session.push(8)
    with pytest.raises(RefitError, match="version 7 was pushed before, and committing version 7 failed: one "):
        session.prepare()
    engine.may_answer.set()
    monkeypatch.setattr(session, "_open", refuse)
    with pytest.raises(RefitError, match="it was not so"):
        session.prepare()
    assert engine.asked == ["pause wait", "commit emptying", "resume"]


@pytest.mark.parametrize("call", ["push", "prepare"])
def test_while_a_thread_pushes_no_other_one_does(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, one that failed would resume the engine while the other one's version overwrites its weights."""
    engine = Engine("one")
    session = RefitSession([], [engine], vocab_size=1, options=RefitOptions(memory=MemoryMode.IN_PLACE))
    begun, may_fail = threading.Event(), threading.Event()
    pushed: list[int] = []

    def fail(version: int, memory: Any) -> None:
        pushed.append(version)
        begun.set()
        may_fail.wait(30)
        raise RefitError("a worker has ended")

    monkeypatch.setattr(session, "_party", SimpleNamespace(push=fail, linked=True, close=nothing))
    monkeypatch.setattr(session, "_assembly", SimpleNamespace(gone=list, next_step=0))
    failures: list[str] = []

    def push() -> None:
        try:
            session.push(1)
        except RefitError as error:
            failures.append(str(error))

    thread = threading.Thread(target=push)
    thread.start()
    assert begun.wait(30)
    try:
        with pytest.raises(RefitError, match=r"another thread is in prepare\(\) or push\(\) of this session"):
            session.push(2) if call == "push" else session.prepare()
    finally:
        may_fail.set()
        thread.join()
    assert (pushed, failures) == ([1], ["a worker has ended"])
    assert engine.asked == ["pause wait", "receive", "abandon", "resume"]
    with pytest.raises(RefitError, match="a worker has ended"):
        session.push(1)
