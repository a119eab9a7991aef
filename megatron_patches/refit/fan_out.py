"""Fan-out on the first trainer rank: an engine that joins takes the version that others serve, from these engines.

Neither the training loop nor other trainer ranks take part, and no serving engine is paused. For one engine and one
version, the workers of the chosen engines are the sources of an ordinary
:class:`megatron_patches.refit.subscription.Subscription`. The first rank is a source too, in a thread of its own: it
describes the model, calls the receiving engine, and holds no weights. So plans, proofs, digests, transports, time-outs
and commits are those of a push. The engine joins the trainer's own subscription at the next push.

Waves come from :func:`megatron_patches.refit.planning.fan_out.assign`: an engine that is sending is busy, engines that
wait are assigned to those that are not, and an engine that has committed sends as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace

from megatron_patches.refit.candidates import Candidates, Source, candidates_of
from megatron_patches.refit.delta import PayloadKind
from megatron_patches.refit.engine_control import EngineControl
from megatron_patches.refit.engines import EngineClient
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.exchange import describe_error
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.parties.messages import TICK_S, Held, Standing, State
from megatron_patches.refit.planning.fan_out import Server, Waiting, assign
from megatron_patches.refit.push_options import RefitOptions
from megatron_patches.refit.subscription import Subscription
from megatron_patches.refit.trainer_rank import Trainer
from megatron_patches.refit.transports.worker import Worker

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # then the engine joins the trainer, whose versions might otherwise never come to it

_Failed = frozenset[tuple[str, int]]
"""Names of engines, each with a version that could not be taken from it."""


class FanOut:
    """Brings engines to the version that others serve. Any thread may use it.

    Args:
        options: of the session.
        trainer: this rank, as in its subscriptions.
        ranks: number of trainer ranks.
        subscribed: the trainer's subscriptions.
        check: see :class:`EngineControl`.
        without: called, in a thread, with an engine for which nobody has a version, or that could not take it.
    """

    def __init__(
        self,
        options: RefitOptions,
        trainer: Trainer,
        ranks: int,
        subscribed: Callable[[], Collection[Subscription]],
        check: Callable[[EngineClient], None],
        without: Callable[[EngineClient], None] = lambda _: None,
    ) -> None:
        self._without = without
        self._options = replace(options, payload=PayloadKind.WHOLE)  # nobody knows what an engine that joins holds
        self._ranks, self._subscribed, self._check = ranks, subscribed, check
        describe = trainer.describe
        self._trainer = replace(trainer, describe=lambda: _model_of(describe()))
        self._changed = threading.Condition()
        self._is_closed = False
        self._at_work: dict[str, EngineClient] = {}
        self._waiting: dict[str, _Failed] = {}
        self._taking: dict[str, tuple[int, list[str]]] = {}  # version and servers of each receiver
        self._brought: dict[str, Subscription] = {}  # by receiver, until the trainer's own subscription

    def bring(self, engine: EngineClient) -> None:
        """Starts to bring an engine to the version that others serve, in a thread. It need not succeed."""
        with self._changed:
            if self._is_closed or engine.name in self._at_work:
                return
            self._at_work[engine.name] = engine
        worker = Worker(f"refit-fan-out-{engine.name}")
        worker.submit(lambda: self._bring(engine))
        worker.close(0.0)

    def is_bringing(self, engine: EngineClient) -> bool:
        """Whether that is under way."""
        return self._at_work.get(engine.name) is engine

    def claim(self, engine: EngineClient) -> bool:
        """Ends the wait of an engine that would take a version from others. Returns False if it takes one now."""
        with self._changed:
            if engine.name in self._taking:
                return False
            self._at_work.pop(engine.name, None)
            self._changed.notify_all()
            return True

    def release(self, name: str) -> Subscription | None:
        """Ends an engine's part, whatever it is at. Returns the subscription in which it took a version, if it did."""
        with self._changed:
            self._at_work.pop(name, None)
            one = self._brought.pop(name, None)
            self._changed.notify_all()
        if one is not None:
            one.close()
        return one

    def state(self) -> Mapping[str, Standing]:
        """What the engines are at that take, or have taken, a version from others."""
        return {name: one.standing for name, one in list(self._brought.items())}

    def candidates(self) -> Candidates:
        """The sources of the newest version that an engine serves."""
        with self._changed:
            able = self._able()
            version = able[0].serves if able else -1
            sends = {one.name: [to for to, (_, names) in self._taking.items() if one.name in names] for one in able}
            waiting = list(self._waiting)
        sources = [Source(one.name, "engine", one.workers, sends[one.name]) for one in able]
        sent_to = [
            one.name
            for one in self._subscribed()
            if one.standing.state is State.SENDING and one.standing.version == version
        ]
        if sent_to:
            sources.insert(0, Source("trainer", "trainer", self._ranks, sent_to))
        return candidates_of(version, sources, waiting)

    def close(self) -> dict[str, Subscription]:
        """Ends everything. Engines keep what they serve. Returns what :meth:`release` does, by engine."""
        with self._changed:
            self._is_closed = True
            names = [*self._brought]
            self._changed.notify_all()
        found = {name: self.release(name) for name in names}
        return {name: one for name, one in found.items() if one is not None}

    def _bring(self, engine: EngineClient) -> None:
        failed: _Failed = frozenset()
        try:
            for _ in range(_ATTEMPTS):
                chosen = self._choose(engine, failed)
                if chosen is None:
                    return
                version, servers = chosen
                names = ", ".join(server.name for server in servers)
                logger.info("refit: %s takes version %d from %s", engine.name, version, names)
                try:
                    self._receive(engine, version, servers)
                except RefitError as error:
                    failed |= {(server.name, version) for server in servers}
                    logger.warning(
                        "refit: %s did not take version %d from %s: %s",
                        engine.name,
                        version,
                        names,
                        describe_error(error),
                    )
                else:
                    return
                finally:
                    self._give_back(engine)
        except Exception:
            logger.exception("refit: %s serves on what it serves, until the trainer sends to it", engine.name)
        finally:
            self._give_back(engine)
            with self._changed:
                ends = self.is_bringing(engine) and not self._is_closed
                if self.is_bringing(engine):
                    del self._at_work[engine.name]
                has_none = engine.name not in self._brought
            if ends and has_none:
                self._without(engine)

    def _give_back(self, engine: EngineClient) -> None:
        """Frees the servers of a receiver."""
        with self._changed:
            self._taking.pop(engine.name, None)
            self._changed.notify_all()

    def _able(self) -> list[Subscription]:
        """The engines that serve the newest version, as far as known."""
        known = [*self._subscribed(), *self._brought.values()]
        serving = [one for one in known if one.serves >= 0 and one.has_all_workers]
        newest = max((one.serves for one in serving), default=-1)
        return [one for one in serving if one.serves == newest]

    def _choose(self, engine: EngineClient, failed: _Failed) -> tuple[int, list[Subscription]] | None:
        """Waits for engines that can send to a receiver. Returns the version and them; None if there are none."""
        deadline = time.monotonic() + self._options.timeout_s
        with self._changed:
            self._waiting[engine.name] = failed
            try:
                while self.is_bringing(engine) and not self._is_closed:
                    able = [one for one in self._able() if (one.name, one.serves) not in failed]
                    if engine.name not in self._taking:
                        if time.monotonic() > deadline or not self._may_come(able):
                            return None
                        self._allot(able, failed)
                    version, names = self._taking.get(engine.name, (-1, []))
                    servers = [one for one in able if one.name in names and one.serves == version]
                    if servers:
                        return version, servers
                    self._taking.pop(engine.name, None)  # those that another thread has assigned may have gone since
                    self._changed.wait(TICK_S)  # also for a commit under way, which nobody announces here
            finally:
                del self._waiting[engine.name]
        return None

    def _may_come(self, able: Sequence[Subscription]) -> bool:
        """Whether some engine can send, or may be able to after a commit that is under way."""
        return bool(able) or not all(one.served.done() for one in self._subscribed())

    def _allot(self, able: Sequence[Subscription], failed: _Failed) -> None:
        """Assigns engines that are not busy to receivers that wait and have failed to take from the same ones."""
        busy = {name for _, names in self._taking.values() for name in names}
        free = [one for one in able if one.served.done() and one.name not in busy and one.name not in self._waiting]
        waiting = [
            name
            for name, others in self._waiting.items()
            if others == failed and name not in self._taking and name in self._at_work
        ]
        if not free or not waiting:
            return
        for share in assign([Server(name=one.name) for one in free], [Waiting(name=name) for name in waiting]):
            self._taking.setdefault(share.receiver, (free[0].serves, []))[1].append(share.server)
        self._changed.notify_all()

    def _receive(self, engine: EngineClient, version: int, servers: Sequence[Subscription]) -> None:
        """Lets an engine take a version from others and commit it.

        Raises:
            RefitError: if it did not; it then serves what it served.
        """
        options, sources = self._options, 1 + sum(server.workers for server in servers)
        control = EngineControl(engine, sources, options, self._check)
        invitation = control.rendezvous.invitation
        workers = [f"{server.name} worker {worker}" for server in servers for worker in range(server.workers)]
        one = Subscription(
            engine.name,
            invitation,
            replace(self._trainer, sources=("the trainer's first rank", *workers)),
            options.links(sources, options.staging_bytes),
            control=control,
            after=None,
        )
        with self._changed:
            self._brought[engine.name] = one
        call = {"version": version, "key": invitation.token, **control.meeting(options.staging_bytes)}
        try:
            first = 1
            for server in servers:
                try:
                    server.relay({**call, "first": first}).result(options.timeout_s)
                    control.rendezvous.check_joined(range(first, first + server.workers), server.name)
                except (RefitError, TimeoutError) as error:
                    control.rendezvous.give_up(f"{server.name}: {describe_error(error)}")
                    break
                first += server.workers
            one.joined.result()
            self._check_wanted(engine)
            one.send(version, dict)
            one.sent.result()
            one.served.result()
        except BaseException:
            with self._changed:
                if self._brought.get(engine.name) is one:
                    del self._brought[engine.name]
            wait([one.served], options.timeout_s)  # nobody else may call the engine before
            one.close().result()
            raise

    def _check_wanted(self, engine: EngineClient) -> None:
        if self._is_closed or not self.is_bringing(engine):
            raise PartyFailedError(f"{engine.name} was detached, or the session has ended")


def _model_of(held: Held) -> Held:
    """The model alone, of which this source holds nothing. Engines may lack tensors that they do not serve."""
    return replace(held, manifest=Manifest(held.manifest.rank, held.manifest.host, (), ()), partial=True)
