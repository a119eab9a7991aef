"""The subscriptions of one trainer rank, and what became of them on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from megatron_patches.refit.coordinator import Coordinator
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.exchange import Exchange, describe_error
from megatron_patches.refit.push_options import RefitOptions
from megatron_patches.refit.push_orders import Newcomer, PartOutcome, PushOrders, outcome_of
from megatron_patches.refit.subscription import Subscription
from megatron_patches.refit.trainer_rank import Trainer


class Subscriptions:
    """Those of one trainer rank. They follow the first rank's orders, so that all ranks have the same.

    Only the thread that pushes calls the methods. Those that are collective say so.

    Args:
        exchange: collectives over the trainer's ranks.
        options: of the session.

    Attributes:
        open: those that have not ended, by number. It is replaced, not changed, because other threads read it.
        coordinator: on the first rank, what decides; None on others.
    """

    def __init__(self, exchange: Exchange, options: RefitOptions) -> None:
        self._exchange, self._options = exchange, options
        self.open: Mapping[int, Subscription] = {}
        self._closed: dict[str, Subscription] = {}  # the last of each engine
        self.coordinator: Coordinator | None = None
        if exchange.rank == 0:
            self.coordinator = Coordinator(options, exchange.size, lambda: self.open)

    def agree(self, decide: Callable[[Coordinator], PushOrders], trainer: Trainer) -> PushOrders:
        """Carries out on all ranks what the first rank decides. Collective, and waits for no engine.

        Args:
            decide: what the first rank asks its coordinator.
            trainer: this rank.

        Raises:
            PartyFailedError: on every rank, if it decides that the push fails.
        """
        orders = PushOrders()
        if self.coordinator is not None:
            try:
                orders = decide(self.coordinator)
            except (RefitError, ValueError) as error:
                engines = error.engines if isinstance(error, PartyFailedError) else ()
                orders = PushOrders(error=f"cannot start the refit: {describe_error(error)}", engines=engines)
        (orders, *_) = self._exchange.gather(orders)
        if orders.error is not None:
            raise PartyFailedError(orders.error, orders.engines)
        for number in orders.ended:
            self._end(number)
        for newcomer in orders.new:
            self._begin(newcomer, trainer)
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
        """Ends all, and waits until the other parties have received what was on its way to them."""
        if self.coordinator is not None:
            self.coordinator.end_fan_out()
        for closed in [self._end(number) for number in self.open]:
            closed.result()

    def close(self) -> None:
        """Ends all. The first rank asks no engine whether it is back."""
        if self.coordinator is not None:
            self.coordinator.roster.close()
        self.end_all()

    def forget_failures(self) -> None:
        """Forgets that commits failed: each failure is told once."""
        for one in self.open.values():
            one.forget()

    def error(self, failed: Mapping[int, PartOutcome]) -> PartyFailedError:
        """What to raise for subscriptions that failed: the reasons, and the names of the engines."""
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

    def _begin(self, newcomer: Newcomer, trainer: Trainer) -> None:
        number, name, coordinator = newcomer.number, newcomer.name, self.coordinator
        closed = self._closed.pop(name, None)  # it may still be committing
        one = Subscription(
            name,
            newcomer.invitation,
            trainer,
            self._options.links(self._exchange.size, newcomer.staging_bytes),
            control=None if coordinator is None else coordinator.control(number),
            after=closed if coordinator is None else coordinator.taken(name) or closed,
        )
        self.open = {**self.open, number: one}

    def _end(self, number: int) -> Future[None]:
        one = self.open[number]
        self.open = {other: each for other, each in self.open.items() if other != number}
        self._closed[one.name] = one
        if self.coordinator is not None:
            self.coordinator.forget(number)
        return one.close()


def failures(outcomes: Mapping[int, PartOutcome]) -> dict[int, PartOutcome]:
    """Those that failed."""
    return {number: one for number, one in outcomes.items() if one.reason is not None}


def commits_of(of: Mapping[int, Subscription]) -> dict[int, Future[float]]:
    """The last commit of each."""
    return {number: one.served for number, one in of.items()}


def await_all(parts: Mapping[int, Future[Any]], timeout_s: float | None = None) -> None:
    """Waits on this rank alone, not in a collective. Without a timeout, those of steps end the wait."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for future in parts.values():
        try:
            future.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return
