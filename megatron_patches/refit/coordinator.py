"""What the first trainer rank decides: which engines join, take a version and leave. All ranks carry it out.

It decides from what is known at once, and waits for no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_patches.refit.engine_control import EngineControl
from megatron_patches.refit.engines import EngineClient
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.fan_out import FanOut
from megatron_patches.refit.push_options import EngineReport, Fate, OnEngineFailure, RefitOptions
from megatron_patches.refit.push_orders import Newcomer, PushOrders
from megatron_patches.refit.roster import Roster
from megatron_patches.refit.subscription import Subscription
from megatron_patches.refit.trainer_rank import Trainer


class Coordinator:
    """The engines of a session, on its first rank.

    Args:
        options: of the session.
        ranks: number of trainer ranks.
        subscriptions: those that are open on this rank, by number.

    Attributes:
        roster: the engines that are to be served.
        fan_out: lets engines that join take versions from others; None if the options do not want it.
    """

    def __init__(
        self, options: RefitOptions, ranks: int, subscriptions: Callable[[], Mapping[int, Subscription]]
    ) -> None:
        self._options, self._ranks, self._subscriptions = options, ranks, subscriptions
        self.roster = Roster(self._bring)
        self.fan_out: FanOut | None = None
        self._controls: dict[int, EngineControl] = {}
        self._taken: dict[str, Subscription] = {}  # those in which an engine took a version from others
        self._next = 0

    def control(self, number: int) -> EngineControl:
        """How a subscription controls its engine."""
        return self._controls[number]

    def taken(self, name: str) -> Subscription | None:
        """A closed subscription in which an engine took a version from others. It is returned once."""
        return self._taken.pop(name, None)

    def detach(self, name: str) -> None:
        """Takes an engine out, at once for fan-out and at the next push for the trainer.

        Raises:
            ValueError: if there is no engine of this name.
        """
        self.roster.remove(name)
        if self.fan_out is not None:
            self.fan_out.release(name)

    def forget(self, number: int) -> None:
        """Forgets a subscription, which the caller ends."""
        del self._controls[number]

    def end_fan_out(self) -> None:
        """Ends all that engines send each other."""
        if self.fan_out is not None:
            self._taken |= self.fan_out.close()

    def begin(self, engines: Sequence[EngineClient] | None, trainer: Trainer) -> PushOrders:
        """The orders that attach all engines anew.

        Args:
            engines: the engines from now on; None for those that are attached.
            trainer: this rank, as in its subscriptions.

        Raises:
            RefitError: if there is none, and the options say that there must be.
            ValueError: if an engine is given twice.
        """
        if self._options.fan_out:
            self.fan_out = FanOut(
                self._options,
                trainer,
                self._ranks,
                lambda: self._subscriptions().values(),
                self.roster.check_other,
            )
        if engines is not None:
            self.roster.set(engines)
        if not self.roster.present and not self._drops:
            raise RefitError("there is no engine to push to")
        return self.orders()

    def orders(self) -> PushOrders:
        """Who takes part in a push.

        Raises:
            PartyFailedError: if engines failed, unless the options say to leave them out.
        """
        orders, failed = PushOrders(), dict[str, str]()
        for engine in self.roster.take_back():
            orders.fates[engine.name] = EngineReport(Fate.BACK)
        present = self.roster.present
        for number, one in self._subscriptions().items():
            engine = self._controls[number].engine
            reason = one.failure
            if all(other is not engine for other in present):
                orders.ended.append(number)
                orders.fates[one.name] = EngineReport(Fate.LEFT)
            elif reason is None and not one.joined.done():
                orders.fates[one.name] = EngineReport(Fate.JOINING)
            elif reason is None and not one.served.done():
                orders.fates[one.name] = EngineReport(Fate.LAGS)
                if not self._drops:
                    failed[one.name] = (
                        f"committing version {one.standing.version} failed: {one.name} did not say within "
                        f"{self._options.timeout_s:.0f} s that it serves"
                    )
            elif reason is None:
                orders.taking.append(number)
            elif self._drops:
                orders.ended.append(number)
                orders.fates[one.name] = one.report(Fate.FAILED, reason)
                self.roster.drop(engine, one.lasted_s)
            else:
                failed[one.name] = reason
        if failed:
            raise PartyFailedError("; ".join(failed.values()), failed)
        self._let_join(orders, present)
        return orders

    @property
    def _drops(self) -> bool:
        return self._options.on_engine_failure is OnEngineFailure.DROP

    def _let_join(self, orders: PushOrders, present: Sequence[EngineClient]) -> None:
        """Adds subscriptions of engines that have none, except for those that take a version from others now."""
        subscribed = {one.name for one in self._subscriptions().values()}
        share = self._options.staging_bytes // max(1, len(present))
        for engine in present:
            if self.fan_out is not None and not self.fan_out.claim(engine):
                orders.fates.setdefault(engine.name, EngineReport(Fate.JOINING))
            elif engine.name not in subscribed:
                control = EngineControl(engine, self._ranks, self._options, self.roster.check_other)
                self._controls[self._next] = control
                orders.new.append(Newcomer(self._next, engine.name, control.rendezvous.invitation, share))
                taken = None if self.fan_out is None else self.fan_out.release(engine.name)
                if taken is not None:
                    self._taken[engine.name] = taken
                self._next += 1

    def _bring(self, engine: EngineClient) -> None:
        """Lets an engine take the version that others serve, before the next push."""
        if self.fan_out is not None:
            self.fan_out.bring(engine)
