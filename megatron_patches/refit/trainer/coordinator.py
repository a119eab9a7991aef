"""What the first trainer rank decides: which engines join, take a version and leave. All ranks carry it out.

It decides from what it knows at that moment, and waits for no engine. An engine begins to join when it is attached or
answers again: this rank begins, and the lobby tells the others. A rank that misses this learns of it in the next push.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.trainer.engine_client import EngineClient
from megatron_patches.refit.trainer.engine_control import EngineControl
from megatron_patches.refit.trainer.fan_out import FanOut
from megatron_patches.refit.trainer.lobby import Announcer
from megatron_patches.refit.trainer.push_options import EngineReport, Fate, OnEngineFailure, RefitOptions
from megatron_patches.refit.trainer.push_orders import Newcomer, PushOrders
from megatron_patches.refit.trainer.roster import Roster
from megatron_patches.refit.trainer.subscription import Subscription

logger = logging.getLogger(__name__)


class Coordinator:
    """The engines of a session, on its first rank.

    Args:
        options: of the session.
        ranks: number of trainer ranks.
        subscriptions: returns this rank's subscriptions, by number; any thread may call it.
        join: begins a subscription on this rank; any thread may call it.

    Attributes:
        roster: the engines that are to be served.
        fan_out: lets engines that are behind take versions from others; None if the options do not want it.
    """

    def __init__(
        self,
        options: RefitOptions,
        ranks: int,
        subscriptions: Callable[[], Mapping[int, Subscription]],
        join: Callable[[Newcomer], None],
    ) -> None:
        self._options, self._ranks, self._subscriptions, self._join = options, ranks, subscriptions, join
        self.roster = Roster(self._come_back)
        self.fan_out: FanOut | None = None
        self._lobby: Announcer | None = None
        self._controls: dict[int, EngineControl] = {}
        self._newcomers: list[Newcomer] = []  # those that other ranks must learn of in the next push
        self._cannot_follow = set[str]()  # see FanOut
        self._next = 0
        # Orders are decided while no engine comes or goes.
        self._lock = threading.RLock()
        self._is_active = False

    def control(self, number: int) -> EngineControl:
        """The control of a subscription's engine."""
        return self._controls[number]

    def look(self) -> None:
        """Lets engines that are behind begin to take a version from others, if any can. Any thread may call it."""
        if self.fan_out is not None:
            self.fan_out.look()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """The part of a push in which the trainer sends. No engine begins to take a version from others meanwhile."""
        if self.fan_out is None:
            yield
            return
        self.fan_out.hold()
        try:
            yield
        finally:
            self.fan_out.resume()

    def attach(self, engine: EngineClient) -> None:
        """Adds an engine. It begins to join at once if a session has begun.

        Raises:
            ValueError: if it is attached already, or has the name of another engine.
            PartyFailedError: if its rendezvous cannot listen.
        """
        with self._lock:
            self.roster.add([engine])
            try:
                self._join_now(engine)
            except BaseException:  # otherwise the next push would try again, and fail for all engines
                self.roster.remove(engine.name)
                raise

    def detach(self, name: str) -> None:
        """Removes an engine: from fan-out at once, and from the trainer's subscriptions at the next push.

        Raises:
            ValueError: if there is no engine of this name.
        """
        with self._lock:
            self.roster.remove(name)
            if self.fan_out is not None:
                for one in self._subscriptions().values():
                    if one.name == name:
                        self.fan_out.leave_out(one)

    def forget(self, number: int) -> None:
        """Forgets a subscription, which the caller ends."""
        del self._controls[number]

    def resume(self) -> None:
        """Lets engines begin to join from now on, between pushes too. Waits, at first, until other ranks listen.

        Those begin now that were detached and attached again, whose earlier subscriptions have ended.
        """
        if self._lobby is not None:
            self._lobby.wait_for_all()
        self._is_active = True
        for engine in self.roster.present:
            self._come_back(engine)

    def pause(self) -> None:
        """Ends all fan-out. Until :meth:`resume`, no engine begins to join between pushes."""
        with self._lock:
            self._is_active, self._newcomers = False, []
            for number in self._controls.keys() - self._subscriptions().keys():  # no rank has heard of these
                self._controls.pop(number).close()
            if self.fan_out is not None:
                self.fan_out.close()

    def close(self) -> None:
        """Stops polling engines that failed, fan-out and announcements."""
        self.roster.close()
        self.pause()
        if self._lobby is not None:
            self._lobby.close()

    def begin(self, engines: Sequence[EngineClient] | None) -> PushOrders:
        """The orders that attach all engines again.

        Args:
            engines: the engines from now on; None for those that are attached.

        Raises:
            RefitError: if there is no engine although the options require one.
            ValueError: if an engine is given twice, or has the name of another one.
        """
        with self._lock:
            if self._lobby is None and self._ranks > 1:
                self._lobby = Announcer(self._options.host, self._ranks - 1)
            if self._options.fan_out:
                self.fan_out = FanOut(self._options, self._ranks, self._attached, self._cannot_follow)
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
        with self._lock:
            orders, failed = PushOrders(), dict[str, str]()
            for engine in self.roster.take_back():
                orders.fates[engine.name] = EngineReport(Fate.BACK)
            present = self.roster.present
            for number, one in self._subscriptions().items():
                engine = self._controls[number].engine
                reason = one.failure
                if all(other is not engine for other in present):
                    orders.ended.append(number)
                    again = any(other.name == one.name for other in present)
                    orders.fates[one.name] = EngineReport(Fate.JOINING if again else Fate.LEFT)
                elif reason is None and not one.joined.done():
                    orders.fates.setdefault(one.name, EngineReport(Fate.JOINING))
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
            if self.fan_out is not None:
                orders.taking, orders.following = self.fan_out.divide(self._subscriptions(), orders.taking)
            self._let_join(present)
            orders.new, self._newcomers = self._newcomers, []
            orders.next = self._next
            orders.lobby = None if self._lobby is None else self._lobby.invitation
            return orders

    @property
    def _drops(self) -> bool:
        return self._options.on_engine_failure is OnEngineFailure.DROP

    def _let_join(self, engines: Sequence[EngineClient]) -> None:
        """Adds subscriptions of engines that have none."""
        for engine in engines:
            if not self._is_subscribed(engine):
                self._open(engine)

    def _open(self, engine: EngineClient) -> Newcomer:
        """Opens the rendezvous of an engine that begins to join."""
        control = EngineControl(engine, self._ranks, self._options, self.roster.check_other)
        share = self._options.staging_bytes // max(1, len(self.roster.present))
        newcomer = Newcomer(self._next, engine.name, control.rendezvous.invitation, share)
        self._controls[self._next] = control
        self._newcomers.append(newcomer)
        self._next += 1
        return newcomer

    def _join_now(self, engine: EngineClient) -> None:
        if self._is_active and not self._is_subscribed(engine):
            newcomer = self._open(engine)
            self._join(newcomer)
            if self._lobby is not None:
                self._lobby.tell(newcomer)

    def _come_back(self, engine: EngineClient) -> None:
        """Lets an engine join, unless it has, where nobody could catch an error."""
        try:
            with self._lock:
                self._join_now(engine)
        except Exception as error:  # noqa: BLE001 - others must go on
            logger.warning("refit: %s begins to join in the next push only: %s", engine.name, describe_error(error))

    def _attached(self) -> list[Subscription]:
        """The subscriptions of engines that are attached. One that failed has none until it is back."""
        attached, controls = self.roster.attached, self._controls.copy()
        return [
            one
            for number, one in self._subscriptions().items()
            if number in controls and any(controls[number].engine is engine for engine in attached)
        ]

    def _is_subscribed(self, engine: EngineClient) -> bool:
        """Whether it has a subscription, or another client of it has one that the next push ends."""
        present = self.roster.present
        return any(
            one is engine or (one.name == engine.name and all(one is not other for other in present))
            for one in [control.engine for control in list(self._controls.values())]
        )
