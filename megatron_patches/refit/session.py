"""Pushes successive versions of a training run's weights into running engines."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.commit import Commit, Pauses
from megatron_patches.refit.engine_calls import EngineCalls
from megatron_patches.refit.engines import EngineClient, PauseMode, check_given_once
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.exchange import default_exchange, describe_error
from megatron_patches.refit.hf_config import build_config
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.parties.messages import Held
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.ports import Memory
from megatron_patches.refit.rendezvous import Rendezvous
from megatron_patches.refit.rendezvous_messages import Invitation
from megatron_patches.refit.source.live import LiveMemory, describe_rank, finish_parameter_gather
from megatron_patches.refit.transports.base import AUTO, TransportName, named_transport

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_LEAST_STAGING_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """Options of a session.

    Attributes:
        transport: how bytes travel; ``shm`` and ``cuda_ipc`` need trainer and engines on one host. None for the
            fastest that reaches all; see :func:`megatron_patches.refit.parties.choosing.choose`.
        staging_bytes: the most memory that packets take in one process, on either side; every link has two buffers.
            At least 4096; with buffers much smaller than the weights, preparation takes long.
        timeout_s: seconds that a step may take after its first party has finished.
        pause: what happens to requests in flight when the engines pause, which they do for the commit, or in place for
            the whole push.
        memory: where workers receive new weights: beside those that serve, or in their memory.
        host: address at which engines can reach this process.
        allow_narrowing: whether an engine may keep a weight in a type that cannot hold every value of the trainer's,
            where its own loader would round a checkpoint alike; otherwise :meth:`RefitSession.prepare` refuses.
    """

    transport: TransportName | None = None
    staging_bytes: int = 256 << 20
    timeout_s: float = 300.0
    pause: PauseMode = PauseMode.WAIT
    memory: MemoryMode = MemoryMode.BESIDE
    host: str = "127.0.0.1"
    allow_narrowing: bool = False

    def __post_init__(self) -> None:
        if self.staging_bytes < _LEAST_STAGING_BYTES:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes}; with less than {_LEAST_STAGING_BYTES}, planning the packets "
                "would take longer than any time-out"
            )
        if not 0 < self.timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be a positive number of seconds")
        # A program may give their names, as the flags do; which mode it is, is asked by identity.
        object.__setattr__(self, "transport", None if self.transport is None else named_transport(self.transport))
        object.__setattr__(self, "pause", PauseMode(self.pause))
        object.__setattr__(self, "memory", MemoryMode(self.memory))


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """The result of a push.

    Attributes:
        version: number of the weights that were pushed; they serve if the push waited for it.
        nbytes: bytes that all destinations together were sent.
        staged_bytes: the most memory that packets took at a time in any process, of either side; at most the
            option ``staging_bytes``.
        beside_bytes: the most memory that a worker made on its device for the new weights, beside those that serve.
        backup_bytes: the most memory of its host in which a worker keeps the weights that serve.
        seconds: duration of each phase on this rank: ``send`` until every byte was verified and, where the push
            waited for it, ``commit`` until all engines serve the new weights, and ``paused``, the longest that one of
            them began no request, from when it was asked to pause. Of ``send``, on the slowest rank, ``look_up``
            of the weights, and on the slowest worker ``allocate`` memory beside the weights that serve, ``move``
            (packing, the way and unpacking, which overlap, and what of ``look_up`` it has to wait for), and ``verify``.
    """

    version: int
    nbytes: int
    staged_bytes: int
    beside_bytes: int
    backup_bytes: int
    seconds: Mapping[str, float]


class RefitSession:
    """One training run and the engines that it feeds. Every method is collective over the trainer's ranks.

    Args:
        model_chunks: this rank's part: a GPTModel a virtual pipeline stage, wrapped or not.
        engines: on the first rank, the engines; elsewhere anything, such as an empty list.
        vocab_size: number of tokens; rows of the embedding beyond it are padding and are left out.
        options: how to push; the same on all ranks.
        group: ranks that hold the model, replicas included; None for all processes.
        tp_group: tensor-parallel group; None for Megatron's own.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        engines: Sequence[EngineClient],
        *,
        vocab_size: int,
        options: RefitOptions = RefitOptions(),
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        self._chunks, self._vocab_size = model_chunks, vocab_size
        self._options, self._tp_group = options, tp_group
        self._exchange = default_exchange(group)
        self._engines: Sequence[EngineClient] = engines if self._first else ()
        self._rendezvous: Rendezvous | None = None
        self._party: SourceParty | None = None
        self._assembly: Assembly | None = None
        self._live: LiveMemory | None = None
        self._commit: Commit | None = None  # of the version that was pushed last
        self._left: Commit | None = None  # of an earlier meeting with the engines
        self._workers = 0
        self._pauses = Pauses(options.pause)
        self._at_work = threading.Lock()
        self.version = -1  # that was pushed last

    @property
    def _first(self) -> bool:
        return self._exchange.rank == 0

    @property
    def _in_place(self) -> bool:
        return self._options.memory is MemoryMode.IN_PLACE

    def prepare(self) -> str:
        """Meets the engines and agrees with them on a plan. Call it again after an engine or a rank was lost.

        Returns:
            Digest of the plan.

        Raises:
            RefitError: on every rank, if any rank or engine failed; the engines serve what they served.
        """
        with self._alone():
            return self._prepare()

    def _prepare(self) -> str:
        self.close()
        self._on_all(self._let_end)
        invitation, sizes = self._invite()
        self._workers = sum(sizes)
        rank = self._exchange.rank
        self._assembly = Assembly(invitation, rank, f"trainer rank {rank} on {socket.gethostname()}:{os.getpid()}")
        device = str(next(self._chunks[0].parameters()).device)
        self._party = SourceParty(self._assembly, self._link_options(), device)
        calls = EngineCalls(self._assembly, "describing the trainer's weights")
        first = self._exchange.size
        for engine, size in zip(self._engines, sizes, strict=False):
            call = {"call": "join", **asdict(invitation), "first_party": first, **self._joining()}
            calls.start(engine, call, self._check_joined(engine, range(first, first + size)))
            first += size
        self._party.prepare(self._describe)
        self._on_all(partial(calls.finish, self._options.timeout_s))
        return self._party.plan.digest

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
        self.wait()
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
        self._pauses.begin_push()
        if self._in_place:
            self._on_all(partial(self._pause_all, assembly))
        started = time.perf_counter()
        calls = EngineCalls(assembly, f"sending version {version}")
        commit = self._make_commit(version, calls)
        receiving = {"call": "receive", "version": version, "step": assembly.next_step, "linked": party.linked}
        try:
            for engine in self._engines:
                calls.start(engine, receiving)
            moved = party.push(version, self._memory)
        except BaseException as error:
            # In place, workers have put the old weights back where they could not receive all.
            stuck = commit.give_up()
            if stuck:
                raise RefitError("; ".join([str(error), *stuck])) from error
            raise
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

    def wait(self) -> None:
        """Waits until all engines serve the version that was pushed last.

        Raises:
            RefitError: on every rank, if one of them did not take it.
        """
        self._wait()

    def end(self) -> None:
        """Like :meth:`wait` and :meth:`close`, for a rank that ends by itself: waits for no other rank.

        Raises:
            RefitError: on the first rank, if an engine did not take the version that was pushed last.
        """
        commit, reason = self._commit, None
        if commit is not None and self._first:
            reason = commit.reason()
        self.close()
        if commit is not None and reason is not None:
            raise RefitError(f"committing version {commit.version} failed: {reason}")

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
        found = (commit.reason(), commit.under_way, self._pauses.longest_s) if self._first else (None, False, 0.0)
        reason, under_way, paused_s = self._exchange.gather(found)[0]
        if not under_way:  # otherwise it would resume engines in the midst of the next push
            self._commit = None
        if reason is not None:
            raise RefitError(f"committing version {commit.version} failed: {reason}")
        return paused_s

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
        """Does ``work`` on every rank; a failure on the first is raised on all."""
        reason: str | None = None
        try:
            work()
        except RefitError as error:
            reason = describe_error(error)
        found = self._exchange.gather(reason)[0]
        if found is not None:
            raise RefitError(found)

    def _link_options(self) -> LinkOptions:
        return LinkOptions(
            transport=self._options.transport,
            staging_bytes=self._options.staging_bytes,
            sources=self._exchange.size,
            memory=self._options.memory,
        )

    def _joining(self) -> dict[str, int | str]:
        """What workers must know of the options, to come to the same as :meth:`_link_options`."""
        return {
            "sources": self._exchange.size,
            "transport": AUTO if self._options.transport is None else self._options.transport.value,
            "staging_bytes": self._options.staging_bytes,
            "memory": self._options.memory.value,
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
            RefitError: then, or if one cannot be paused.
        """
        gone = assembly.gone()
        if gone:
            raise RefitError("; ".join(gone))
        self._pauses.begin_all(self._engines)

    def _let_end(self) -> None:
        """Waits for a commit that :meth:`close` left under way: it still pauses and resumes engines.

        Raises:
            RefitError: if it does not end.
        """
        if self._left is not None:
            reason = self._left.reason()
            if self._left.under_way:
                raise RefitError(f"version {self._left.version}, which was pushed before: {reason}")
            self._left = None

    def _confirm(self, version: int) -> None:
        """Waits for the workers' word that they serve a version.

        Raises:
            RefitError: with the reasons of those that do not.
        """
        party = self._party  # another thread may close the session meanwhile
        if party is None:
            raise RefitError("the session was closed")
        reasons = party.collect_commits(version, self._workers, self._options.timeout_s)
        if reasons:
            raise RefitError("; ".join(reasons))

    def _invite(self) -> tuple[Invitation, list[int]]:
        """Opens the rendezvous on the first rank and tells all ranks; a failure there is raised on all."""
        answer: tuple[Invitation, list[int]] | str = ""
        if self._first:
            try:
                if not self._engines:
                    raise RefitError("there is no engine to push to")
                check_given_once(self._engines)
                sizes = [engine.world_size() for engine in self._engines]
                parties = self._exchange.size + sum(sizes)
                self._rendezvous = Rendezvous(parties, self._options.timeout_s, self._options.host)
                answer = self._rendezvous.invitation, sizes
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one; raised on all below
                answer = describe_error(error)
        found: tuple[Invitation, list[int]] | str = self._exchange.gather(answer)[0]
        if isinstance(found, str):
            raise RefitError(f"cannot start the refit: {found}")
        return found

    def _describe(self) -> Held:
        """What this rank holds."""
        held = describe_rank(self._chunks, self._vocab_size, self._exchange.rank, self._tp_group)
        self._live = LiveMemory(self._chunks, self._tp_group)
        if not self._first:  # every party is sent what each rank tells, so hundreds must not tell the whole model
            return Held({}, {}, held.manifest)
        config = build_config(held.family, held.manifest.storages[0].dtype)
        return Held(dict(config), dict(held.family.shapes()), held.manifest, self._options.allow_narrowing)

    def _memory(self) -> Memory:
        """The weights as they are now. Looked up anew: an optimizer may have moved them since :meth:`prepare`."""
        finish_parameter_gather(self._chunks)
        if self._live is None:
            raise RefitError("prepare() has not succeeded")
        return self._live.look_up()
