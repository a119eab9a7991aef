"""The first rank's side of one engine: makes its workers join, receive and commit, and pauses it meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import Invitation, Step
from megatron_patches.refit.control.rendezvous import Rendezvous
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engine_client import (
    AdapterEngine,
    EngineClient,
    PauseMode,
    Sleeper,
    SleepMode,
    VersionKeeper,
    why_not_up,
)
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.transports.worker import Worker

logger = logging.getLogger(__name__)


class EngineControl:
    """Calls one engine, from one thread at a time, because an engine's methods need not be thread-safe.

    Args:
        engine: the engine.
        sources: number of trainer ranks.
        options: of the session.
        check: raises if an engine that has answered must not take part.

    Attributes:
        engine: the engine.
        options: of the session.
        rendezvous: where trainer ranks and this engine's workers meet.
        workers: number of its workers; 0 until it is known.
        unreachable: whether it did not even answer its health check.
        paused_s: how long it was paused for the last version, in seconds.

    Raises:
        PartyFailedError: if the rendezvous cannot listen.
    """

    def __init__(
        self,
        engine: EngineClient,
        sources: int,
        options: RefitOptions,
        check: Callable[[EngineClient], None] = lambda _: None,
    ) -> None:
        self.engine, self._check = engine, check
        self._sources, self.options = sources, options
        self.workers, self.unreachable, self.paused_s = 0, False, 0.0
        self._registry = registry = Registry(sources)
        # The number of workers is not known yet, but there is one at least, without which no step ends.
        self.rendezvous = Rendezvous(
            sources + 1,
            options.timeout_s,
            registry.answer,
            options.host,
            silence_s=options.lease_s,
            called=self._called,
        )
        self._caller = Worker(f"refit-calls-{engine.name}")
        self._call: Future[None] | None = None
        self._paused_at: float | None = None
        self._asleep: Sleeper | None = None  # if it sleeps with its weights awake; see [Note: sleeping]

    @property
    def in_place(self) -> bool:
        """Whether versions overwrite the serving weights."""
        return self.options.memory is MemoryMode.IN_PLACE

    @property
    def cannot_send(self) -> str:
        """Why the engine could not send a version to others; empty if it could. Known once it has joined."""
        return self._registry.cannot_send

    def join(self, assembly: Assembly, staging_bytes: int) -> None:
        """Starts to make the workers join. If that fails, the step that the caller is about to take fails for all.

        Args:
            assembly: the caller's connection to the rendezvous.
            staging_bytes: of :class:`megatron_patches.refit.parties.terms.LinkOptions`.
        """
        self._start(assembly, assembly.next_step, Step.DESCRIBING, lambda: self._join(staging_bytes))

    def meet(self, assembly: Assembly, call: Mapping[str, Any]) -> None:
        """Starts to make the workers meet other engines, to take a version from them.

        Args:
            assembly: the caller's connection to the rendezvous of that meeting.
            call: where the meeting is, from :func:`meeting_at`, and its ``key``.
        """
        self._start(assembly, assembly.next_step, Step.DESCRIBING, lambda: self.engine.call({**call, "call": "meet"}))

    def record(self, assembly: Assembly) -> None:
        """Starts to make the workers record their layouts. Requests wait for this step of joining only."""

        def work() -> None:
            self._wake_weights()
            self.engine.call({"call": "record"})

        self._start(assembly, assembly.next_step, Step.RECORDING, work)

    def receive(self, assembly: Assembly, version: int, step: int, *, linked: bool, key: str = "") -> None:
        """Makes the workers receive a version, after pausing the engine if it would overwrite what serves.

        Args:
            assembly: the caller's connection to the rendezvous.
            version: number of the weights.
            step: number of the step in which they begin.
            linked: whether the sources' links are up.
            key: of the meeting with other engines from which it comes; empty if it comes from the trainer.

        Raises:
            RefitError: if workers have left, so that another trainer may use the engine, or it cannot be paused.
        """
        self.paused_s = 0.0
        self._rest()  # the late answer of a call that has failed would fail this step
        self._wake_weights()
        if self.in_place:
            gone = assembly.gone()
            if gone:
                raise PartyFailedError("; ".join(gone))
            self._pause()
        call = {"call": "receive", "version": version, "step": step, "linked": linked, "key": key}
        self._start(assembly, step, f"sending version {version}", lambda: self.engine.call(call))

    @property
    def left_asleep(self) -> str:
        """What to add to the reason why a version failed, if the engine's weights were woken for it; else empty."""
        return "" if self._asleep is None else f"; {self.engine.name} sleeps on, with its weights awake: push again"

    @property
    def failure(self) -> str | None:
        """Why the last call failed; None if it did not, or has not ended."""
        error = self._call.exception() if self._call is not None and self._call.done() else None
        return None if error is None else describe_error(error)

    def wait(self) -> None:
        """Waits for the last call.

        Raises:
            RefitError: if it failed or does not end in time.
        """
        if self._call is not None:
            try:
                self._call.result(self.options.timeout_s)
            except TimeoutError as error:
                raise RefitError(
                    f"{self.engine.name} did not answer a call within {self.options.timeout_s:.0f} s"
                ) from error

    def commit(self, version: int, confirm: Callable[[], None]) -> None:
        """Makes a received version serve, or the previous one if that fails.

        Args:
            version: number of the weights.
            confirm: waits until the workers report that they serve it; raises RefitError otherwise.

        Raises:
            RefitError: if it was not committed.
        """
        asked = False
        try:
            self.wait()
            self._pause()
            asked = True
            self.engine.commit(version, reset_cache=self._empties_caches)
        except BaseException:
            self._settle(asked=asked)
            raise
        try:
            confirm()  # takes no time: workers report before they answer the call
            self._set_weight_version(version)
        finally:
            self._resume(reset_cache=False)
        self._put_back(version)
        if isinstance(self.engine, AdapterEngine):  # only now: vLLM must not look for files that are not there
            self.engine.add(version)

    def give_up(self) -> None:
        """Resumes the engine with its old weights if it is paused, because a version did not arrive.

        Raises:
            RefitError: if it stays paused.
        """
        if self._paused_at is None:
            return
        self._rest()
        self._settle(asked=False)

    def close(self, after: int | None = None) -> None:
        """Closes the rendezvous; ``after`` as for :meth:`Rendezvous.close`. A commit under way continues."""
        self._caller.close(0.0)
        self.rendezvous.close(after)

    @property
    def _empties_caches(self) -> bool:
        """Whether cache entries computed with the old weights must be dropped."""
        return self.options.pause is not PauseMode.KEEP

    def _rest(self) -> None:
        """Waits for the last call, whose failure is known already."""
        try:
            self.wait()
        except RefitError as error:
            logger.debug("refit: %s", error)

    def _called(self, party: int) -> str:
        """What to call a party that has not joined. The engine may not even have said how many workers it has."""
        if party < self._sources:
            return f"trainer rank {party}"
        return f"worker {party - self._sources} of {self.engine.name}" if self.workers else self.engine.name

    def _start(self, assembly: Assembly, step: int, what: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                try:
                    assembly.fail(step, what, f"{self.engine.name}: {describe_error(error)}")
                except PartyFailedError as lost:  # then the step has failed already
                    logger.debug("refit: %s", lost)
                raise

        self._call = self._caller.submit(run)

    def _join(self, staging_bytes: int) -> None:
        engine, invitation = self.engine, self.rendezvous.invitation
        try:
            workers = engine.world_size()
            if workers < 1:  # nobody would be waited for, and a version would count as served
                raise RefitError(f"{engine.name} has {workers} workers by its own account; it must have at least one")
            self.workers = workers
            self._check(engine)
            self.rendezvous.expect(self._sources + self.workers)
            where = meeting_at(invitation, self._sources, self.options, staging_bytes)
            engine.call({"call": "join", "token": invitation.token, **where})
        except Exception as error:
            self.unreachable = why_not_up(engine) is not None
            self.rendezvous.give_up(describe_error(error))  # nobody waits for workers that do not come
            raise
        self.rendezvous.check_joined(range(self._sources, self._sources + self.workers), engine.name)

    def _wake_weights(self) -> None:
        """Wakes the weights of an engine that sleeps, as far as the options allow that."""
        engine, mode = self.engine, self.options.sleeping
        if mode is SleepMode.REFUSE or isinstance(engine, AdapterEngine):
            return
        if not isinstance(engine, Sleeper):
            raise RefitError(
                f"sleeping is {mode.value}; {engine.name} is a {type(engine).__name__}, which cannot sleep"
            )
        self._asleep = None
        if engine.is_sleeping():
            engine.wake_up("weights")
            self._asleep = engine if engine.is_sleeping() else None  # otherwise it was only paused

    def _set_weight_version(self, version: int) -> None:
        """Tells an engine that keeps a version of its own which one serves, while no token is made."""
        if not isinstance(self.engine, VersionKeeper):
            return
        try:
            self.engine.set_weight_version(version)
        except Exception as error:  # noqa: BLE001 - the version serves all the same
            logger.warning(
                "refit: %s serves version %d, but its own weight version is another: %s",
                self.engine.name,
                version,
                describe_error(error),
            )

    def _put_back(self, version: int) -> None:
        """Wakes the KV cache of an engine that has committed a version, or puts the engine back to sleep.

        Raises:
            RefitError: if that fails.
        """
        engine, self._asleep = self._asleep, None
        if engine is None:
            return
        try:
            engine.wake_up("kv_cache")
            if self.options.sleeping is SleepMode.RESTORE:
                engine.sleep()
        except Exception as error:
            raise RefitError(
                f"{self.engine.name} has committed version {version}, but could not be woken, or put back to sleep: "
                f"{describe_error(error)}"
            ) from error

    def _pause(self) -> None:
        if self._asleep is not None and not self._asleep.is_sleeping():
            self._asleep = None  # somebody has woken it since
        if self._paused_at is None and self._asleep is None and not isinstance(self.engine, AdapterEngine):
            began = time.perf_counter()
            try:
                self.engine.pause(self.options.pause)
            except Exception as error:
                raise RefitError(f"{self.engine.name} cannot be paused: {describe_error(error)}") from error
            self._paused_at = began

    def _resume(self, *, reset_cache: bool) -> None:
        began, self._paused_at = self._paused_at, None
        if began is not None:
            try:
                self.engine.resume(reset_cache=reset_cache and self._empties_caches)
            finally:
                self.paused_s = time.perf_counter() - began

    def _settle(self, *, asked: bool) -> None:
        """Resumes an engine that may not have committed.

        Args:
            asked: whether it was asked to commit. If only its answer was lost, it serves the new weights, and cache
                entries of the old ones must go. If it could not restore the old weights, it serves none.

        Raises:
            RefitError: if it does not answer; it then stays paused, because it might serve a mixture.
        """
        if self._paused_at is not None and (self.in_place or asked):
            try:
                self.engine.call({"call": "abandon"})
            except Exception as error:
                self._paused_at = None
                raise RefitError(
                    f"{self.engine.name} stays paused, as it did not say that its old weights are back "
                    f"({describe_error(error)}); restart it, or resume it if it was too slow to answer"
                ) from error
        self._resume(reset_cache=asked)


def meeting_at(invitation: Invitation, sources: int, options: RefitOptions, staging_bytes: int) -> dict[str, Any]:
    """The fields of a call that tell workers where they meet other parties, and how all of them move bytes.

    Args:
        invitation: to their rendezvous.
        sources: number of sources there.
        options: of the session.
        staging_bytes: of :class:`megatron_patches.refit.parties.terms.LinkOptions`.
    """
    return {
        "host": invitation.host,
        "port": invitation.port,
        "timeout_s": invitation.timeout_s,
        "lease_s": options.lease_s,
        "sources": sources,
        "transport": options.transport,
        "staging_bytes": staging_bytes,
        "memory": options.memory,
        "payload": options.payload,
    }
