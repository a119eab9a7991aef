"""Who can send a version, and to whom engines that join are assigned."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import pytest

from megatron_patches.refit.candidates import Source, candidates_of, encode
from megatron_patches.refit.engines import EngineClient
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.fan_out import FanOut
from megatron_patches.refit.parties.messages import Held, Standing, State
from megatron_patches.refit.push_options import RefitOptions
from megatron_patches.refit.subscription import Subscription
from megatron_patches.refit.telemetry import Telemetry
from megatron_patches.refit.trainer_rank import Trainer
from megatron_patches.refit.transports.base import TransportName


def test_the_document_and_its_digest() -> None:
    text = encode(candidates_of(7, [Source("a", "engine", 2, ["b"])], ["c"]))
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
    """A subscription as far as it matters here, and an engine."""

    def __init__(self, name: str, serves: int) -> None:
        self.name, self.serves, self.workers, self.has_all_workers = name, serves, 2, True
        self.served: Future[float] = Future()
        self.served.set_result(0.0)
        self.standing = Standing(State.READY, serves, 0.0)

    def close(self) -> None:
        """Nothing is open."""


class Waves(FanOut):
    """Notes who takes from whom, and takes until the test says how it went."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        trainer = Trainer(0, "rank 0", "cpu", None, lambda: cast(Held, None), Telemetry())
        subscribed = cast("Sequence[Subscription]", engines)
        super().__init__(RefitOptions(timeout_s=5.0), trainer, 4, lambda: subscribed, lambda _: None)
        self.taken: list[tuple[str, int, tuple[str, ...]]] = []
        self.engines: dict[str, EngineClient] = {}
        self._ends: dict[str, Future[None]] = {}
        self._told = threading.Condition()

    def _receive(self, engine: EngineClient, version: int, servers: Sequence[Subscription]) -> None:
        end: Future[None] = Future()
        with self._told:
            self.taken.append((engine.name, version, tuple(server.name for server in servers)))
            self._ends[engine.name] = end
        end.result(5.0)
        self._brought[engine.name] = cast(Subscription, Engine(engine.name, version))

    def end(self, name: str, error: str | None = None) -> None:
        end = self._ends.pop(name)
        end.set_result(None) if error is None else end.set_exception(RefitError(error))

    def bring_all(self, *names: str) -> None:
        for name in names:
            self.engines[name] = cast(EngineClient, Engine(name, -1))
            self.bring(self.engines[name])
            time.sleep(0.01)  # they come one after the other

    def wait_for(self, *names: str) -> None:
        """Until nothing is under way for these receivers."""
        deadline = time.monotonic() + 5.0
        while any(name in self._at_work or name in self._waiting for name in names):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def until(self, count: int) -> list[tuple[str, int, tuple[str, ...]]]:
        deadline = time.monotonic() + 5.0
        while len(self.taken) < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self.taken


def test_receivers_are_spread_over_engines_and_send_once_they_have_it() -> None:
    first, second, old = Engine("first", 7), Engine("second", 7), Engine("old", 6)
    waves = Waves([first, second, old])
    waves.bring_all("a", "b", "c")
    assert waves.until(2) == [("a", 7, ("first",)), ("b", 7, ("second",))]
    document = waves.candidates()
    assert [(one.name, one.receivers) for one in document.sources] == [("first", ["a"]), ("second", ["b"])]
    assert (document.version, document.waiting) == (7, ["c"])
    assert not waves.claim(waves.engines["a"])
    waves.bring_all("d")
    assert waves.claim(waves.engines["d"])  # it waits no longer, so it joins the trainer's subscription
    waves.wait_for("d")
    second.has_all_workers = False
    first.served = Future()  # it begins to receive another version
    waves.end("a")
    assert waves.until(3)[2] == ("c", 7, ("a",))  # a sends now
    waves.end("b", "second has died")
    time.sleep(0.05)
    assert len(waves.taken) == 3  # a is busy
    waves.end("c")
    found = waves.until(4)[3]
    assert found[:2] == ("b", 7)
    assert set(found[2]) <= {"a", "c"}
    waves.close()


def test_an_engine_that_failed_is_not_asked_for_the_same_version_again() -> None:
    only = Engine("only", 7)
    waves = Waves([only])
    waves.bring_all("a")
    waves.until(1)
    only.serves = 8
    waves.end("a", "version 7 is gone")
    assert waves.until(2)[1] == ("a", 8, ("only",))
    waves.end("a", "it cannot be sent")
    waves.wait_for("a")
    assert len(waves.taken) == 2  # nobody is left
    waves.bring_all("b")
    waves.until(3)
    waves.close()


def test_where_nobody_serves_a_version_nothing_is_under_way() -> None:
    waves = Waves([Engine("new", -1)])
    waves.bring_all("a")
    waves.wait_for("a")
    assert (waves.candidates().version, waves.taken) == (-1, [])
    waves.close()
