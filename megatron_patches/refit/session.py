"""Pushes successive versions of a training run's weights into running engines."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.commit import Commit, Pauses, of_engines, on_each
from megatron_patches.refit.engine_calls import EngineCalls
from megatron_patches.refit.engines import EngineClient, check_different_servers, check_given_once
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.exchange import default_exchange, describe_error, on_all, on_first
from megatron_patches.refit.hf_config import build_config
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.parties.messages import DESCRIBING, RECORDING, Held, Moved
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.ports import Memory
from megatron_patches.refit.push_options import PushReport, RefitOptions
from megatron_patches.refit.rendezvous import Rendezvous
from megatron_patches.refit.rendezvous_messages import Invitation
from megatron_patches.refit.source.live import LiveMemory, describe_rank, finish_parameter_gather
from megatron_patches.refit.transports.base import AUTO

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["PushReport", "RefitOptions", "RefitSession"]


class RefitSession:
    """One training run and the engines that it feeds. Every method is collective over the trainer's ranks.

    Attributes:
        exchange: collectives over the trainer's ranks.
        version: number of the last version pushed; -1 before the first push.

    Args:
        model_chunks: this rank's part of the model: one GPTModel per virtual pipeline stage, wrapped or not.
        engines: on the first rank, the engines; ignored on other ranks, where an empty list will do.
        vocab_size: number of tokens; embedding rows beyond it are padding and are not sent.
        options: how to push; the same on all ranks. None for the defaults.
        group: ranks that hold the model, replicas included; None for all processes.
        tp_group: tensor-parallel group; None for Megatron's own.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        engines: Sequence[EngineClient],
        *,
        vocab_size: int,
        options: RefitOptions | None = None,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        self._chunks, self._vocab_size = model_chunks, vocab_size
        self._options, self._tp_group = options or RefitOptions(), tp_group
        self.exchange = default_exchange(group)
        self._engines: Sequence[EngineClient] = engines if self._first else ()
        self._rendezvous: Rendezvous | None = None
        self._party: SourceParty | None = None
        self._assembly: Assembly | None = None
        self._live: LiveMemory | None = None
        self._commit: Commit | None = None  # of the last version pushed
        self._left: Commit | None = None  # left under way by close()
        self._sizes: list[int] = []  # number of workers of each engine
        self._calls: EngineCalls | None = None  # the latest call to the engines
        self._pauses = Pauses(self._options.pause)
        self._at_work = threading.Lock()
        self.version = -1  # the last version pushed

    @property
    def _first(self) -> bool:
        return self.exchange.rank == 0

    @property
    def _in_place(self) -> bool:
        return self._options.memory is MemoryMode.IN_PLACE

    def prepare(self, engines: Sequence[EngineClient] | None = None) -> str:
        """Connects to the engines and agrees with them on a plan. Call it again after losing an engine or a rank.

        Args:
            engines: on the first rank, the engines to push to from now on; None keeps the current ones.

        Returns:
            Digest of the plan.

        Raises:
            PartyFailedError: on every rank, if any rank or engine failed; the engines keep serving what they served.
        """
        with self._alone():
            if engines is not None and self._first:
                self._engines = engines
            return self._prepare()

    def _prepare(self) -> str:
        self.close()
        self._on_first(self._let_end)
        invitation, self._sizes = self._on_first(self._open)
        self._on_all(partial(self._meet, invitation))
        if self._calls is not None:
            self._on_first(partial(self._calls.finish, self._options.timeout_s))
        if self._party is None:
            raise RefitError("the session was closed")
        return self._party.plan.digest

    def _meet(self, invitation: Invitation) -> None:
        """Makes the engines join the rendezvous and agrees on a plan with their workers."""
        rank = self.exchange.rank
        self._assembly = Assembly(invitation, rank, f"trainer rank {rank} on {socket.gethostname()}:{os.getpid()}")
        device = str(next(self._chunks[0].parameters()).device)
        self._party = SourceParty(self._assembly, self._link_options(), device)
        self._calls = calls = EngineCalls(self._assembly, DESCRIBING)
        for engine, parties in self._parties():
            call = {"call": "join", **asdict(invitation), "first_party": parties.start, **self._joining()}
            calls.start(engine, call, self._check_joined(engine, parties))
        self._party.prepare(self._describe, partial(self._have_recorded, self._assembly, calls))

    def _have_recorded(self, assembly: Assembly, joining: EngineCalls) -> None:
        """Makes the engines' workers record their models' layouts. Requests wait for this step of prepare() only."""
        self._calls = calls = EngineCalls(assembly, RECORDING, after=joining)
        for engine, _ in self._parties():
            calls.start(engine, {"call": "record"})

    def _parties(self) -> Iterator[tuple[EngineClient, range]]:
        """On the first rank, yields each engine with its workers' party numbers."""
        first = self.exchange.size
        for engine, size in zip(self._engines, self._sizes, strict=False):
            yield engine, range(first, first + size)
            first += size

    def push(self, version: int, *, wait: bool = True) -> PushReport:
        """Sends the current weights and makes the engines serve them as ``version``.

        The weights may change again once it returns.

        Args:
            version: number of the weights, at least 0 and greater than any that this session has pushed.
            wait: whether to wait until all engines have committed the version. If False, they commit in the background,
                and :meth:`wait`, which the next push calls first, raises any error.

        Raises:
            RefitError: on every rank, if any rank or engine failed. Each engine serves the old weights or, if its own
                commit succeeded, the new ones; never a mixture.
            ValueError: if ``version`` is negative or not later than the last one.
        """
        with self._alone():
            return self._push(version, wait=wait)

    def _push(self, version: int, *, wait: bool) -> PushReport:
        self._wait()
        party, assembly = self._party, self._assembly
        if party is None or assembly is None:
            raise RefitError("prepare() has not succeeded")
        if version < 0:
            raise ValueError(f"version is {version}; versions begin with 0")
        if version <= self.version:
            raise ValueError(
                f"version {version} is not later than {self.version}, which was pushed before; versions rise within a "
                "session, and a new RefitSession may begin anywhere"
            )
        finish_parameter_gather(self._chunks)  # collective, so here, before any rank can have failed
        self._pauses.begin_push()
        if self._in_place:
            self._on_first(partial(self._pause_all, assembly))
        started = time.perf_counter()
        calls = self._calls = EngineCalls(assembly, f"sending version {version}")
        commit = self._make_commit(version, calls)
        receiving = {"call": "receive", "version": version, "step": assembly.next_step, "linked": party.linked}
        moved = self._send(version, commit, party, partial(calls.start, call=receiving))
        seconds = {"send": time.perf_counter() - started, **moved.seconds}
        self.version, self._commit = version, commit
        commit.start()
        if wait:
            started = time.perf_counter()
            paused = self._wait()
            seconds |= {"commit": time.perf_counter() - started, "paused": paused}
        return PushReport(
            version=version,
            nbytes=party.plan.nbytes,
            staged_bytes=moved.staged_bytes,
            beside_bytes=moved.beside_bytes,
            backup_bytes=moved.backup_bytes,
            seconds=seconds,
        )

    def _send(self, version: int, commit: Commit, party: SourceParty, receive: Callable[[EngineClient], None]) -> Moved:
        """Makes the engines receive a version. If that fails, paused engines resume with the old version."""
        found: list[Moved] = []

        def send() -> None:
            for engine in self._engines:
                receive(engine)
            found.append(party.push(version, self._memory))

        try:
            self._on_all(send)
        except PartyFailedError as error:
            # In place, workers that could not receive everything have restored the old weights.
            stuck = self._on_first(commit.give_up)
            told = [str(error), *(describe_error(why) for _, why in stuck)]
            raise PartyFailedError("; ".join(told), {*error.engines, *(name for name, _ in stuck)}) from error
        (moved,) = found
        return moved

    def wait(self) -> None:
        """Waits until all engines serve the last version pushed.

        Raises:
            PartyFailedError: on every rank, if an engine did not commit it.
        """
        with self._alone():
            self._wait()

    def end(self) -> None:
        """:meth:`wait` and :meth:`close` for a rank that ends on its own: waits for no other rank.

        Raises:
            PartyFailedError: on the first rank, if an engine did not commit the last version pushed.
        """
        commit = self._commit
        try:
            if commit is not None and self._first:
                commit.check()
        finally:
            self.close()

    def close(self) -> None:
        """Disconnects from the engines, which keep what they serve; a commit under way continues."""
        if self._party is not None:
            self._party.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous, self._party, self._assembly = None, None, None
        self._left, self._commit = self._commit or self._left, None

    def _wait(self) -> float:
        """Implements :meth:`wait`. Returns the longest time, in seconds, that an engine was paused."""
        commit = self._commit
        if commit is None:
            return 0.0
        failure, under_way, paused_s = self._on_first(partial(self._outcome, commit))
        if not under_way:  # otherwise the commit would resume engines during the next push
            self._commit = None
        if failure is not None:
            raise PartyFailedError(*failure)
        return paused_s

    def _outcome(self, commit: Commit) -> tuple[tuple[str, tuple[str, ...]] | None, bool, float]:
        """Why a commit failed and on which engines; whether it is under way; an engine's longest pause in seconds."""
        try:
            commit.check()
        except PartyFailedError as error:
            return (str(error), error.engines), commit.under_way, 0.0
        return None, False, self._pauses.longest_s

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Allows one thread at a time in prepare, push or wait: a failure in another would resume the engines mid-push.

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

    def _on_all(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on every rank. Raises on all ranks if it fails on any."""
        on_all(self.exchange, work, self._blamed)

    def _on_first[T](self, work: Callable[[], T]) -> T:
        """Runs ``work``, which may wait for engines, on the first rank. Every rank gets its result or its error."""
        return on_first(self.exchange, work)

    def _blamed(self) -> list[str]:
        """On the first rank, names of the engines that have failed since the session connected to them."""
        failed = set() if self._calls is None else set(self._calls.culprits)
        if self._rendezvous is not None:
            culprits = self._rendezvous.culprits
            failed |= {engine.name for engine, parties in self._parties() if culprits.intersection(parties)}
        return sorted(failed)

    def _link_options(self) -> LinkOptions:
        return LinkOptions(
            transport=self._options.transport,
            staging_bytes=self._options.staging_bytes,
            sources=self.exchange.size,
            memory=self._options.memory,
        )

    def _joining(self) -> dict[str, float | str]:
        """Options that workers need to build the same :meth:`_link_options`."""
        return {
            "sources": self.exchange.size,
            "transport": AUTO if self._options.transport is None else self._options.transport.value,
            "staging_bytes": self._options.staging_bytes,
            "memory": self._options.memory.value,
            "lease_s": self._options.lease_s,
        }

    def _check_joined(self, engine: EngineClient, parties: range) -> Callable[[], None] | None:
        """Returns a check that raises if an engine has answered "join" but its workers did not join."""
        if self._rendezvous is None:
            return None
        return partial(self._rendezvous.check_joined, parties, engine.name)

    def _make_commit(self, version: int, calls: EngineCalls) -> Commit:
        """Makes the commit of a version that engines receive through ``calls``."""
        return Commit(
            version,
            self._engines,
            self._pauses,
            received=partial(calls.finish, self._options.timeout_s),
            confirm=partial(self._confirm, version),
            in_place=self._in_place,
            timeout_s=self._options.timeout_s,
        )

    def _pause_all(self, assembly: Assembly) -> None:
        """Pauses all engines, unless workers have left: another trainer may have paused their engine by now.

        Raises:
            PartyFailedError: if workers have left, or an engine cannot be paused.
        """
        gone = assembly.gone()
        if gone:
            raise PartyFailedError("; ".join(gone), self._blamed())
        self._pauses.begin_all(self._engines)

    def _let_end(self) -> None:
        """Waits for a commit that :meth:`close` left under way, as it still pauses and resumes engines.

        Raises:
            PartyFailedError: if it does not end.
        """
        if self._left is None:
            return
        try:
            self._left.check()
        except PartyFailedError as error:
            if self._left.under_way:
                raise PartyFailedError(
                    f"version {self._left.version} was pushed before, and {error}", error.engines
                ) from error
        self._left = None

    def _confirm(self, version: int) -> None:
        """Waits until the workers report that they serve a version.

        Raises:
            PartyFailedError: with the reason of each worker that does not.
        """
        party = self._party  # another thread may close the session in the meantime
        if party is None:
            raise PartyFailedError("the session was closed")
        reasons = party.collect_commits(version, sum(self._sizes), self._options.timeout_s)
        if reasons:
            failed = {self.exchange.size + worker for worker in reasons}
            engines = [engine.name for engine, parties in self._parties() if failed.intersection(parties)]
            told = [f"engine worker {worker}: {reason}" for worker, reason in sorted(reasons.items())]
            raise PartyFailedError("; ".join(told), engines)

    def _open(self) -> tuple[Invitation, list[int]]:
        """Opens the rendezvous on the first rank, sized for the workers of all engines.

        Raises:
            PartyFailedError: if there are no engines, or one does not answer.
        """
        sizes: dict[int, int] = {}

        def ask(engine: EngineClient) -> None:
            sizes[id(engine)] = engine.world_size()

        try:
            if not self._engines:
                raise RefitError("there is no engine to push to")
            check_given_once(self._engines)
            failures = on_each(self._engines, ask)
            if failures:
                raise of_engines(failures)
            check_different_servers(self._engines)
            self._rendezvous = Rendezvous(
                self.exchange.size + sum(sizes.values()),
                self._options.timeout_s,
                self._options.host,
                Registry(self.exchange.size).answer,
            )
        except Exception as error:
            engines = error.engines if isinstance(error, PartyFailedError) else ()
            raise PartyFailedError(f"cannot start the refit: {describe_error(error)}", engines) from error
        return self._rendezvous.invitation, [sizes[id(engine)] for engine in self._engines]

    def _describe(self) -> Held:
        """Describes what this rank holds."""
        held = describe_rank(self._chunks, self._vocab_size, self.exchange.rank, self._tp_group)
        self._live = LiveMemory(self._chunks, self._tp_group)
        if not self._first:  # every party receives these, so only one rank sends the whole model
            return Held({}, {}, held.manifest)
        config = build_config(held.family, held.manifest.storages[0].dtype)
        return Held(dict(config), dict(held.family.shapes()), held.manifest, self._options.allow_narrowing)

    def _memory(self) -> Memory:
        """The current weights. Looked up each time, because an optimizer may have moved them since :meth:`prepare`."""
        if self._live is None:
            raise RefitError("prepare() has not succeeded")
        return self._live.look_up()
