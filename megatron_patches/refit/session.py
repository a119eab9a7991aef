"""Pushes successive versions of a training run's weights into running engines.

Each engine is its own subscription (:mod:`megatron_patches.refit.subscription`): no step is shared by two engines. The
trainer's ranks meet in short collectives at the start and at the end of a push, never while any of them waits for an
engine: what they wait for, they learn over the engine's own rendezvous.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.candidates import encode
from megatron_patches.refit.delta import PayloadKind, Snapshot
from megatron_patches.refit.engine_control import EngineControl
from megatron_patches.refit.engines import EngineClient
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.exchange import default_exchange, describe_error
from megatron_patches.refit.fan_out import FanOut
from megatron_patches.refit.parties.messages import Held, Invitation, Standing
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.push_options import EngineReport, Fate, OnEngineFailure, PushReport, RefitOptions
from megatron_patches.refit.push_orders import PartOutcome, PushOrders, outcome_of
from megatron_patches.refit.roster import Roster
from megatron_patches.refit.source.weight_source import WeightSource, source_of
from megatron_patches.refit.subscription import Once, Subscription, Trainer, longest
from megatron_patches.refit.telemetry import Telemetry

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["EngineReport", "Fate", "OnEngineFailure", "PushReport", "RefitOptions", "RefitSession"]


class RefitSession:
    """One training run and the engines that it feeds.

    Methods are collective over the trainer's ranks, except for :meth:`attach`, :meth:`detach`, :meth:`state`,
    :meth:`end` and :meth:`close`.

    Attributes:
        exchange: collectives over the trainer's ranks.
        version: number of the last version that any engine was sent; -1 before.
        reports: what became of each engine in the last :meth:`prepare` or :meth:`push`, by name.

    Args:
        model: this rank's part of the model. Of Megatron, one GPTModel per virtual pipeline stage, wrapped or not;
            otherwise a module, see :class:`megatron_patches.refit.source.modules.ModuleSource`, or a source.
        engines: on the first rank, the engines; ignored on other ranks, where an empty list will do.
        vocab_size: of a model of Megatron, number of tokens; embedding rows beyond it are padding and are not sent.
            None for other modules.
        config: of another module, content of ``config.json``; None for that of the module itself.
        options: how to push; the same on all ranks. None for the defaults.
        group: ranks that hold the model, replicas included; None for all processes.
        tp_group: of a model of Megatron, tensor-parallel group; None for Megatron's own.
        telemetry: on the first rank, is told what each version cost at each engine; None for the log alone.

    Raises:
        UnsupportedModelError: if a module has no configuration and none is given.
        ValueError: if the arguments are of different kinds of models, or deltas are asked for of weights on a GPU.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | WeightSource,
        engines: Sequence[EngineClient],
        *,
        vocab_size: int | None = None,
        config: Mapping[str, Any] | None = None,
        options: RefitOptions | None = None,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._telemetry = telemetry or Telemetry()
        self._source = source_of(model, vocab_size, config, tp_group)
        self._options = options or RefitOptions()
        self._sends_deltas = self._options.payload is PayloadKind.DELTA
        if self._sends_deltas and self._source.device.type != "cpu":
            raise ValueError(
                f"payload is delta and the weights are on {self._source.device}; changes are found in host memory "
                "only: send weights on GPUs with payload whole"
            )
        self._snapshot = Snapshot()
        self.exchange = default_exchange(group)
        if self._options.weight_format.is_quantized:
            from megatron_patches.refit.source.fp8_block import Fp8BlockSource

            self._source = Fp8BlockSource(self._source, self._options.weight_format, self.exchange)
        self._given: Sequence[EngineClient] | None = engines if self._first and engines else None
        self._roster = Roster(self._bring)
        self._fan_out: FanOut | None = None  # on the first rank, if the options want it
        self._controls: dict[int, EngineControl] = {}  # on the first rank, until their subscriptions begin
        self._subscriptions: dict[int, Subscription] = {}
        self._engines: dict[int, EngineClient] = {}  # on the first rank, by number of the subscription
        self._before: dict[str, Subscription] = {}  # closed ones, by engine
        self._next = 0
        self._described: Once | None = None
        self._at_work = threading.Lock()
        self.reports: Mapping[str, EngineReport] = {}
        self.version = -1

    @property
    def _first(self) -> bool:
        return self.exchange.rank == 0

    @property
    def _drops(self) -> bool:
        return self._options.on_engine_failure is OnEngineFailure.DROP

    def prepare(self, engines: Sequence[EngineClient] | None = None) -> str:
        """Connects to the engines and agrees with each on a plan. Call it again after a rank or the model has changed.

        Args:
            engines: on the first rank, the engines to push to from now on; None keeps the current ones.

        Returns:
            Digest of the plans.

        Raises:
            PartyFailedError: on every rank, if an engine does not take part, or there is none. With
                :attr:`OnEngineFailure.DROP`, there need not be one yet, and engines that cannot be reached are left
                out, unless none can.
        """
        with self._alone():
            return self._prepare(engines)

    def _prepare(self, engines: Sequence[EngineClient] | None) -> str:
        self._close_all()
        self._described = Once(self._describe)
        if self._first and self._options.fan_out:
            subscribed = self._subscriptions.values
            self._fan_out = FanOut(
                self._options, self._trainer(), self.exchange.size, subscribed, self._roster.check_other
            )
        engines, self._given = engines if engines is not None else self._given, None
        self._agree(lambda: self._renewed(engines))
        began = time.monotonic()
        unknown = self._described.compute()  # now, because an engine may join while the weights change
        if not self._subscriptions:
            self._check_described(unknown)
        outcomes = self._outcomes({number: one.joined for number, one in self._subscriptions.items()})
        failed = {number: outcome for number, outcome in outcomes.items() if outcome.reason is not None}
        away = {number for number, outcome in failed.items() if outcome.unreachable}
        leave_out = self._drops and away == failed.keys() and len(away) < len(outcomes)
        if failed and not leave_out:
            names = [self._subscriptions[number].name for number in failed]
            reasons = dict.fromkeys(str(outcome.reason) for outcome in failed.values())
            self._close_all()
            raise PartyFailedError(f"cannot start the refit: {'; '.join(reasons)}", names)
        self.reports = {
            one.name: EngineReport(Fate.FAILED, reason=failed[number].reason)
            if number in failed
            else EngineReport(Fate.JOINED)
            for number, one in self._subscriptions.items()
        }
        for number in failed:
            self._drop(number, time.monotonic() - began)
        return "+".join(sorted({one.party.agreed.digest for one in self._subscriptions.values()}))

    def _check_described(self, error: BaseException | None) -> None:
        """Raises if a rank could not describe what it holds, and there is no engine whose joining would fail of it.

        Raises:
            PartyFailedError: on every rank, with every reason.
        """
        mine = None if error is None else f"trainer rank {self.exchange.rank}: {describe_error(error)}"
        reasons = [reason for reason in self.exchange.gather(mine) if reason is not None]
        if reasons:
            self._described = None
            raise PartyFailedError(f"cannot start the refit: {'; '.join(reasons)}") from error

    def attach(self, engine: EngineClient) -> None:
        """Attaches an engine, on the first rank, at any time. It joins during the next push without delaying others.

        It takes part in the first push after it has joined. With :attr:`RefitOptions.fan_out`, it takes the version
        that other engines serve from them meanwhile.

        Raises:
            ValueError: if it is attached already.
            RefitError: on other ranks.
        """
        self._on_the_first_rank()
        self._roster.add([engine])

    def detach(self, name: str) -> None:
        """Detaches an engine, on the first rank, at any time. It keeps what it serves; the next push leaves it out.

        Raises:
            ValueError: if there is no engine of this name.
            RefitError: on other ranks.
        """
        self._on_the_first_rank()
        self._roster.remove(name)
        if self._fan_out is not None:
            self._fan_out.release(name)

    def candidates(self) -> str:
        """On the first rank, who can send the newest version that an engine serves, as JSON; see docs/refit.md.

        Raises:
            RefitError: on other ranks, before :meth:`prepare`, or without :attr:`RefitOptions.fan_out`.
        """
        self._on_the_first_rank()
        if self._fan_out is None:
            raise RefitError("engines send nothing to each other: the option fan_out is off, or prepare() is missing")
        return encode(self._fan_out.candidates())

    def state(self) -> Mapping[str, Standing]:
        """What each engine's subscription is at, and on the first rank whom it waits for. Any thread may ask."""
        own = {one.name: one.standing for one in list(self._subscriptions.values())}
        return own if self._fan_out is None else {**self._fan_out.state(), **own}

    def push(self, version: int, *, wait: bool = True) -> PushReport:
        """Sends the current weights and makes the engines serve them as ``version``.

        The weights may change again once it returns. Each engine receives and commits on its own.

        Args:
            version: number of the weights, at least 0 and greater than any that this session has pushed.
            wait: whether to wait until all engines have committed the version. If False, they commit in the background.

        Returns:
            The report. With :attr:`OnEngineFailure.DROP` it says which engines failed, came back or lag.

        Raises:
            RefitError: on every rank with :attr:`OnEngineFailure.RAISE`, if a rank or an engine failed, now or in the
                commit of the last version. Otherwise the reports of the engines say so. Each engine serves the old
                weights or the new ones; never a mixture.
            ValueError: if ``version`` is negative or not later than the last one.
        """
        with self._alone():
            return self._push(version, wait=wait)

    def _push(self, version: int, *, wait: bool) -> PushReport:
        if self._described is None:
            raise RefitError("prepare() has not succeeded")
        self._check_version(version)
        waited_for = {number: one for number, one in self._subscriptions.items() if not one.lags}
        self._await(self._served(waited_for), self._options.lag_s if self._drops else self._options.timeout_s)
        try:
            orders = self._agree(self._orders)
        finally:
            for one in self._subscriptions.values():
                one.forget()  # each failure is told once
        for one in self._subscriptions.values():
            one.lags = one.name in orders.fates and orders.fates[one.name].fate is Fate.LAGS
        began = time.perf_counter()
        self._source.settle()
        taking = {number: self._subscriptions[number] for number in orders.taking}
        look_up = Once(self._source.look_up)
        self._let_streams_follow(taking)
        for turn in self._turns(taking):
            for one in turn:
                one.send(version, look_up, self._snapshot.base)
            self._await({number: one.sent for number, one in enumerate(turn)})
        if self._sends_deltas and any(one.sent.exception() is None for one in taking.values()):
            self._snapshot.take(version, look_up())
        seconds = {"send": time.perf_counter() - began}
        outcomes = self._outcomes({number: one.sent for number, one in taking.items()})
        failed = {number: one for number, one in taking.items() if outcomes[number].reason is not None}
        if failed and not self._drops:  # whoever calls prepare() next wants no engine to be busy or paused
            for number, stuck in self._outcomes(self._served(failed)).items():
                told = (outcomes[number].reason, stuck.reason)
                outcomes[number].reason = "; ".join(dict.fromkeys(filter(None, told)))
                failed[number].forget()
        if wait:
            committed = self._outcomes(self._served(taking))
            for one in taking.values():
                one.forget()
            seconds["commit"] = time.perf_counter() - began - seconds["send"]
            seconds["paused"] = max((one.paused_s for one in committed.values()), default=0.0)
            outcomes = {
                number: one if one.reason is not None else committed[number] for number, one in outcomes.items()
            }
        moved = [one.sent.result() for one in taking.values() if one.sent.exception() is None]
        if moved or self._drops:
            self.version = version
        good = Fate.SERVES if wait else Fate.SENT
        reports = {one.name: one.report(good, outcomes[number].reason) for number, one in taking.items()}
        self.reports = orders.fates | reports
        self._judge({number: one for number, one in outcomes.items() if one.reason is not None}, began)
        return PushReport(
            version=version,
            nbytes=sum(report.nbytes for report in reports.values()),
            staged_bytes=max((one.staged_bytes for one in moved), default=0),
            beside_bytes=max((one.beside_bytes for one in moved), default=0),
            backup_bytes=max((one.backup_bytes for one in moved), default=0),
            seconds=seconds | longest(moved),
            engines=self.reports,
        )

    def commits(self) -> Mapping[str, Future[EngineReport]]:
        """For each engine that received the last version pushed, what becomes of it, on this rank alone.

        Call it after a :meth:`push` without ``wait``, before the next one.
        """
        sent = {name for name, report in self.reports.items() if report.fate is Fate.SENT}
        return {one.name: one.outcome() for one in self._subscriptions.values() if one.name in sent}

    def wait(self) -> Mapping[str, EngineReport]:
        """Waits until all engines serve the last version pushed. Returns what became of those that do not.

        Raises:
            PartyFailedError: on every rank with :attr:`OnEngineFailure.RAISE`, if an engine did not commit it.
        """
        with self._alone():
            began, all_of_them = time.perf_counter(), dict(self._subscriptions)
            served = self._served(all_of_them)
            self._await(served)
            failed = {number: one for number, one in self._outcomes(served).items() if one.reason is not None}
            for one in all_of_them.values():
                one.forget()
            self._judge(failed, began)
            return {all_of_them[n].name: all_of_them[n].report(Fate.FAILED, one.reason) for n, one in failed.items()}

    def end(self) -> None:
        """:meth:`wait` and :meth:`close` for a rank that ends on its own: waits for no other rank.

        Raises:
            PartyFailedError: on the first rank, if an engine did not commit the last version pushed.
        """
        try:
            if self._first:
                served = self._served(self._subscriptions)
                self._await(served)
                failed = {
                    number: one
                    for number, one in ((number, outcome_of(future)) for number, future in served.items())
                    if one.reason is not None
                }
                if failed:
                    raise self._error(failed)
        finally:
            self.close()

    def close(self) -> None:
        """Disconnects from the engines, which keep what they serve; a commit under way continues."""
        self._roster.close()
        self._close_all()
        self._snapshot.drop()

    def _close_all(self) -> None:
        if self._fan_out is not None:
            self._before |= self._fan_out.close()
        closed = [self._end(number) for number in list(self._subscriptions)]
        for one in closed:
            one.result()
        self._described = None

    def _end(self, number: int) -> Future[None]:
        one = self._subscriptions.pop(number)
        self._engines.pop(number, None)
        self._before[one.name] = one
        return one.close()

    def _drop(self, number: int, cost_s: float) -> None:
        """Ends the subscription of an engine that failed. The first rank asks from time to time whether it is back."""
        engine = self._engines.get(number)
        self._end(number)
        if engine is not None:
            self._roster.drop(engine, cost_s)

    def _judge(self, failed: Mapping[int, PartOutcome], began: float) -> None:
        """Drops engines that failed, or raises, as the options say.

        Raises:
            PartyFailedError: with the reasons and the names of these engines.
        """
        if failed and not self._drops:
            raise self._error(failed)
        for number in failed:
            self._drop(number, time.perf_counter() - began)

    def _error(self, failed: Mapping[int, PartOutcome]) -> PartyFailedError:
        reasons = dict.fromkeys(str(outcome.reason) for outcome in failed.values())
        return PartyFailedError("; ".join(reasons), [self._subscriptions[number].name for number in failed])

    @staticmethod
    def _served(of: Mapping[int, Subscription]) -> dict[int, Future[float]]:
        return {number: one.served for number, one in of.items()}

    @staticmethod
    def _await(futures: Mapping[int, Future[Any]], timeout_s: float | None = None) -> None:
        """Waits on this rank alone, not in a collective. Without a timeout, those of steps end the wait."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for future in futures.values():
            try:
                future.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return

    def _outcomes(self, futures: Mapping[int, Future[Any]]) -> dict[int, PartOutcome]:
        """What has become of each subscription's part: failed if it failed on any rank, with the first rank's reason.

        Each rank waits for its own part before it meets the others, which end theirs at the same time.
        """
        self._await(futures)
        mine = {number: outcome_of(future) for number, future in futures.items()}
        if self._first:
            for number, outcome in mine.items():
                outcome.unreachable = self._subscriptions[number].unreachable
        first, *others = self.exchange.gather(mine)
        for other in others:
            for number, outcome in other.items():
                if first[number].reason is None:
                    first[number].reason = outcome.reason
        return first

    def _agree(self, decide: Callable[[], PushOrders]) -> PushOrders:
        """Carries out on all ranks what the first rank decides, without waiting for an engine.

        Raises:
            PartyFailedError: on every rank, if it decides that the push fails.
        """
        orders = PushOrders()
        if self._first:
            try:
                orders = decide()
            except (RefitError, ValueError) as error:
                engines = error.engines if isinstance(error, PartyFailedError) else ()
                orders = PushOrders(error=f"cannot start the refit: {describe_error(error)}", engines=engines)
        (orders, *_) = self.exchange.gather(orders)
        if orders.error is not None:
            raise PartyFailedError(orders.error, orders.engines)
        for number in orders.ended:
            self._end(number)
        for number, name, invitation in orders.new:
            self._subscribe(number, name, invitation, orders.share)
        return orders

    def _trainer(self) -> Trainer:
        """This rank, as subscriptions know it."""
        import torch

        if self._described is None:
            raise RefitError("prepare() has not succeeded")
        device, rank = self._source.device, self.exchange.rank
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        name = f"trainer rank {rank} on {socket.gethostname()}:{os.getpid()}"
        return Trainer(rank, name, str(device), stream, self._described, self._telemetry)

    def _subscribe(self, number: int, name: str, invitation: Invitation, share: int) -> None:
        options = LinkOptions(
            transport=self._options.transport,
            staging_bytes=share,
            sources=self.exchange.size,
            memory=self._options.memory,
            payload=self._options.payload,
        )
        self._subscriptions[number] = Subscription(
            name,
            invitation,
            self._trainer(),
            options,
            control=self._controls.pop(number, None),
            check=self._roster.check_other,
            after=self._before.pop(name, None),
        )

    def _renewed(self, engines: Sequence[EngineClient] | None) -> PushOrders:
        """On the first rank, the orders that attach all engines anew."""
        if engines is not None:
            self._roster.set(engines)
        if not self._roster.present and not self._drops:
            raise RefitError("there is no engine to push to")
        return self._orders()

    def _orders(self) -> PushOrders:
        """On the first rank, decides who takes part in a push, from what is known now.

        Raises:
            PartyFailedError: if engines failed, unless the options say to leave them out.
        """
        orders, failed = PushOrders(), dict[str, str]()
        for engine in self._roster.take_back():
            orders.fates[engine.name] = EngineReport(Fate.BACK)
        present = self._roster.present
        for number, one in self._subscriptions.items():
            engine = self._engines[number]
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
                self._roster.drop(engine, one.lasted_s)
            else:
                failed[one.name] = reason
        if failed:
            raise PartyFailedError("; ".join(failed.values()), failed)
        self._begin_to_join(orders, present)
        return orders

    def _begin_to_join(self, orders: PushOrders, present: Sequence[EngineClient]) -> None:
        """Adds subscriptions of engines that have none, except for those that take a version from others now."""
        known = {id(engine) for engine in self._engines.values()}
        orders.share = self._options.staging_bytes // max(1, len(present))
        for engine in present:
            if self._fan_out is not None and not self._fan_out.claim(engine):
                orders.fates.setdefault(engine.name, EngineReport(Fate.JOINING))
            elif id(engine) not in known and engine.name not in {one.name for one in self._subscriptions.values()}:
                control = EngineControl(engine, self.exchange.size, self._options)
                self._engines[self._next], self._controls[self._next] = engine, control
                orders.new.append((self._next, engine.name, control.rendezvous.invitation))
                taken = None if self._fan_out is None else self._fan_out.release(engine.name)
                if taken is not None:
                    self._before[engine.name] = taken
                self._next += 1

    def _turns(self, taking: Mapping[int, Subscription]) -> list[list[Subscription]]:
        """Subscriptions that may send at the same time. Over NCCL one at a time does, in the same order on all ranks.

        Otherwise kernels of several engines' communicators could wait for each other on one GPU.
        """
        if any(one.over_nccl for one in taking.values()):
            return [[one] for one in taking.values()]
        return [list(taking.values())]

    @staticmethod
    def _let_streams_follow(taking: Mapping[int, Subscription]) -> None:
        """Lets what subscriptions give a GPU come after what this thread has given it, which wrote the weights."""
        import torch

        for stream in {one.stream for one in taking.values() if one.stream is not None}:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def _bring(self, engine: EngineClient) -> None:
        """Lets an engine take the version that others serve, before the next push."""
        if self._fan_out is not None:
            self._fan_out.bring(engine)

    def _check_version(self, version: int) -> None:
        if version < 0:
            raise ValueError(f"version is {version}; versions begin with 0")
        if version <= self.version:
            raise ValueError(
                f"version {version} is not later than {self.version}, which was pushed before; versions rise within a "
                "session, and a new RefitSession may begin anywhere"
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Allows one thread at a time in prepare, push or wait.

        Raises:
            RefitError: if another thread is in one of them.
        """
        if not self._at_work.acquire(blocking=False):
            raise RefitError(
                "another thread is in prepare() or push() of this session; call them one after the other, on all ranks "
                "in the same order"
            )
        try:
            yield
        finally:
            self._at_work.release()

    def _on_the_first_rank(self) -> None:
        if not self._first:
            raise RefitError(f"rank {self.exchange.rank} knows no engines; the first rank attaches and detaches them")

    def _describe(self) -> Held:
        """Describes what this rank holds."""
        held = self._source.describe(self.exchange.rank)
        if not self._first:  # every party receives these, so only one rank sends the whole model
            return Held({}, {}, held.manifest)
        return replace(held, allow_narrowing=self._options.allow_narrowing)
