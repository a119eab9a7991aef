"""What a trainer rank keeps of subscriptions that have ended: nothing that would add up over a long run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_patches.refit.control.messages import Invitation, Moved
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.trainer import subscription
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.trainer.subscription import Subscription
from megatron_patches.refit.trainer.subscriptions import Subscriptions
from megatron_patches.refit.trainer.take import Take
from megatron_patches.refit.trainer.telemetry import Telemetry
from megatron_patches.refit.trainer.trainer_rank import Trainer
from megatron_patches.refit.transports.base import TransportName


class Earlier:
    """A subscription that was closed."""

    def __init__(self, name: str = "one", *, commits: bool = False) -> None:
        self.name, self.finished = name, 0
        self.served = Future[float]()
        if not commits:
            self.served.set_result(0.0)

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> Future[None]:
        closed = Future[None]()
        closed.set_result(None)
        return closed


def test_a_subscription_forgets_the_one_that_it_has_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PartyFailedError("nobody is there")

    monkeypatch.setattr(subscription, "Assembly", refuse)
    trainer = Trainer(0, "trainer rank 0", "cpu", None, lambda: cast(Any, None), Telemetry())
    earlier = Earlier()
    kept = weakref.ref(earlier)
    one = Subscription(
        "one",
        Invitation("127.0.0.1", 1, "0" * 64, 1.0),
        trainer,
        RefitOptions().links(1, 1 << 20),
        control=None,
        after=cast(Any, earlier),
    )
    assert str(one.joined.exception(20)) == "one: nobody is there"  # an error names the engine
    assert earlier.finished == 1
    del earlier
    gc.collect()
    assert kept() is None
    one.close()


class DeltaParty:
    """A trainer rank's party whose second push fails, with a reason that always contains the same text."""

    linked = True

    def __init__(self, *, digests_differ: bool) -> None:
        self._digests_differ = digests_differ
        self.pushed: list[tuple[int, bool]] = []  # versions, and whether they were sent as deltas

    def prepare(self, *_: object) -> None:
        """Nothing."""

    def push(self, version: int, _: object, base: object, *, writing: object) -> Moved:
        assert writing is None
        self.pushed.append((version, base is not None))
        if len(self.pushed) == 2:
            raise PartyFailedError("worker 0: DigestError in its text", digests_differ=self._digests_differ)
        return Moved({}, 0)

    def leave(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("digests_differ", [True, False])
def test_a_delta_is_sent_again_whole_if_digests_differ_whatever_the_reason_says(
    monkeypatch: pytest.MonkeyPatch, digests_differ: bool, has_base: bool
) -> None:
    """By all ranks, also those that had no memory for a base: the others wait for them."""
    party = DeltaParty(digests_differ=digests_differ)
    assembly = SimpleNamespace(next_step=0, gone=lambda *_: [], collect=lambda *_: {0: None})
    monkeypatch.setattr(subscription, "Assembly", lambda *_: assembly)
    monkeypatch.setattr(subscription, "SourceParty", lambda *_: party)
    trainer = Trainer(1, "trainer rank 1", "cpu", None, lambda: cast(Any, None), Telemetry())
    invitation = Invitation("127.0.0.1", 1, "0" * 64, 1.0)
    links = RefitOptions(payload=PayloadKind.DELTA).links(2, 1 << 20)
    one = Subscription("one", invitation, trainer, links, control=None, after=None)
    try:
        one.send(1, dict)
        assert one.served.result(20) == 0.0
        one.send(2, dict, cast(Any, SimpleNamespace(version=1)) if has_base else None)
        again = [(2, False)] if digests_differ else []
        assert (one.sent.exception(20) is None) is digests_differ
        assert party.pushed == [(1, False), (2, has_base), *again]
    finally:
        one.close()


def test_what_is_begun_after_its_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the trainer leaves an engine out just after another thread has found that it can take a version."""

    def refuse(*_: object) -> None:
        raise PartyFailedError("nobody is there")

    monkeypatch.setattr(subscription, "Assembly", refuse)
    trainer = Trainer(0, "trainer rank 0", "cpu", None, lambda: cast(Any, None), Telemetry())
    invitation = Invitation("127.0.0.1", 1, "0" * 64, 1.0)
    one = Subscription("one", invitation, trainer, RefitOptions().links(1, 1 << 20), control=None, after=None)
    one.close().result(20)
    assert str(one.take(Take(1, [])).exception(20)) == "refit-one has ended"


class FirstStep:
    """A trainer rank's party that begins to push and ends there.

    Attributes:
        transport: the transport of packets.
    """

    linked = True

    def __init__(self, transport: TransportName) -> None:
        self.transport = transport

    def prepare(self, *_: object) -> None:
        """Nothing."""

    def push(self, _: int, begin: Callable[[], object], *__: object, writing: object) -> Moved:
        del writing
        begin()
        return Moved({}, 0)

    def leave(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Asked:
    """Notes when an engine is asked to receive."""

    in_place, cannot_send, left_asleep, paused_s = False, "", "", 0.0
    options = RefitOptions()

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def receive(self, *_: object, linked: bool) -> None:
        del linked
        self._noted.append("asked")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None  # all else does nothing


@pytest.mark.parametrize(
    ("transport", "order"),
    [(TransportName.C10D, ["settled", "asked"]), (TransportName.TCP, ["asked", "settled"])],
)
def test_an_engine_whose_requests_wait_while_it_receives_is_asked_once_weights_have_settled(
    monkeypatch: pytest.MonkeyPatch, transport: TransportName, order: list[str]
) -> None:
    """Over NCCL, a worker receives between two steps of its engine."""
    noted: list[str] = []
    assembly = SimpleNamespace(next_step=0, gone=lambda *_: [], post=lambda *_: None)
    monkeypatch.setattr(subscription, "Assembly", lambda *_: assembly)
    monkeypatch.setattr(subscription, "SourceParty", lambda *_: FirstStep(transport))
    trainer = Trainer(0, "trainer rank 0", "cpu", None, lambda: cast(Any, None), Telemetry())
    one = Subscription(
        "one",
        Invitation("127.0.0.1", 1, "0" * 64, 1.0),
        trainer,
        RefitOptions().links(1, 1 << 20),
        control=cast(Any, Asked(noted)),
        after=None,
    )

    def look_up() -> dict[str, Any]:
        if "settled" not in noted:
            noted.append("settled")
        return {}

    try:
        one.send(1, look_up)
        assert one.sent.exception(20) is None
        assert noted == order
    finally:
        one.close()


def test_of_subscriptions_that_have_ended_only_those_are_kept_that_still_commit() -> None:
    subscriptions = Subscriptions(cast(Any, SimpleNamespace(rank=1, size=2)), RefitOptions())
    ended = [Earlier(f"server {number}") for number in range(3)]
    kept = [weakref.ref(one) for one in ended]
    committing = Earlier("slow", commits=True)
    subscriptions.open = cast(Any, dict(enumerate([committing, *ended])))
    del ended
    for number in range(4):
        subscriptions.drop(number, 0.0)
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    late = weakref.ref(committing)
    del committing
    gc.collect()
    assert late() is not None
