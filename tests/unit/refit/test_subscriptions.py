"""What a trainer rank keeps of subscriptions that have ended: nothing that would add up over a long run."""

from __future__ import annotations

import gc
import weakref
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
from megatron_patches.refit.trainer.telemetry import Telemetry
from megatron_patches.refit.trainer.trainer_rank import Trainer


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
