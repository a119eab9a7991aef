"""The subscriptions of one trainer rank, and what became of them on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from megatron_patches.refit.control.exchange import Exchange, describe_error
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer.coordinator import Coordinator
from megatron_patches.refit.trainer.lobby import Listener
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.trainer.push_orders import Newcomer, PartOutcome, PushOrders, outcome_of
from megatron_patches.refit.trainer.subscription import Subscription
from megatron_patches.refit.trainer.trainer_rank import Trainer


class Subscriptions:
    """The subscriptions of one trainer rank. They follow the first rank's orders, so all ranks have the same ones.

    A subscription may begin on one rank before others know of it. It counts once the ranks have agreed on it.

    Args:
        exchange: collectives over the trainer's ranks.
        options: of the session.

    Attributes:
        open: those that all ranks have, by number. It is replaced, not changed, because other threads read it.
        coordinator: on the first rank, decides who joins, takes part and leaves; None on other ranks.
    """

    def __init__(self, exchange: Exchange, options: RefitOptions) -> None:
        self._exchange, self._options = exchange, options
        self.open: Mapping[int, Subscription] = {}
        self._early: Mapping[int, Subscription] = {}  # by number, those on which the ranks have not agreed yet
        self._closed: dict[str, Subscription] = {}  # the last closed one of each engine, by name
        self._next = 0  # the ranks have agreed on all with lower numbers
        self._trainer: Trainer | None = None
        self._lock = threading.Lock()  # for newcomers, which any thread may report
        self._listener: Listener | None = None
        self.coordinator: Coordinator | None = None
        if exchange.rank == 0:
            self.coordinator = Coordinator(options, exchange.size, lambda: self.all, self.hear)

    @property
    def all(self) -> Mapping[int, Subscription]:
        """All subscriptions of this rank, by number. Any thread may ask."""
        return {**self._early, **self.open}

    def hear(self, newcomer: Newcomer) -> None:
        """Begins a subscription on this rank, unless it is known. Any thread may call it."""
        with self._lock:
            if self._trainer is not None and newcomer.number >= self._next and newcomer.number not in self._early:
                self._early = {**self._early, newcomer.number: self._make(newcomer, self._trainer)}

    def agree(self, decide: Callable[[Coordinator], PushOrders], trainer: Trainer) -> PushOrders:
        """Carries out on all ranks what the first rank decides. Collective, and waits for no engine.

        Args:
            decide: returns the orders of the first rank's coordinator.
            trainer: this rank.

        Returns:
            The orders.

        Raises:
            PartyFailedError: on every rank, if it decides that the push fails.
        """
        orders, cause = PushOrders(), None
        if self.coordinator is not None:
            try:
                orders = decide(self.coordinator)
            except Exception as error:  # noqa: BLE001 - carried to every rank, and raised on this one as the cause
                cause = error
                engines = error.engines if isinstance(error, PartyFailedError) else ()
                orders = PushOrders(error=f"cannot start the refit: {describe_error(error)}", engines=engines)
        (orders, *_) = self._exchange.gather(orders)
        if orders.error is not None:
            raise PartyFailedError(orders.error, orders.engines) from cause
        self._agree_on(orders, trainer)
        for number in orders.ended:
            self._end(number)
        if self.coordinator is not None:
            self.coordinator.resume()
        if orders.lobby is not None and self.coordinator is None and self._listener is None:
            self._listener = Listener(orders.lobby, self.hear)
        return orders

    def drop(self, number: int, cost_s: float) -> None:
        """Ends the subscription of an engine that failed. The first rank asks from time to time whether it is back.

        Args:
            number: of the subscription.
            cost_s: seconds lost by the failure.
        """
        engine = None if self.coordinator is None else self.coordinator.control(number).engine
        self._end(number)
        if self.coordinator is not None and engine is not None:
            self.coordinator.roster.drop(engine, cost_s)

    def end_all(self) -> None:
        """Ends all subscriptions, and waits until the other parties have received what was on its way to them."""
        if self.coordinator is not None:
            self.coordinator.pause()
        with self._lock:
            self._trainer = None
            self.open, self._early = {**self._early, **self.open}, {}
        for closed in [self._end(number) for number in self.open]:
            closed.result()

    def close(self) -> None:
        """Ends all subscriptions, and listening for new ones."""
        if self.coordinator is not None:
            self.coordinator.close()
        if self._listener is not None:
            self._listener.close()
        self.end_all()

    def forget_failures(self) -> None:
        """Forgets that commits failed, because each failure is reported once."""
        for one in self.open.values():
            one.forget()

    def error(self, failed: Mapping[int, PartOutcome]) -> PartyFailedError:
        """The error for subscriptions that failed, with the reasons and the names of the engines."""
        reasons = dict.fromkeys(str(outcome.reason) for outcome in failed.values())
        return PartyFailedError("; ".join(reasons), [self.open[number].name for number in failed])

    def outcomes(self, parts: Mapping[int, Future[Any]]) -> dict[int, PartOutcome]:
        """What has become of each subscription's part: failed if it failed on any rank, with the first rank's reason.

        Collective. Each rank waits for its own part before it meets the others, which end theirs at the same time.
        """
        await_all(parts)
        mine = {number: outcome_of(future) for number, future in parts.items()}
        if self._exchange.rank == 0:
            for number, outcome in mine.items():
                outcome.unreachable = self.open[number].unreachable
        first, *others = self._exchange.gather(mine)
        for other in others:
            for number, outcome in other.items():
                if first[number].reason is None:
                    first[number].reason = outcome.reason
        return first

    def _agree_on(self, orders: PushOrders, trainer: Trainer) -> None:
        with self._lock:
            self._trainer, self._next = trainer, orders.next
            early, begun = dict(self._early), dict[int, Subscription]()
            for newcomer in orders.new:
                known = early.pop(newcomer.number, None)
                begun[newcomer.number] = self._make(newcomer, trainer) if known is None else known
            self.open = {**self.open, **begun}
            self._early = {number: one for number, one in early.items() if number >= orders.next}
        for number, one in early.items():
            if number < orders.next:  # the first rank has ended it since
                one.close()

    def _make(self, newcomer: Newcomer, trainer: Trainer) -> Subscription:
        number, name, coordinator = newcomer.number, newcomer.name, self.coordinator
        closed = self._closed.pop(name, None)  # it may still be committing
        return Subscription(
            name,
            newcomer.invitation,
            trainer,
            self._options.links(self._exchange.size, newcomer.staging_bytes),
            control=None if coordinator is None else coordinator.control(number),
            after=closed,
            changed=(lambda: None) if coordinator is None else coordinator.look,
        )

    def _end(self, number: int) -> Future[None]:
        one = self.open[number]
        self.open = {other: each for other, each in self.open.items() if other != number}
        with self._lock:
            self._closed = {name: other for name, other in self._closed.items() if not other.served.done()}
            if not one.served.done():
                self._closed[one.name] = one
        if self.coordinator is not None:
            self.coordinator.forget(number)
        return one.close()


def failures(outcomes: Mapping[int, PartOutcome]) -> dict[int, PartOutcome]:
    """The outcomes of parts that failed."""
    return {number: one for number, one in outcomes.items() if one.reason is not None}


def commits_of(of: Mapping[int, Subscription]) -> dict[int, Future[float]]:
    """The last commit of each subscription."""
    return {number: one.served for number, one in of.items()}


def await_all(parts: Mapping[int, Future[Any]], timeout_s: float | None = None) -> None:
    """Waits for parts on this rank alone, and raises nothing. Without a timeout, those of steps end the wait."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for future in parts.values():
        try:
            future.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return
