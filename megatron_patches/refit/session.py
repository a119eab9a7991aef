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
        exchange: of the ranks.
        version: number of the weights that were pushed last; -1 before.

    Args:
        model_chunks: this rank's part: a GPTModel a virtual pipeline stage, wrapped or not.
        engines: on the first rank, the engines; elsewhere anything, such as an empty list.
        vocab_size: number of tokens; rows of the embedding beyond it are padding and are left out.
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
        self._commit: Commit | None = None  # of the version that was pushed last
        self._left: Commit | None = None  # of an earlier meeting with the engines
        self._sizes: list[int] = []  # of the engines: how many workers each has
        self._calls: EngineCalls | None = None  # that engines are in, or were in last
        self._pauses = Pauses(self._options.pause)
        self._at_work = threading.Lock()
        self.version = -1  # that was pushed last

    @property
    def _first(self) -> bool:
        return self.exchange.rank == 0

    @property
    def _in_place(self) -> bool:
        return self._options.memory is MemoryMode.IN_PLACE

    def prepare(self, engines: Sequence[EngineClient] | None = None) -> str:
        """Meets the engines and agrees with them on a plan. Call it again after an engine or a rank was lost.

        Args:
            engines: on the first rank, the engines to push to from now on; None for those of before.

        Returns:
            Digest of the plan.

        Raises:
            PartyFailedError: on every rank, if any rank or engine failed; the engines serve what they served.
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
        """Has the engines join, and agrees with their workers."""
        rank = self.exchange.rank
        self._assembly = Assembly(invitation, rank, f"trainer rank {rank} on {socket.gethostname()}:{os.getpid()}")
        device = str(next(self._chunks[0].parameters()).device)
        self._party = SourceParty(self._assembly, self._link_options(), device)
        self._calls = calls = EngineCalls(self._assembly, DESCRIBING)
        for engine, parties in self._parties():
            call = {"call": "join", **asdict(invitation), "first_party": parties.start, **self._joining()}
            calls.start(engine, call, self._check_joined(engine, parties))
        self._party.prepare(self._describe, partial(self._have_recorded, self._assembly))

    def _have_recorded(self, assembly: Assembly) -> None:
        """Has the engines' workers look at their models, for which alone requests wait."""
        self._calls = calls = EngineCalls(assembly, RECORDING)
        for engine, _ in self._parties():
            calls.start(engine, {"call": "record"})

    def _parties(self) -> Iterator[tuple[EngineClient, range]]:
        """On the first rank, the engines with the numbers of their workers among the parties."""
        first = self.exchange.size
        for engine, size in zip(self._engines, self._sizes, strict=False):
            yield engine, range(first, first + size)
            first += size

    def push(self, version: int, *, wait: bool = True) -> PushReport:
        """Sends the weights as they are now and lets the engines serve them as ``version``.

        When it returns, the weights may change again.

        Args:
            version: number of the weights, from 0; later than any that this session has pushed.
            wait: whether to wait until all engines have committed it. Without it they commit while the caller goes
                on, and :meth:`wait`, which the next push begins with, raises what went wrong.

        Raises:
            RefitError: on every rank, if any rank or engine failed. Every engine serves the old weights or, where
                its own commit had succeeded, the new ones; none a mixture.
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
        finish_parameter_gather(self._chunks)  # here, where no rank can have failed yet, as it is collective
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
        """Has the engines receive a version; paused ones go on with the old one if it fails."""
        found: list[Moved] = []

        def send() -> None:
            for engine in self._engines:
                receive(engine)
            found.append(party.push(version, self._memory))

        try:
            self._on_all(send)
        except PartyFailedError as error:
            # In place, workers have put the old weights back where they could not receive all.
            stuck = self._on_first(commit.give_up)
            told = [str(error), *(describe_error(why) for _, why in stuck)]
            raise PartyFailedError("; ".join(told), {*error.engines, *(name for name, _ in stuck)}) from error
        (moved,) = found
        return moved

    def wait(self) -> None:
        """Waits until all engines serve the version that was pushed last.

        Raises:
            PartyFailedError: on every rank, if one of them did not take it.
        """
        with self._alone():
            self._wait()

    def end(self) -> None:
        """Like :meth:`wait` and :meth:`close`, for a rank that ends by itself: waits for no other rank.

        Raises:
            PartyFailedError: on the first rank, if an engine did not take the version that was pushed last.
        """
        commit = self._commit
        try:
            if commit is not None and self._first:
                commit.check()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves the engines as they are; a commit under way goes on."""
        if self._party is not None:
            self._party.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous, self._party, self._assembly = None, None, None
        self._left, self._commit = self._commit or self._left, None

    def _wait(self) -> float:
        """:meth:`wait`; for how many seconds an engine was paused."""
        commit = self._commit
        if commit is None:
            return 0.0
        failure, under_way, paused_s = self._on_first(partial(self._outcome, commit))
        if not under_way:  # otherwise it would resume engines in the midst of the next push
            self._commit = None
        if failure is not None:
            raise PartyFailedError(*failure)
        return paused_s

    def _outcome(self, commit: Commit) -> tuple[tuple[str, tuple[str, ...]] | None, bool, float]:
        """Why a commit failed, and on which engines; whether it is under way, and how long engines were paused."""
        try:
            commit.check()
        except PartyFailedError as error:
            return (str(error), error.engines), commit.under_way, 0.0
        return None, False, self._pauses.longest_s

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one thread at a time meet the engines or push: another's failure would resume them in the midst of it.

        Raises:
            RefitError: if another thread does.
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
        """Does ``work`` on every rank; raises on all if it fails on any."""
        on_all(self.exchange, work, self._blamed)

    def _on_first[T](self, work: Callable[[], T]) -> T:
        """Does ``work``, which may wait for engines, on the first rank; all get what it gives, or raises."""
        return on_first(self.exchange, work)

    def _blamed(self) -> list[str]:
        """On the first rank, names of the engines of which something has failed since they were met."""
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
        """What workers must know of the options, to come to the same as :meth:`_link_options`."""
        return {
            "sources": self.exchange.size,
            "transport": AUTO if self._options.transport is None else self._options.transport.value,
            "staging_bytes": self._options.staging_bytes,
            "memory": self._options.memory.value,
            "lease_s": self._options.lease_s,
        }

    def _check_joined(self, engine: EngineClient, parties: range) -> Callable[[], None] | None:
        """What raises where an engine has answered that it joins, and its workers have not."""
        if self._rendezvous is None:
            return None
        return partial(self._rendezvous.check_joined, parties, engine.name)

    def _make_commit(self, version: int, calls: EngineCalls) -> Commit:
        """The commit of a version that engines receive in ``calls``."""
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
        """Pauses all engines; none that workers have left, maybe for another trainer, whose pause would end with this.

        Raises:
            PartyFailedError: then, or if one cannot be paused.
        """
        gone = assembly.gone()
        if gone:
            raise PartyFailedError("; ".join(gone), self._blamed())
        self._pauses.begin_all(self._engines)

    def _let_end(self) -> None:
        """Waits for a commit that :meth:`close` left under way: it still pauses and resumes engines.

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
        """Waits for the workers' word that they serve a version.

        Raises:
            PartyFailedError: with the reasons of those that do not.
        """
        party = self._party  # another thread may close the session meanwhile
        if party is None:
            raise PartyFailedError("the session was closed")
        reasons = party.collect_commits(version, sum(self._sizes), self._options.timeout_s)
        if reasons:
            failed = {self.exchange.size + worker for worker in reasons}
            engines = [engine.name for engine, parties in self._parties() if failed.intersection(parties)]
            told = [f"engine worker {worker}: {reason}" for worker, reason in sorted(reasons.items())]
            raise PartyFailedError("; ".join(told), engines)

    def _open(self) -> tuple[Invitation, list[int]]:
        """Opens the rendezvous on the first rank, for so many workers as each engine has.

        Raises:
            PartyFailedError: if there is no engine, or one cannot be asked.
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
        """What this rank holds."""
        held = describe_rank(self._chunks, self._vocab_size, self.exchange.rank, self._tp_group)
        self._live = LiveMemory(self._chunks, self._tp_group)
        if not self._first:  # every party is sent what each rank tells, so hundreds must not tell the whole model
            return Held({}, {}, held.manifest)
        config = build_config(held.family, held.manifest.storages[0].dtype)
        return Held(dict(config), dict(held.family.shapes()), held.manifest, self._options.allow_narrowing)

    def _memory(self) -> Memory:
        """The weights as they are now. Looked up anew: an optimizer may have moved them since :meth:`prepare`."""
        if self._live is None:
            raise RefitError("prepare() has not succeeded")
        return self._live.look_up()
