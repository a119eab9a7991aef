"""Ranks that do something together fail together, and wait for none of them for long at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from megatron_patches.refit.control import exchange as exchange_module
from megatron_patches.refit.control.exchange import Exchange, describe_error, on_first
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.trainer.coordinator import Coordinator
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.trainer.push_orders import PushOrders
from megatron_patches.refit.trainer.subscriptions import Subscriptions
from megatron_patches.refit.trainer.trainer_rank import Trainer

RANKS = 3


@dataclass
class Shared:
    """What ranks, each a thread, have in common."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=30))
    values: list[Any] = field(default_factory=lambda: [None] * RANKS)


class Rank(Exchange):
    """One of them; notes how long it waited for the others, each time."""

    size = RANKS

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self._shared = rank, shared
        self.waited: list[float] = []

    def gather(self, value: Any) -> list[Any]:
        began = time.monotonic()
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        self.waited.append(time.monotonic() - began)
        return values


def together(body: Callable[[Rank], Any]) -> tuple[list[Any], list[Rank]]:
    """What each rank comes to: what the body returns, or the error that it raises."""
    shared = Shared()
    ranks = [Rank(rank, shared) for rank in range(RANKS)]

    def run(rank: Rank) -> Any:
        try:
            return body(rank)
        except PartyFailedError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, ranks)), ranks


def test_all_get_what_the_first_one_finds_and_wait_for_it_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that one rank comes late to ends a training by its time-out."""
    monkeypatch.setattr(exchange_module, "_LATE_S", 0.2)

    def work() -> list[int]:
        time.sleep(1.3)
        return [7]

    found, ranks = together(lambda rank: on_first(rank, work))
    assert found == [[7]] * RANKS
    for rank in ranks:
        assert len(rank.waited) >= 5
        assert max(rank.waited) < 1.0


def test_what_fails_on_the_first_one_fails_on_all() -> None:
    def work() -> None:
        raise RefitError("http://a cannot be reached")

    found, _ = together(lambda rank: on_first(rank, work))
    assert [(type(error), str(error)) for error in found] == [(PartyFailedError, "http://a cannot be reached")] * RANKS


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), AttributeError("no attribute 'k_scale'")])
def test_all_learn_that_the_first_one_cannot_decide_who_takes_part(error: Exception) -> None:
    """Whatever the reason, others would wait for its orders until the time-out of their group."""

    def decide(_: Coordinator) -> PushOrders:
        raise error

    def agree(rank: Rank) -> Any:
        subscriptions = Subscriptions(rank, RefitOptions())
        try:
            return subscriptions.agree(decide, cast(Trainer, None))
        finally:
            subscriptions.close()

    found, _ = together(agree)
    assert [str(one) for one in found] == [f"cannot start the refit: {describe_error(error)}"] * RANKS
    assert found[0].__cause__ is error


def test_only_the_first_one_works() -> None:
    worked: list[int] = []
    found, _ = together(lambda rank: on_first(rank, lambda: worked.append(rank.rank)))
    assert (found, worked) == ([None] * RANKS, [0])


def test_an_assertion_without_a_message_is_told_by_its_condition() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert describe_error(caught.value) == "raise AssertionError"
    assert describe_error(AssertionError()) == "AssertionError"
