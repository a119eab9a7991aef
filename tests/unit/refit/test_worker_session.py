"""An engine worker's states, with a party that is not there: what may follow what, and in which thread."""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_patches.refit.control.messages import State, StateLog
from megatron_patches.refit.errors import LostWeightsError, PartyFailedError, RefitError, TransferError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp, Rule
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from megatron_patches.refit.vllm import all_or_none, worker_session
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.version_memory import VersionMemory
from megatron_patches.refit.vllm.worker_session import ServingModel, WorkerLayout, WorkerSession


class Party:
    """Gets what it is told to get, once it may; notes what it is asked, and who disturbs whom."""

    def __init__(self) -> None:
        self.started, self.may_receive, self.left = threading.Event(), threading.Event(), threading.Event()
        self.may_receive.set()
        self.receiving, self.asked, self.failure = False, list[str](), ""
        self.beside_bytes = -1
        self.verified: list[int] = []
        self.sent: list[tuple[object, int, object]] = []  # to other engines
        self.brings = dict[str, float]()  # by storage

    def receive(
        self,
        version: int,
        step: int,
        linked: bool,
        make_memory: Callable[[], dict[str, torch.Tensor]],
        meanwhile: Callable[[], None] | None,
        base: Callable[[], object],
    ) -> object:
        self.receiving = True
        self.started.set()
        try:
            memory = make_memory()
            for name, value in self.brings.items():
                memory[name].fill_(value)
            assert base() is None
            if meanwhile is not None:
                meanwhile()
            while not self.may_receive.wait(0.01):
                if self.left.is_set():
                    raise PartyFailedError("it has left")
            if self.failure:
                raise PartyFailedError(self.failure)
            self.asked.append(f"received {version} at {step}, linked: {linked}")
            return memory
        finally:
            self.receiving = False

    def leave(self) -> None:
        self.asked.append("leave")
        self.left.set()

    def unlink(self) -> None:
        self.asked.append("unlink")

    def close(self) -> None:
        self.asked.append("close" + " while receiving" * self.receiving)

    def post_commit(self, version: int, reason: str | None) -> None:
        if self.left.is_set():
            raise PartyFailedError("the trainer has gone")
        self.asked.append(f"commit of {version}: {reason}")


