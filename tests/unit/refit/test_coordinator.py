"""Which engines begin to join, as the first rank decides: each that is attached, once."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer import coordinator as coordinators
from megatron_patches.refit.trainer import roster
from megatron_patches.refit.trainer.coordinator import Coordinator
from megatron_patches.refit.trainer.engine_control import EngineControl
from megatron_patches.refit.trainer.push_options import Fate, OnEngineFailure
from megatron_patches.refit.trainer.push_orders import Newcomer
from megatron_patches.refit.trainer.roster import Roster
from megatron_patches.refit.trainer.session import RefitOptions
from megatron_patches.refit.trainer.subscription import Subscription
from tests.unit.refit.test_engine_control import Engine


class Open:
    """A subscription whose engine serves."""

    failure = None

    def __init__(self, name: str) -> None:
        self.name, self.joined, self.served = name, self, self

    def done(self) -> bool:
        return True


@contextlib.contextmanager
def coordinating(*engines: Engine) -> Iterator[tuple[Coordinator, dict[int, Open]]]:
    """A coordinator, and the subscriptions that it has ordered."""
    subscribed = dict[int, Open]()
    coordinator = Coordinator(RefitOptions(), 1, lambda: cast("dict[int, Subscription]", subscribed), lambda _: None)
    orders = coordinator.begin(cast(Any, engines))
    subscribed |= {one.number: Open(one.name) for one in orders.new}
    try:
        yield coordinator, subscribed
    finally:
        coordinator.close()
        for number in subscribed:
            coordinator.control(number).close()


def with_few_files(engine: Engine, *args: Any) -> EngineControl:
    """Opens the rendezvous of engine ``one`` alone."""
    if engine.name != "one":
        raise zmq.ZMQError(errno.EMFILE)
    return EngineControl(cast(Any, engine), *args)


def test_an_engine_whose_attaching_raises_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next push would fail for all, and attaching it again would be refused as a repetition."""
    coordinator = Coordinator(RefitOptions(host="192.0.2.1"), 1, dict, lambda _: None)
    coordinator.resume()
    engine, same = Engine("one"), Engine("one")
    for each in (engine, same, engine):
        with pytest.raises(PartyFailedError, match=r"cannot listen on 192\.0\.2\.1"):
            coordinator.attach(cast(Any, each))
    monkeypatch.setattr(coordinators, "EngineControl", with_few_files)
    with pytest.raises(zmq.ZMQError, match="Too many open files"):
        coordinator.attach(cast(Any, Engine("two")))
    assert not coordinator.roster.attached
    coordinator.close()


def test_an_engine_joins_in_the_next_prepare_if_another_one_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = cast(Any, [Engine("one"), Engine("two")])
    coordinator = Coordinator(RefitOptions(), 1, dict, lambda _: None)
    monkeypatch.setattr(coordinators, "EngineControl", with_few_files)
    with pytest.raises(zmq.ZMQError, match="Too many open files"):
        coordinator.begin(engines)
    monkeypatch.setattr(coordinators, "EngineControl", EngineControl)
    coordinator.pause()
    assert [one.name for one in coordinator.begin(None).new] == ["one", "two"]
    coordinator.close()


def test_engines_need_names_of_their_own() -> None:
    """One that fails would be reported as another one that serves."""
    coordinator = Coordinator(RefitOptions(), 1, dict, lambda _: None)
    coordinator.attach(cast(Any, Engine("same")))
    with pytest.raises(ValueError, match="2 engines are named 'same', and reports tell engines apart by name"):
        coordinator.attach(cast(Any, Engine("same")))
    with pytest.raises(ValueError, match="2 engines are named 'other'"):
        coordinator.begin(cast(Any, [Engine("other"), Engine("other")]))
    assert [engine.name for engine in coordinator.roster.present] == ["same"]
    coordinator.close()


def test_another_client_of_an_engine_joins_once_the_first_one_has_left() -> None:
    """Both at a time would make its workers wait for each other."""
    first, second = Engine("one"), Engine("one")
    with coordinating(first) as (coordinator, subscribed):
        coordinator.resume()
        coordinator.detach("one")
        coordinator.attach(second)
        leaving = coordinator.orders()
        assert (leaving.ended, leaving.new, leaving.taking) == ([0], [], [])
        assert leaving.fates["one"].fate is Fate.JOINING
        coordinator.control(0).close()
        coordinator.forget(0)
        del subscribed[0]
        coordinator.resume()
        assert not coordinator.control(1).unreachable  # it has begun to join before the next push
        joining = coordinator.orders()
        subscribed |= {one.number: Open(one.name) for one in joining.new}
        assert [one.number for one in joining.new] == [1]


def test_an_engine_that_is_removed_while_it_fails_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may serve another training run, whose session would end."""
    monkeypatch.setattr(roster, "_AGAIN_S", 0.01)
    came, asked, may_answer = list[str](), threading.Event(), threading.Event()

    class Slow(Engine):
        def check_up(self) -> None:
            asked.set()
            may_answer.wait(20)

    gone, slow, back = Engine("gone"), Slow("slow"), Engine("back")
    engines = Roster(lambda engine: came.append(engine.name))
    engines.set(cast(Any, [gone, slow, back]))
    engines.remove("gone")
    for engine in (gone, slow):  # a push notices it only then
        engines.drop(cast(Any, engine), 0.0)
    assert asked.wait(20)
    engines.remove("slow")
    engines.drop(cast(Any, back), 0.0)
    may_answer.set()
    while not came:
        threading.Event().wait(0.01)
    engines.close()
    assert came == ["back"]
    assert [engine.name for engine in engines.take_back()] == ["back"]
    assert not gone.asked


def test_an_engine_that_hangs_keeps_no_other_one_from_coming_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "_AGAIN_S", 0.01)
    came, may_answer = list[str](), threading.Event()

    class Hangs(Engine):
        asked_now = most = 0

        def check_up(self) -> None:
            self.asked_now += 1
            self.most = max(self.most, self.asked_now)
            may_answer.wait(60)
            self.asked_now -= 1

    hangs, back = Hangs("hangs"), Engine("back")
    engines = Roster(lambda engine: came.append(engine.name))
    engines.set(cast(Any, [hangs, back]))
    engines.drop(cast(Any, hangs), 0.0)
    deadline = time.monotonic() + 20
    while not hangs.most and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    engines.drop(cast(Any, back), 0.0)
    while not came and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    told = list(came)
    may_answer.set()
    deadline = time.monotonic() + 20
    while "hangs" not in came and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    engines.close()
    assert (told, came, hangs.most) == (["back"], ["back", "hangs"], 1)


def test_an_engine_that_cannot_begin_to_join_keeps_no_other_one_from_coming_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(roster, "_AGAIN_S", 0.01)
    first, second, began = Engine("first"), Engine("second"), list[str]()

    def join(newcomer: Newcomer) -> None:
        began.append(newcomer.name)
        if newcomer.name == "first":
            raise RuntimeError("can't start new thread")

    coordinator = Coordinator(RefitOptions(on_engine_failure=OnEngineFailure.DROP), 1, dict, join)
    coordinator.roster.set(cast(Any, [first, second]))
    coordinator.resume()
    coordinator.roster.drop(cast(Any, first), 0.0)
    while not began:
        threading.Event().wait(0.01)
    coordinator.roster.drop(cast(Any, second), 0.0)
    deadline = time.monotonic() + 20
    while len(began) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert began == ["first", "second"]
    assert "first begins to join in the next push only: can't start new thread" in caplog.text
    for number in range(2):
        coordinator.control(number).close()
    coordinator.close()
