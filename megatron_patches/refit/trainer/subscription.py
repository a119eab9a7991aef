"""One engine's subscription to a training run, as each trainer rank keeps it.

A subscription has a rendezvous, links and a thread of its own on every rank, so engines join, receive, commit, lag and
fail independently of each other. Its states are those of :class:`megatron_patches.refit.control.messages.State`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import (
    LONGEST_TIMEOUT_S,
    Invitation,
    Moved,
    Standing,
    State,
    StateLog,
    served_topic,
)
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.memory.delta import Base, PayloadKind
from megatron_patches.refit.memory.ports import Memory, Writing
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.trainer.engine_control import EngineControl
from megatron_patches.refit.trainer.push_options import EngineReport, Fate
from megatron_patches.refit.trainer.take import Meeting, Take
from megatron_patches.refit.trainer.telemetry import cost_of
from megatron_patches.refit.trainer.trainer_rank import Trainer
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.transports.worker import Worker

logger = logging.getLogger(__name__)


class Subscription:
    """One engine on one trainer rank. Joins at once, in its own thread.

    Args:
        name: name of the engine.
        invitation: to its rendezvous.
        trainer: this rank.
        options: how to move bytes.
        control: on the first rank, the engine; None on other ranks.
        after: an earlier subscription of the engine, which may still be committing.
        changed: called in a thread whenever it has joined, or a version serves or has failed.

    Attributes:
        name: name of the engine.
        joined: done once the workers have agreed on a plan.
        sent: done once this rank's part of the last version has been received and verified, or has failed; the weights
            may then change.
        served: done once the last version serves, or has failed.
        lags: whether it has missed a version because it was committing another, so that no push waits for it again.
        serves: on the first rank, number of the version that its workers have committed; -1 if that is not known.
        follows: on the first rank, number of the version that it is to take from other engines; -1 if there is none.
    """

    def __init__(
        self,
        name: str,
        invitation: Invitation,
        trainer: Trainer,
        options: LinkOptions,
        *,
        control: EngineControl | None,
        after: Subscription | None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._changed = changed
        self._invitation, self._trainer, self._options = invitation, trainer, options
        self._control, self._after = control, after
        self._assembly: Assembly | None = None
        self._party: SourceParty | None = None
        self._log = StateLog(name, logging.INFO if trainer.rank == 0 else logging.DEBUG)
        self._planning_s = 0.0  # seconds of joining that no version has been charged for
        self.lags, self.serves, self._is_closed = False, -1, False
        self._base = -1  # the version that the next one may be sent relative to; -1 if that is not known
        self._take: Take | None = None  # the last version's, if it came from other engines
        self._meeting: Meeting | None = None  # where the engine last took a version from others
        self._worker = Worker(f"refit-{name}")
        self.sent: Future[Moved] = Future()
        self.sent.set_result(Moved({}, 0))
        self.served: Future[float] = Future()
        self.served.set_result(0.0)
        self.follows = -1
        self._ended = self.served  # of what was begun last; differs from ``served`` if it follows
        self.joined = self._run(self._join)
        self._run(self._tell_change)

    @property
    def unreachable(self) -> bool:
        """On the first rank, whether the engine could not be reached when it was to join."""
        return self._control is not None and self._control.unreachable

    @property
    def lasted_s(self) -> float:
        """Seconds that the last version has taken so far."""
        return sum(self._log.lasted.values())

    @property
    def party(self) -> SourceParty:
        """This rank's party.

        Raises:
            PartyFailedError: before it has joined.
        """
        if self._party is None:
            raise PartyFailedError(f"{self.name} has not joined")
        return self._party

    @property
    def failure(self) -> str | None:
        """Why it takes part in no further version: joining or the last commit failed; None otherwise."""
        for ended in (self.joined, self.served):
            error = ended.exception() if ended.done() else None
            if error is not None:
                return describe_error(error)
        return None

    @property
    def over_nccl(self) -> bool:
        """Whether versions travel through kernels that occupy a GPU until the engine takes them."""
        # Joining ends here a moment later than on the first rank.
        return self.joined.exception() is None and self.party.transport is TransportName.C10D

    @property
    def gone(self) -> list[str]:
        """A sentence for each party that has left, or for the end of the subscription."""
        if self._is_closed:
            return [f"{self.name} has been left out"]
        return [] if self._assembly is None else self._assembly.gone()

    def check_there(self) -> None:
        """Raises if a party has left.

        Raises:
            PartyFailedError: with the reasons.
        """
        gone = self.gone
        if gone:
            raise PartyFailedError("; ".join(gone), [self.name])

    @property
    def has_all_workers(self) -> bool:
        """Whether the engine's workers have joined, and none has left."""
        there = self._assembly is not None and not self._assembly.gone(self._options.sources)
        return there and not self._is_closed

    @property
    def is_idle(self) -> bool:
        """Whether it has joined, and neither receives a version nor commits one, nor has failed in the last push."""
        begun: tuple[Future[Any], ...] = (self.joined, self.sent, self._ended)
        ended_well = all(each.done() and each.exception() is None for each in begun)
        return ended_well and self.failure is None and self.has_all_workers

    @property
    def has_ended(self) -> bool:
        """Whether what was begun last has ended."""
        return self._ended.done()

    @property
    def workers(self) -> int:
        """On the first rank, number of the engine's workers; 0 until it is known."""
        return 0 if self._control is None else self._control.workers

    @property
    def met(self) -> list[str]:
        """Names of the engines from which it last took a version, and would take another one without a new plan."""
        meeting = self._meeting
        return [] if meeting is None else [server.name for server in meeting.servers]

    @property
    def can_send(self) -> bool:
        """On the first rank, whether the engine's workers could send what they serve to others."""
        return self._control is not None and not self._control.cannot_send

    @property
    def standing(self) -> Standing:
        """Its current state."""
        return self._log.standing(self._awaited)

    def _awaited(self, state: State) -> list[str]:
        """The engine, workers that have not taken what was sent to them, or parties that have not ended a step."""
        if state is State.COMMITTING:
            return [self.name]
        late = [] if self._party is None or state is not State.SENDING else self._party.late
        if late or self._control is None:
            return [f"worker {rank}" for rank in late]
        if self._take is not None and state is State.SENDING:
            return self._take.awaited
        return self._control.rendezvous.awaited

    def send(
        self,
        version: int,
        look_up: Callable[[], Memory],
        base: Base | None = None,
        writing: Writing | None = None,
    ) -> None:
        """Starts to send a version, once the last one has been committed or given up. The engine commits it by itself.

        Args:
            version: number of the weights.
            look_up: see :meth:`megatron_patches.refit.parties.source.SourceParty.push`.
            base: an earlier version, of which only changes are sent if the engine serves it; None to send all.
            writing: what is still writing to the weights' memory, on a GPU.
        """
        self._take = None
        self.sent = sent = self._run(lambda: self._send(version, look_up, base, writing))
        self.served = self._ended = self._serve_after(sent, version)

    def follow(self, version: int) -> None:
        """Starts to wait until the engine has taken a version, or a later one, from other engines.

        Args:
            version: number of the version that other engines are sent.
        """
        self._take = None
        self.sent = Future()
        self.sent.set_result(Moved({}, 0))
        if self._control is None:
            self._ended = self.served = self._serve_after(self.sent, version)
        else:
            self._ended = Future()  # what failed before counts no more
            self._ended.set_result(0.0)
            self.served, self.follows = Future(), version

    def end_following(self, reason: str | None) -> None:
        """On the first rank, ends what :meth:`follow` has started.

        Args:
            reason: why the engine does not serve the version; None if it does.
        """
        served, version, self.follows = self.served, self.follows, -1

        def tell() -> None:  # in the worker's thread, because callbacks of those who wait may do anything
            paused_s = 0.0 if self._control is None else self._control.paused_s
            self._tell_others(version, reason)
            if reason is None:
                served.set_result(paused_s)
            else:
                served.set_exception(self._failed(reason))

        self._run(tell)

    def take(self, take: Take) -> Future[float]:
        """On the first rank, starts to take a version from other engines. The engine commits it by itself.

        Other ranks take no part. If the version does not come, the engine keeps serving its old one, and does not count
        as failed. Call it only while the subscription is idle and, unless it follows, no push begins.

        Returns:
            A future that is done once the version serves or was given up.
        """
        self._take = take
        self._ended = ended = self._serve_after(self._run(lambda: self._receive(take)), take.version)
        if self.follows < 0:
            self.served, self.lags = ended, False
        return ended

    def leave_others(self) -> None:
        """Ends what :meth:`take` and :meth:`follow` have started, because the engine is left out."""
        reason = f"{self.name} has been left out"
        self.give_up_taking(reason)
        if self.follows >= 0:
            self.end_following(reason)

    def give_up_taking(self, reason: str) -> bool:
        """Ends what :meth:`take` has started. Returns whether the version had neither come nor been given up before."""
        return self._take is not None and self._take.give_up(reason)

    def relay(self, call: Mapping[str, Any]) -> Future[None]:
        """On the first rank, makes the engine's workers send the version that they serve to those of another engine.

        The engine is called once nothing else is under way, and is not paused.

        Args:
            call: see :class:`megatron_patches.refit.vllm.refit_call.RefitCall`.
        """

        def start() -> None:
            if self._control is None or self.serves != call["version"]:
                raise RefitError(f"{self.name} no longer serves version {call['version']}")
            self._control.engine.call({**call, "call": "relay"})

        return self._run(start)

    def forget(self) -> None:
        """Forgets that the last commit failed."""
        if self.served.done():
            self.served = Future()
            self.served.set_result(0.0)

    def outcome(self) -> Future[EngineReport]:
        """What becomes of the version that it was sent, once it serves or has failed. Call it before the next one."""
        found: Future[EngineReport] = Future()

        def tell(served: Future[float]) -> None:  # in the worker's thread, before it begins the next version
            error = served.exception()
            found.set_result(self.report(Fate.SERVES, None if error is None else describe_error(error)))

        self.served.add_done_callback(tell)
        return found

    def report(self, fate: Fate, reason: str | None) -> EngineReport:
        """What became of the last version at this engine.

        Args:
            fate: what became of it, if there is no ``reason``.
            reason: why it failed.
        """
        sent = self.sent.done() and self.sent.exception() is None
        return EngineReport(
            fate if reason is None else Fate.FAILED,
            seconds={state.value: seconds for state, seconds in self._log.lasted.items()},
            nbytes=sum(self.sent.result().bytes_by_source) if sent else 0,
            reason=reason,
        )

    def close(self) -> Future[None]:
        """Ends the subscription: whatever is under way fails, except a commit, which continues.

        Returns:
            A future that is done once the other parties have received what was on its way to them.
        """
        self._is_closed = True
        if self._party is not None:
            self._party.leave()
        self.leave_others()
        self._run(self._close)
        self._worker.close(0.0)
        closer = Worker(f"refit-closing-{self.name}")
        control, after = self._control, None if self._party is None else self._trainer.rank
        closed = closer.submit(lambda: None if control is None else control.close(after))
        closer.close(0.0)
        return closed

    def finish(self) -> None:
        """Waits until nothing is under way, in a subscription that was closed.

        Raises:
            RefitError: if the last commit does not end in time.
        """
        try:
            self.served.result(2 * self._invitation.timeout_s)
        except TimeoutError as error:
            raise RefitError(
                f"version {self.standing.version} was pushed before, and {self.name} has not said how its commit went"
            ) from error
        except RefitError as error:  # its pusher has the error already
            logger.debug("refit: %s", error)

    def _join(self) -> None:
        try:
            self._await_earlier()
            self._assembly = Assembly(self._invitation, self._trainer.rank, self._trainer.name)
            self._party = SourceParty(self._assembly, self._options, self._trainer.device)
            if self._control is not None:
                self._control.join(self._assembly, self._options.staging_bytes)
            self._party.prepare(self._trainer.describe, self._have_recorded)
            if self._control is not None:
                self._control.wait()
                if self._control.options.fan_out and not self.can_send:
                    logger.warning("refit: %s sends nothing to other engines: %s", self.name, self._control.cannot_send)
        except Exception as error:
            of_engine = self._control.failure if self._control is not None else None
            reason = of_engine or describe_error(error)
            self._log.enter(State.FAILED, -1, reason)
            if self._party is not None:
                self._party.leave()  # so that nobody waits for this rank
            raise self._failed(reason) from error
        self._log.enter(State.READY, -1)
        self._planning_s = self._log.lasted[State.JOINING]

    def _await_earlier(self) -> None:
        """Waits for the earlier subscription, and forgets it: it keeps its plan, and knows a still earlier one."""
        after, self._after = self._after, None
        if after is not None:
            after.finish()

    def _have_recorded(self) -> None:
        if self._control is not None and self._assembly is not None:
            self._control.record(self._assembly)

    def _send(self, version: int, look_up: Callable[[], Memory], base: Base | None, writing: Writing | None) -> Moved:
        self.joined.result(0)
        known, self._base = self._base, -1
        since = base if base is not None and base.version == known else None
        self._log.enter(State.SENDING, version)
        try:
            try:
                moved = self._push(version, look_up, since, writing)
            except PartyFailedError as error:
                # Digests also differ if the engine has lost what it was sent changes of, as by sleep at level 2. All
                # ranks hear the same, so all send again, also those that had no base and sent everything.
                if self._options.payload is PayloadKind.WHOLE or not error.digests_differ:
                    raise
                logger.warning("refit: %s receives version %d again, whole: %s", self.name, version, error)
                moved = self._push(version, look_up, None, writing)
        except Exception as error:
            reason = describe_error(error) + ("" if self._control is None else self._control.left_asleep)
            self._fail(version, reason)
            raise self._failed(reason) from error
        self._log.enter(State.COMMITTING, version)
        return moved

    def _push(self, version: int, look_up: Callable[[], Memory], since: Base | None, writing: Writing | None) -> Moved:
        party, assembly, control = self.party, self._assembly, self._control
        if assembly is None:
            raise PartyFailedError(f"{self.name} has not joined")
        step, linked, asked = assembly.next_step, party.linked, False

        def begin() -> Memory:
            # In the first step of this push, which fails for all parties if this fails.
            nonlocal asked
            if control is not None and not asked:
                asked = True
                if control.in_place or self.over_nccl:  # requests wait from then on, so weights settle first
                    with suppress(Exception):  # raised below, once workers wait for this step
                        look_up()
                control.receive(assembly, version, step, linked=linked)
            return look_up()

        return party.push(version, begin, since, writing=writing)

    def _receive(self, take: Take) -> Moved:
        self._base = -1  # other ranks do not hear of this version
        if self._control is None:
            raise PartyFailedError(f"{self.name} has not joined")
        self._log.enter(State.SENDING, take.version)
        try:
            self.check_there()  # another trainer may use the engine
            moved = take.run(self._meeting_with(take.servers, self._control))
        except Exception as error:
            self._end_meeting()
            take.failure = describe_error(error)
            self._fail(self.serves, take.failure)
            raise
        self._log.enter(State.COMMITTING, take.version)
        return moved

    def _meeting_with(self, servers: Sequence[Subscription], control: EngineControl) -> Meeting:
        """The last meeting, if it goes on and is with the same engines; otherwise a new one."""
        if self._meeting is None or self._meeting.servers != servers or not self._meeting.is_complete:
            self._end_meeting()
            self._meeting = Meeting(servers, control, self._trainer)
        return self._meeting

    def _end_meeting(self) -> None:
        """Closes the last meeting. No version may be under way."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    def _serve_after(self, sent: Future[Moved], version: int) -> Future[float]:
        served = self._run(lambda: self._serve(version, sent))
        self._run(self._tell_change)
        return served

    def _tell_change(self) -> None:
        try:
            self._changed()
        except Exception:
            logger.exception("refit: engines do not take versions from each other after a change of %s", self.name)

    def _serve(self, version: int, sent: Future[Moved]) -> float:
        """Commits a version, or gives it up if it did not arrive, on the first rank. Other ranks wait for its word.

        Returns:
            On the first rank, seconds for which the engine was paused.
        """
        assembly, control, arrived = self._assembly, self._control, sent.exception() is None
        committed, self.serves = self.serves, -1
        if assembly is None:
            raise PartyFailedError(f"{self.name} has not joined")
        if control is None:
            reason = assembly.collect(served_topic(version), [0], LONGEST_TIMEOUT_S)[0]
        else:
            reason = self._commit(version, control, arrived=arrived)
            if self._take is None:
                self._tell_others(version, reason)
            else:
                self._take.failure = self._take.failure or reason
        if reason is not None and (arrived or control is not None):
            self._fail(version, reason)
        elif arrived:
            self._base = version if self._take is None else -1
            self._log.enter(State.READY, version)
        if reason is None:
            self.serves = version if arrived else committed
        if control is not None:
            self._tell_cost(version, sent, control, reason)
        if reason is not None and (arrived or control is not None):
            raise self._failed(reason)
        return 0.0 if control is None else control.paused_s

    def _commit(self, version: int, control: EngineControl, *, arrived: bool) -> str | None:
        """Why a version does not serve, or was not given up; None if all went well."""
        try:
            if arrived:
                control.commit(version, lambda: self._confirm(version, control))
            else:
                control.give_up()  # in place, the workers have restored the old weights
        except Exception as error:  # noqa: BLE001 - reported to all ranks, and raised by the caller
            doing = "committing" if arrived else "giving up"
            return f"{doing} version {version} failed: {describe_error(error)}{control.left_asleep}"
        return None

    def _tell_others(self, version: int, reason: str | None) -> None:
        """Tells the other ranks how a commit went."""
        try:
            if self._assembly is not None:
                self._assembly.post(served_topic(version), reason)
        except PartyFailedError as error:  # the subscription was closed
            logger.debug("refit: %s", error)

    def _tell_cost(self, version: int, sent: Future[Moved], control: EngineControl, reason: str | None) -> None:
        lost = sent.exception()
        cost = cost_of(
            self.name,
            version,
            planning_s=self._planning_s,
            lasted=self._log.lasted,
            moved=sent.result() if lost is None else None,
            paused_s=control.paused_s,
            reason=reason if lost is None else "; ".join(filter(None, (describe_error(lost), reason))),
            sources=() if self._take is None else self._take.sources,
        )
        self._planning_s = 0.0
        self._trainer.telemetry.tell(cost)

    def _confirm(self, version: int, control: EngineControl) -> None:
        reasons = self.party.collect_commits(version, control.workers, self._invitation.timeout_s)
        if reasons:
            raise PartyFailedError(
                "; ".join(f"worker {worker} of {self.name}: {reason}" for worker, reason in sorted(reasons.items()))
            )

    def _failed(self, reason: str) -> PartyFailedError:
        """The error that says which engine failed: its workers and their machines are all that some reasons name."""
        return PartyFailedError(reason if self.name in reason else f"{self.name}: {reason}", [self.name])

    def _fail(self, version: int, reason: str) -> None:
        is_there = self.joined.exception() is None and not self.gone
        self._log.enter(State.READY if is_there else State.FAILED, version, reason)

    def _close(self) -> None:
        self._end_meeting()
        if self._party is not None:
            self._party.close()
        self._log.enter(State.CLOSED)

    def _run[T](self, work: Callable[[], T]) -> Future[T]:
        def run() -> T:
            with self._trainer.on_stream():
                return work()

        return self._worker.submit(run)