class Relays:
    """Notes what it is to send, and when it is stopped."""

    def __init__(self, party: Party) -> None:
        self._party = party

    def start(self, call: object, version: int, digests: object) -> None:
        self._party.sent.append((call, version, digests))

    def leave(self, timeout_s: float) -> None:
        self.stop(timeout_s)

    def stop(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self._party.sent.append(("stopped", Replacement.done.count("apply"), None))


class Replacement:
    """New weights that note what is done to them, and refuse ``refused``."""

    done: list[str]
    refused: tuple[str, ...] = ()

    def __init__(self, *_: object, is_alone: bool) -> None:
        """Of an engine of two workers."""
        assert not is_alone

    def __getattr__(self, name: str) -> Callable[[], None]:
        def do() -> None:
            type(self).done.append(name)
            if name in type(self).refused:
                raise MemoryError(f"no room to {name}")

        return do


class InPlace:
    """Memory that serves, and the way back."""

    def __init__(self) -> None:
        self.begun, self.done_with, self.is_lost = False, 0, False

    def begin(self, timeout_s: float) -> dict[str, torch.Tensor]:
        assert timeout_s > 0
        self.begun = True
        return {}

    def put_back(self, derive: Callable[[], None]) -> None:
        if self.is_lost:
            raise LostWeightsError("gone")
        derive()
        self.begun = False

    def done(self) -> None:
        self.begun, self.done_with = False, self.done_with + 1


class Votes:
    """A world of two workers, of which the other one answers as told, or not at all."""

    def __init__(self, *answers: bool | None) -> None:
        self._answers = list(answers)
        self.own: list[bool] = []

    def all_reduce(self, votes: torch.Tensor, **_: object) -> object:
        self.own.append(bool(votes.item()))
        answer = self._answers.pop(0) if self._answers else True

        def wait(timeout: object) -> None:
            if answer is None:
                raise RuntimeError(f"timed out after {timeout}")
            votes.clamp_(max=int(answer))

        return SimpleNamespace(wait=wait)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker, and weights that are none."""
    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(worker_session, "Replacement", Replacement)
    monkeypatch.setattr(worker_session, "refresh_attention", lambda *_: None)
    Replacement.done, Replacement.refused = [], ()


def two(monkeypatch: pytest.MonkeyPatch, *answers: bool | None) -> Votes:
    votes = Votes(*answers)
    monkeypatch.setattr(all_or_none, "get_world_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))
    monkeypatch.setattr(dist, "all_reduce", votes.all_reduce)
    return votes


def session(
    party: Party,
    *,
    aside: bool = False,
    in_place: InPlace | None = None,
    rule: Rule | None = None,
    timeout_s: float = 5.0,
    manifest: Manifest | None = None,
    quantizes: bool = False,
) -> WorkerSession:
    log = StateLog("a trainer", logging.DEBUG)
    log.enter(State.READY)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=2, world_size_across_dp=2, rank=1)
    config = cast(Any, SimpleNamespace(additional_config={}, parallel_config=parallel))
    serving = ServingModel(nn.Linear(1, 1), config, torch.device("cpu"))
    storages = () if rule is None else (Storage("arrives", "bfloat16", 3, 3, rule),)
    layout = WorkerLayout(
        manifest or Manifest(0, "here", storages, ()),
        (),
        cast(Any, None),
        cast(Any, in_place),
        cast(Any, Relays(party)),
        quantizes=quantizes,
    )
    return WorkerSession(cast(Any, party), serving, layout, version=2, may_go_on=aside, timeout_s=timeout_s, log=log)


def test_what_is_sent_to_other_engines_ends_before_the_weights_change() -> None:
    party = Party()
    under_test = session(party)
    under_test.relay(cast(Any, "call 1"))
    party.verified = [5]
    under_test.receive(7, 3, True)
    under_test.relay(cast(Any, "call 2"))  # 7 has come, but does not serve
    under_test.commit(7)
    under_test.relay(cast(Any, "call 3"))
    party.verified = [6]
    under_test.receive(8, 4, True)
    under_test.relay(cast(Any, "call 4"))
    assert party.sent == [
        ("call 1", -1, ()),
        ("stopped", 0, None),  # once 7 has come, before it is committed
        ("call 2", -1, ()),
        ("stopped", 0, None),
        ("call 3", 7, [5]),
        ("stopped", 1, None),
        ("call 4", 7, [5]),
    ]


def test_a_version_that_comes_from_other_engines_is_committed_like_one_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    party, others, met = Party(), Party(), list[object]()
    party.backup_bytes = 5  # type: ignore[attr-defined]

    def taking(_: object, number: int, *__: object) -> SimpleNamespace:
        met.append(number)
        return SimpleNamespace(key="1" * 64, party=others, meet=met.append, leave=others.leave)

    monkeypatch.setattr(worker_session, "Taking", taking)
    under_test = session(party, aside=True)
    under_test.receive(6, 0, False)
    under_test.meet(RefitCall(call="meet", host="a", port=1, token="0" * 64, key="1" * 64, timeout_s=1.0, sources=3))
    others.verified = [5]
    under_test.receive(7, 8, False, key="1" * 64)
    under_test.commit(7)
    assert met == [4, under_test._layout.manifest]
    assert others.asked == ["received 7 at 8, linked: False", "unlink"]
    assert party.asked == ["received 6 at 0, linked: False", "commit of 7: None"]
    under_test.relay(cast(Any, "call"))
    assert party.sent[-1] == ("call", 7, [5])
    under_test.receive(8, 9, True)
    under_test.commit(8)
    under_test.receive(9, 11, False, key="1" * 64)  # with the same plan
    under_test.commit(9)
    assert others.asked[2:] == ["received 9 at 11, linked: False", "unlink"]
    others.failure = "it was lost"
    under_test.receive(10, 14, False, key="1" * 64)
    with pytest.raises(TransferError, match="what came of version 10 was given up"):
        under_test.commit(10)
    assert others.asked[4:] == ["close"]
    others.failure, others.asked = "", []
    others.may_receive.clear()
    under_test.receive(11, 17, False, key="1" * 64)
    under_test.receive(12, 12, True)  # the trainer's version goes first
    under_test.commit(12)
    assert others.asked == ["leave", "close"]
    with pytest.raises(RefitError, match="asked to receive version 13 from other engines, but this worker met none"):
        under_test.receive(13, 1, False, key="1" * 64)


def test_nothing_is_sent_to_other_engines_from_memory_in_which_a_version_arrives() -> None:
    party, in_place = Party(), InPlace()
    under_test = session(party, in_place=in_place)
    under_test.receive(7, 3, True)
    assert party.sent[0] == ("stopped", 0, None)
    under_test.relay(cast(Any, "call"))
    assert party.sent[-1] == ("call", -1, ())


@pytest.mark.parametrize("aside", [False, True])
def test_a_version_is_received_and_committed(aside: bool) -> None:
    party = Party()
    under_test = session(party, aside=aside)
    under_test.receive(7, 3, True)
    under_test.commit(7)
    assert under_test.version == 7
    assert party.asked == ["received 7 at 3, linked: True", "commit of 7: None"]
    assert Replacement.done == [*(["begin"] if aside else ["build"]), "build", "apply", "forget"]
    assert party.beside_bytes == 0
    standing = under_test._log.standing(lambda _: [])
    assert (standing.state, standing.version) == (State.READY, 7)
    assert {State.SENDING, State.COMMITTING} <= under_test._log.lasted.keys()


@pytest.mark.parametrize("place", ["beside", "aside", "in_place"])
@pytest.mark.parametrize(
    ("scale", "weight", "quantizes", "reason"),
    [
        (0.5, 1.0, True, ""),
        (0.5, math.nan, False, ""),  # as it was trained
        (0.5, math.nan, True, "has a weight of nan; this engine quantizes weights, which must be finite"),
        (0.5, -math.inf, True, "has a weight of -inf; this engine"),
        (0.0, 1.0, False, "has a scale of 0.0; it must be positive and finite"),
        (math.nan, 1.0, False, "has a scale of nan"),
        (-1.0, 1.0, False, "has a scale of -1.0"),
    ],
)
def test_a_version_with_numbers_that_would_corrupt_others_is_refused_in_one_line(
    scale: float, weight: float, quantizes: bool, reason: str, place: str
) -> None:
    """The weights before it serve, and the next version is taken."""
    names = ("layers.0.up.weight_scale_inv", "layers.0.down.weight")
    party, in_place = Party(), InPlace() if place == "in_place" else None
    manifest = Manifest(
        0,
        "here",
        (Storage(names[0], "float32", 2, 2), Storage(names[1], "bfloat16", 2, 2)),
        tuple(Placement(Box(name, (0, 0), (1, 2)), View(name, 0, (1, 2), (2, 1))) for name in names),
    )
    under_test = session(party, aside=place == "aside", in_place=in_place, manifest=manifest, quantizes=quantizes)
    party.brings = dict(zip(names, (scale, weight), strict=True))
    if not reason:
        under_test.receive(7, 3, True)
        under_test.commit(7)
        assert under_test.version == 7
        return
    with pytest.raises(TransferError) as refused:  # noqa: PT012 - now, or at the commit if it is received aside
        under_test.receive(7, 3, True)
        under_test.commit(7)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert under_test.version == 2
    assert "apply" not in Replacement.done
    assert in_place is None or not in_place.begun
    party.brings = dict.fromkeys(names, 0.5)
    under_test.receive(8, 4, True)
    under_test.commit(8)
    assert under_test.version == 8


def test_a_weight_that_is_too_large_for_the_engines_type_is_refused_where_it_is_quantized() -> None:
    rule = Rule("weight", (ElementOp(CONVERT, "float16"),))
    placement = Placement(Box("w", (0,), (3,)), View("arrives", 0, (3,), (1,)))
    manifest = Manifest(0, "here", (Storage("arrives", "bfloat16", 3, 3, rule),), (placement,))
    party = Party()
    under_test = session(party, manifest=manifest, quantizes=True)
    party.brings = {"arrives": 1e5}
    with pytest.raises(TransferError, match=r"^w\[0:3\] has a weight of inf; this engine quantizes weights"):
        under_test.receive(7, 3, True)
    party.brings = {"arrives": 6e4}
    under_test.receive(8, 4, True)
    under_test.commit(8)


def test_weights_are_put_together_while_they_arrive() -> None:
    party = Party()
    party.may_receive.clear()
    under_test = session(party, aside=True)
    under_test.receive(7, 3, True)
    deadline = time.monotonic() + 10.0
    while not Replacement.done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Replacement.done == ["begin"]
    assert party.receiving
    party.may_receive.set()
    under_test.commit(7)
    assert Replacement.done == ["begin", "build", "apply", "forget"]


def test_weights_that_are_converted_are_put_together_when_all_have_come() -> None:
    party = Party()
    party.may_receive.clear()
    under_test = session(party, aside=True, rule=Rule("weight", (ElementOp(CONVERT, "float32"),)))
    under_test.receive(7, 3, True)
    assert party.started.wait(10.0)
    time.sleep(0.05)
    assert Replacement.done == []
    party.may_receive.set()
    under_test.commit(7)
    assert Replacement.done == ["begin", "build", "apply", "forget"]


def test_what_cannot_be_put_together_is_told_at_the_commit() -> None:
    party = Party()
    Replacement.refused = ("begin",)
    under_test = session(party, aside=True)
    under_test.receive(7, 3, True)
    with pytest.raises(TransferError, match="no room to begin"):
        under_test.commit(7)
    assert under_test.version == 2


def test_only_what_was_received_last_is_committed() -> None:
    party = Party()
    under_test = session(party)
    with pytest.raises(TransferError, match="asked to commit version 7, but nothing has been received"):
        under_test.commit(7)
    under_test.receive(7, 0, True)
    with pytest.raises(TransferError, match="asked to commit version 8, but version 7 has been received"):
        under_test.commit(8)
    with pytest.raises(TransferError, match="asked to commit version 7, but version 7 was given up for version 8"):
        under_test.commit(7)
    under_test.receive(7, 0, True)
    under_test.abandon()
    with pytest.raises(TransferError, match="asked to commit version 7, but what had been received was given up"):
        under_test.commit(7)
    party.failure = "the source has ended"
    with pytest.raises(PartyFailedError):
        under_test.receive(9, 0, True)
    with pytest.raises(TransferError, match=r"what came of version 9 was given up .*the source has ended"):
        under_test.commit(9)
    assert under_test.version == 2
    assert "commit of 8: TransferError: asked to commit version 8, but version 7 has been received" in party.asked


def test_a_version_that_is_put_together_too_late_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its commit has failed by then: the worker says why, keeps nothing of it, and takes the next one."""
    party = Party()
    party.may_receive.clear()
    under_test = session(party, aside=True, timeout_s=0.05)
    under_test.receive(7, 0, True)
    late = "asked to commit version 7, but refit-receive-7 did not end within 0 s"
    with pytest.raises(TransferError, match=late):
        under_test.commit(7)
    with caplog.at_level(logging.ERROR):
        party.may_receive.set()
        for _ in range(200):
            if under_test._aside.idle:
                break
            time.sleep(0.01)
    assert "internal error" not in caplog.text
    with pytest.raises(TransferError, match="version 7 was ready only after its commit had failed"):
        under_test.commit(7)
    assert Replacement.done == ["begin"]
    assert under_test.version == 2
    assert f"commit of 7: TransferError: {late}" in party.asked
    under_test.receive(8, 0, True)
    under_test.commit(8)
    assert under_test.version == 8


def test_version_0_is_one_like_any_other() -> None:
    under_test = session(Party())
    under_test.receive(0, 0, True)
    under_test.commit(0)
    assert under_test.version == 0
    with pytest.raises(RefitError, match="asked to receive version 0 after version 0"):
        under_test.receive(0, 0, True)


def test_an_older_version_than_the_committed_one_is_refused() -> None:
    under_test = session(Party())
    under_test.receive(7, 0, True)
    under_test.commit(7)
    for version in (7, 6):
        with pytest.raises(RefitError, match=f"asked to receive version {version} after version 7"):
            under_test.receive(version, 0, True)


def test_links_are_taken_down_by_no_other_thread_than_the_one_that_receives() -> None:
    party = Party()
    party.may_receive.clear()
    under_test = session(party, aside=True)
    under_test.receive(7, 0, True)
    assert party.started.wait(30)
    under_test.close()
    assert party.asked == ["leave", "close"]


def test_a_worker_whose_weights_are_new_says_so_whatever_fails_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party()
    worker = session(party)
    worker.receive(5, 1, False)

    def fail(*_: object) -> None:
        raise RuntimeError("the device has an error")

    monkeypatch.setattr(VersionMemory, "committed", fail)
    with pytest.raises(RuntimeError, match="the device has an error"):
        worker.commit(5)
    assert "apply" in Replacement.done
    assert "undo" not in Replacement.done
    assert worker.version == 5


def test_a_commit_that_nobody_hears_of_is_one(caplog: pytest.LogCaptureFixture) -> None:
    party = Party()
    under_test = session(party)
    under_test.receive(7, 0, True)
    party.left.set()
    with caplog.at_level(logging.WARNING):
        under_test.commit(7)
    assert under_test.version == 7
    assert "nobody hears how the commit of version 7 went: the trainer has gone" in caplog.text
    under_test.receive(8, 0, True)
    Replacement.refused = ("apply",)
    with pytest.raises(TransferError, match=r"version 8 was not taken.*failed to replace its weights; version 7"):
        under_test.commit(8)


@pytest.mark.parametrize(
    ("answers", "refused", "done"),
    [
        ([False], "", ["build"]),
        ([None], "", ["build"]),
        ([True, False], "", ["build", "apply", "undo"]),
        ([True, None], "", ["build", "apply", "undo"]),
        ([True, True], "apply", ["build", "apply", "undo"]),
        ([True, True], "", ["build", "apply", "forget"]),
    ],
)
def test_all_workers_take_a_version_or_none(
    answers: list[bool | None], refused: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None for a vote that fails, as when the other worker has ended."""
    under_test = session(Party(), aside=True)
    under_test.receive(7, 0, True)
    under_test.abandon()  # waits
    under_test.receive(7, 0, True)
    Replacement.done, Replacement.refused = [], (refused,)
    votes = two(monkeypatch, *answers)
    if done[-1] == "forget":
        under_test.commit(7)
    elif answers == [True, None]:
        with pytest.raises(LostWeightsError, match="did not say within 65 s whether it serves version 7"):
            under_test.commit(7)
    else:
        with pytest.raises(TransferError, match="version 7 was not taken"):
            under_test.commit(7)
    assert [name for name in Replacement.done if name != "begin"] == done
    assert votes.own == [True, not refused and len(answers) == 2]  # a second one even where nobody waits for it


def test_a_worker_without_the_version_votes_no_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = two(monkeypatch, True)
    with pytest.raises(TransferError, match="nothing has been received"):
        session(Party()).commit(7)
    assert votes.own == [False, False]


def test_an_engine_that_sleeps_neither_receives_nor_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def asleep() -> None:
        raise RefitError("it sleeps")

    under_test = session(Party())
    under_test.receive(7, 0, True)
    with monkeypatch.context() as sleeping:
        sleeping.setattr(worker_session, "check_awake", asleep)
        with pytest.raises(TransferError, match="asked to commit version 7, but it sleeps"):
            under_test.commit(7)
        with pytest.raises(RefitError, match="it sleeps"):
            under_test.receive(8, 0, True)
    under_test.receive(8, 0, True)
    under_test.commit(8)
    assert under_test.version == 8


def test_in_place_every_call_ends_with_a_whole_version() -> None:
    party, in_place = Party(), InPlace()
    under_test = session(party, in_place=in_place)
    under_test.receive(7, 0, True)
    assert in_place.begun
    assert Replacement.done == []
    under_test.abandon()
    assert not in_place.begun
    under_test.receive(7, 0, True)
    under_test.commit(7)
    assert (in_place.begun, in_place.done_with, Replacement.done) == (False, 1, ["replace"])
    party.failure = "the source has ended"
    with pytest.raises(PartyFailedError):
        under_test.receive(8, 0, True)
    assert not in_place.begun
    party.failure, Replacement.refused = "", ("replace",)
    under_test.receive(8, 0, True)
    with pytest.raises(TransferError, match="version 7 serves on"):
        under_test.commit(8)
    assert not in_place.begun
    under_test.receive(9, 0, True)
    in_place.is_lost = True
    with pytest.raises(LostWeightsError):
        under_test.end()


def test_weights_that_cannot_be_put_back_are_lost_for_good() -> None:
    party = Party()
    under_test = session(party)
    under_test.receive(7, 0, True)
    Replacement.refused = ("apply", "undo")
    lost = "the weights that served cannot be put back: no room to undo"
    with pytest.raises(LostWeightsError, match=lost):
        under_test.commit(7)
    assert party.asked[-1] == f"commit of 7: LostWeightsError: {lost}"
    calls: list[Callable[[], None]] = [
        under_test.abandon,
        lambda: under_test.receive(8, 0, True),
        lambda: under_test.commit(8),
        under_test.end,
    ]
    for call in calls:
        with pytest.raises(LostWeightsError, match=lost):
            call()
