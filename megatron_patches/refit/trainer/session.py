"""Pushes successive versions of a training run's weights into running engines.

Each engine is its own subscription (:mod:`megatron_patches.refit.trainer.subscription`): no step is shared by two
engines. The trainer's ranks meet in short collectives at the start and at the end of a push, never while any of them
waits for an engine: what they wait for, they learn over the engine's own rendezvous.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.control.exchange import default_exchange, describe_error
from megatron_patches.refit.control.kv_scales import KVScalesOfLayers, scale_values
from megatron_patches.refit.control.messages import Held, Standing, longest_parts
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.memory.delta import PayloadKind, Snapshot
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.source.kv_scale_source import KVScaleSource
from megatron_patches.refit.source.weight_source import Once, WeightSource, settled, source_of
from megatron_patches.refit.trainer.coordinator import Coordinator
from megatron_patches.refit.trainer.engine_client import EngineClient
from megatron_patches.refit.trainer.fan_out import candidates_json
from megatron_patches.refit.trainer.push_options import EngineReport, Fate, OnEngineFailure, PushReport, RefitOptions
from megatron_patches.refit.trainer.push_orders import PartOutcome, PushOrders, outcome_of
from megatron_patches.refit.trainer.subscription import Subscription
from megatron_patches.refit.trainer.subscriptions import Subscriptions, await_all, commits_of, failures
from megatron_patches.refit.trainer.telemetry import Telemetry
from megatron_patches.refit.trainer.trainer_rank import Trainer

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megatron_patches.refit.source.fp8_block import Fp8BlockSource

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
        vocab_size: for a Megatron model, number of tokens; embedding rows beyond it are padding and are not sent.
            None for other modules.
        config: for other modules, content of ``config.json``; None for that of the module itself.
        options: how to push; the same on all ranks. None for the defaults.
        group: ranks that hold the model, replicas included; None for all processes.
        tp_group: for a Megatron model, tensor-parallel group; None for Megatron's own.
        telemetry: on the first rank, receives what each version cost at each engine; None to log it only.

    Raises:
        UnsupportedModelError: if a module has no configuration and none is given.
        ValueError: if the arguments are of different kinds of models.
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
        source = source_of(model, vocab_size, config, tp_group)
        self._options = options or RefitOptions()
        self._sends_deltas = self._options.payload is PayloadKind.DELTA
        self._snapshot = Snapshot()
        self.exchange = default_exchange(group)
        self._quantizing: Fp8BlockSource | None = None
        if self._options.weight_format.is_quantized:
            from megatron_patches.refit.source.fp8_block import Fp8BlockSource

            source = self._quantizing = Fp8BlockSource(source, self._options.weight_format, self.exchange)
        self._source = KVScaleSource(source)
        self._subscriptions = Subscriptions(self.exchange, self._options)
        self._coordinator = self._subscriptions.coordinator
        self._given = engines  # until prepare() attaches them
        self._trainer: Trainer | None = None  # once prepare() has succeeded
        self._at_work = threading.Lock()
        self.reports: Mapping[str, EngineReport] = {}
        self.version = -1

    @property
    def _drops(self) -> bool:
        return self._options.on_engine_failure is OnEngineFailure.DROP

    def prepare(
        self, engines: Sequence[EngineClient] | None = None, *, kv_scales: KVScalesOfLayers | None = None
    ) -> str:
        """Connects to the engines and agrees with each on a plan. Call it again after a rank or the model has changed.

        Args:
            engines: on the first rank, the engines to push to from now on; None keeps the current ones.
            kv_scales: on the first rank, scales as for :meth:`push`, so that a push of the same layers need not prepare
                again.

        Returns:
            Digest of the plans.

        Raises:
            PartyFailedError: on every rank, if an engine does not take part, or there is none. With
                :attr:`OnEngineFailure.DROP`, there need not be one yet, and engines that cannot be reached are left
                out, unless none can.
        """
        with self._alone(), self._same_scales_after_failures():
            return self._begin(engines, kv_scales)

    def _begin(self, engines: Sequence[EngineClient] | None, kv_scales: KVScalesOfLayers | None) -> str:
        self._trainer = None
        self._subscriptions.end_all()
        described = Once(self._describe)
        trainer = self._this_rank(described)

        def begin(coordinator: Coordinator) -> PushOrders:
            self._take_scales(kv_scales)
            if engines is None:
                coordinator.roster.add(self._given)
            self._given = ()
            return coordinator.begin(engines)

        self._subscriptions.agree(begin, trainer)
        began = time.monotonic()
        unknown = described.compute()  # now, because an engine may join while the weights change
        if not self._subscriptions.open:
            self._check_described(unknown)
        outcomes = self._subscriptions.outcomes(
            {number: one.joined for number, one in self._subscriptions.open.items()}
        )
        failed = failures(outcomes)
        away = {number for number, outcome in failed.items() if outcome.unreachable}
        leave_out = self._drops and away == failed.keys() and len(away) < len(outcomes)
        if failed and not leave_out:
            error = self._subscriptions.error(failed)
            self._subscriptions.end_all()
            raise PartyFailedError(f"cannot start the refit: {error}", error.engines)
        self.reports = {
            one.name: EngineReport(Fate.FAILED, reason=failed[number].reason)
            if number in failed
            else EngineReport(Fate.JOINED)
            for number, one in self._subscriptions.open.items()
        }
        for number in failed:
            self._subscriptions.drop(number, time.monotonic() - began)
        self._trainer = trainer
        return "+".join(sorted({one.party.agreed.digest for one in self._subscriptions.open.values()}))

    def _check_described(self, error: BaseException | None) -> None:
        """Raises if a rank could not describe what it holds. For sessions without engines, whose joining would fail.

        Raises:
            PartyFailedError: on every rank, with every reason.
        """
        mine = None if error is None else f"trainer rank {self.exchange.rank}: {describe_error(error)}"
        reasons = [reason for reason in self.exchange.gather(mine) if reason is not None]
        if reasons:
            raise PartyFailedError(f"cannot start the refit: {'; '.join(reasons)}") from error

    def attach(self, engine: EngineClient) -> None:
        """Attaches an engine, on the first rank, at any time. It begins to join at once, and delays nobody.

        It takes part in the first push after it has joined. With :attr:`RefitOptions.fan_out`, it meanwhile takes the
        current version from the engines that serve it.

        Raises:
            ValueError: if it is attached already, or has the name of another engine.
            PartyFailedError: if its rendezvous cannot listen.
            RefitError: on other ranks.
        """
        self._on_the_first_rank.attach(engine)

    def detach(self, name: str) -> None:
        """Detaches an engine, on the first rank, at any time. It keeps what it serves; the next push leaves it out.

        Raises:
            ValueError: if there is no engine of this name.
            RefitError: on other ranks.
        """
        self._on_the_first_rank.detach(name)

    def candidates(self) -> str:
        """On the first rank, who can send the newest version that an engine serves, as JSON; see docs/refit.md.

        Raises:
            RefitError: on other ranks, before :meth:`prepare`, or without :attr:`RefitOptions.fan_out`.
        """
        fan_out = self._on_the_first_rank.fan_out
        if fan_out is None:
            raise RefitError("engines send nothing to each other: the option fan_out is off, or prepare() is missing")
        return candidates_json(fan_out.candidates())

    def state(self) -> Mapping[str, Standing]:
        """The state of each engine's subscription, and on the first rank whom it waits for. Any thread may ask."""
        return {one.name: one.standing for one in self._subscriptions.all.values()}

    def push(self, version: int, *, wait: bool = True, kv_scales: KVScalesOfLayers | None = None) -> PushReport:
        """Sends the current weights and makes the engines serve them as ``version``.

        The weights may change again once it returns. Each engine receives and commits on its own.

        Args:
            version: number of the weights, at least 0 and greater than any that this session has pushed.
            wait: whether to wait until all engines have committed the version. If False, they commit in the background.
            kv_scales: on the first rank, scales of the engines' KV caches in FP8, by attention layer, which serve with
                the version or not at all. None for those given last; if none were, engines keep their own. The first
                time, and when other layers have scales than before, this prepares again; if that fails, call
                :meth:`prepare`.

        Returns:
            The report. With :attr:`OnEngineFailure.DROP` it says which engines failed, came back or lag.

        Raises:
            RefitError: on every rank with :attr:`OnEngineFailure.RAISE`, if a rank or an engine failed, now or in the
                commit of the last version. Otherwise the reports of the engines say so. Each engine serves the old
                weights or the new ones; never a mixture.
            ValueError: if ``version`` is negative or not later than the last one.
        """
        with self._alone():
            return self._push(version, wait, kv_scales)

    def _push(self, version: int, wait: bool, kv_scales: KVScalesOfLayers | None) -> PushReport:
        if self._trainer is None:
            raise RefitError("prepare() has not succeeded")
        self._check_version(version)
        with nullcontext() if self._coordinator is None else self._coordinator.sending():
            orders = self._take_orders(self._trainer, kv_scales)
            began = time.perf_counter()
            taking, following = (
                {number: self._subscriptions.open[number] for number in numbers}
                for numbers in (orders.taking, orders.following)
            )
            self._send(self._trainer, version, taking)
            for one in following.values():
                one.follow(version)
        seconds = {"send": time.perf_counter() - began}
        outcomes = self._subscriptions.outcomes({number: one.sent for number, one in taking.items()})
        if not self._drops:  # the caller's next prepare() needs engines that are neither busy nor paused
            self._give_up({number: taking[number] for number in failures(outcomes)}, outcomes)
        if wait:
            committed = self._subscriptions.outcomes(commits_of(taking | following))
            for one in (taking | following).values():
                one.forget()
            seconds["commit"] = time.perf_counter() - began - seconds["send"]
            seconds["paused"] = max((one.paused_s for one in committed.values()), default=0.0)
            outcomes = committed | failures(outcomes)
        moved = [one.sent.result() for one in taking.values() if one.sent.exception() is None]
        if moved or self._drops:
            self.version = version
        good = Fate.SERVES if wait else Fate.SENT
        told = {number: self._subscriptions.open[number] for number in outcomes}
        reports = {one.name: one.report(good, outcomes[number].reason) for number, one in told.items()}
        if not wait:
            reports |= {one.name: EngineReport(Fate.TAKES) for one in following.values()}
        self.reports = orders.fates | reports
        self._judge(failures(outcomes), began)
        return PushReport(
            version=version,
            nbytes=sum(report.nbytes for report in reports.values()),
            staged_bytes=max((one.staged_bytes for one in moved), default=0),
            beside_bytes=max((one.beside_bytes for one in moved), default=0),
            backup_bytes=max((one.backup_bytes for one in moved), default=0),
            seconds=seconds | longest_parts(moved),
            engines=self.reports,
        )

    def _take_orders(self, trainer: Trainer, kv_scales: KVScalesOfLayers | None) -> PushOrders:
        """Waits for the commits of the last version, and agrees on who takes part in a push. Collective."""
        waited_for = {number: one for number, one in self._subscriptions.all.items() if not one.lags}
        await_all(commits_of(waited_for), self._options.lag_s if self._drops else self._options.timeout_s)
        try:
            orders = self._orders(trainer, kv_scales)
        finally:
            self._subscriptions.forget_failures()
        for one in self._subscriptions.open.values():
            one.lags = one.name in orders.fates and orders.fates[one.name].fate is Fate.LAGS
        return orders

    def _orders(self, trainer: Trainer, kv_scales: KVScalesOfLayers | None) -> PushOrders:
        """Who takes part in a push, and on the first rank, with which scales."""

        def decide(coordinator: Coordinator) -> PushOrders:
            anew = self._take_scales(kv_scales)
            return replace(coordinator.orders(), anew=anew)

        with self._same_scales_after_failures():
            orders = self._subscriptions.agree(decide, trainer)
            if not orders.anew:
                return orders
            self._begin(None, None)
        return self._subscriptions.agree(Coordinator.orders, self._trainer or trainer)

    def _take_scales(self, kv_scales: KVScalesOfLayers | None) -> bool:
        """Takes the scales of the next version. Returns whether they have other names than those before.

        Raises:
            RefitError: if one cannot be a scale.
        """
        if kv_scales is None:
            return False
        before, self._source.values = self._source.values, scale_values(kv_scales)
        return before.keys() != self._source.values.keys()

    def _send(self, trainer: Trainer, version: int, taking: Mapping[int, Subscription]) -> None:
        """Sends this rank's part of a version to engines, which get ready while the weights settle. Collective."""
        weights: Future[FlatMemory] = Future()
        for turn in self._turns(taking):
            for one in turn:
                one.send(version, weights.result, self._snapshot.base, self._quantizing)
            if not weights.done():
                self._settle(trainer, weights)
            await_all({number: one.sent for number, one in enumerate(turn)})
        if self._quantizing is not None:
            self._quantizing.finish()
        if self._sends_deltas and any(one.sent.exception() is None for one in taking.values()):
            self._snapshot.take(version, weights.result())

    def _settle(self, trainer: Trainer, weights: Future[FlatMemory]) -> None:
        """Settles the weights, and tells subscriptions where they lie, or why they are not to be had."""
        try:
            look_up = settled(self._source)
            if trainer.stream is not None:  # what subscriptions give a GPU comes after what this thread has given it
                import torch

                trainer.stream.wait_stream(torch.cuda.current_stream(trainer.stream.device))
            weights.set_result(look_up())
        except Exception as error:  # noqa: BLE001 - raised by the subscriptions, for which the other ranks wait
            weights.set_exception(error)
        except BaseException:
            weights.set_exception(PartyFailedError("the push was interrupted"))
            raise

    def _give_up(self, failed: Mapping[int, Subscription], outcomes: dict[int, PartOutcome]) -> None:
        """Waits until engines that failed to receive a version have given it up. If that fails too, adds the reason.

        Collective, unless there are no such engines.
        """
        if failed:
            for number, stuck in self._subscriptions.outcomes(commits_of(failed)).items():
                told = (outcomes[number].reason, stuck.reason)
                outcomes[number].reason = "; ".join(dict.fromkeys(filter(None, told)))
                failed[number].forget()

    def commits(self) -> Mapping[str, Future[EngineReport]]:
        """For each engine that received the last version pushed, or takes it, what becomes of it, on this rank alone.

        Call it after a :meth:`push` without ``wait``, before the next one.
        """
        sent = {name for name, report in self.reports.items() if report.fate in {Fate.SENT, Fate.TAKES}}
        return {one.name: one.outcome() for one in self._subscriptions.open.values() if one.name in sent}

    def wait(self) -> Mapping[str, EngineReport]:
        """Waits until all engines serve the last version pushed. Returns what became of those that do not.

        Raises:
            PartyFailedError: on every rank with :attr:`OnEngineFailure.RAISE`, if an engine did not commit it.
        """
        with self._alone():
            began, all_of_them = time.perf_counter(), self._subscriptions.open
            failed = failures(self._subscriptions.outcomes(commits_of(all_of_them)))
            self._subscriptions.forget_failures()
            self._judge(failed, began)
            return {all_of_them[n].name: all_of_them[n].report(Fate.FAILED, one.reason) for n, one in failed.items()}

    def end(self) -> None:
        """:meth:`wait` and :meth:`close` for a rank that ends on its own: waits for no other rank.

        Raises:
            PartyFailedError: on the first rank, if an engine did not commit the last version pushed.
        """
        try:
            if self._coordinator is not None:
                commits = commits_of(self._subscriptions.open)
                await_all(commits)
                failed = failures({number: outcome_of(commit) for number, commit in commits.items()})
                if failed:
                    raise self._subscriptions.error(failed)
        finally:
            self.close()

    def close(self) -> None:
        """Disconnects from the engines, which keep what they serve; a commit under way continues."""
        self._subscriptions.close()
        self._trainer = None
        self._snapshot.drop()

    def _judge(self, failed: Mapping[int, PartOutcome], began: float) -> None:
        """Drops engines that failed, or raises, as the options say.

        Raises:
            PartyFailedError: with the reasons and the names of these engines.
        """
        if failed and not self._drops:
            raise self._subscriptions.error(failed)
        for number in failed:
            self._subscriptions.drop(number, time.perf_counter() - began)

    def _this_rank(self, described: Callable[[], Held]) -> Trainer:
        """This rank, as its subscriptions know it."""
        import torch

        device, rank = self._source.device, self.exchange.rank
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        name = f"trainer rank {rank} on {socket.gethostname()}:{os.getpid()}"
        return Trainer(rank, name, str(device), stream, described, self._telemetry)

    def _turns(self, taking: Mapping[int, Subscription]) -> list[list[Subscription]]:
        """Groups of subscriptions that may send at the same time. Over NCCL, each is alone, in an order equal on ranks.

        Otherwise kernels of several engines' communicators could wait for each other on one GPU.
        """
        if any(one.over_nccl for one in taking.values()):
            return [[one] for one in taking.values()]
        return [list(taking.values())]

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

    @contextmanager
    def _same_scales_after_failures(self) -> Iterator[None]:
        """Puts back the scales of the last version if its body fails."""
        before = self._source.values
        try:
            yield
        except PartyFailedError:
            self._source.values = before
            raise

    @property
    def _on_the_first_rank(self) -> Coordinator:
        if self._coordinator is None:
            raise RefitError(f"rank {self.exchange.rank} knows no engines; the first rank attaches and detaches them")
        return self._coordinator

    def _describe(self) -> Held:
        """Describes what this rank holds."""
        held = self._source.describe(self.exchange.rank)
        if self.exchange.rank > 0:  # every party receives these, so only one rank sends the whole model
            return Held({}, {}, held.manifest)
        return replace(held, allow_narrowing=self._options.allow_narrowing)
