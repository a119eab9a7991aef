"""What a trainer rank keeps of subscriptions that have ended: nothing that would add up over a long run."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_patches.refit.control.messages import Invitation
from megatron_patches.refit.errors import PartyFailedError
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
