"""Runs one function as N ranks, in a pool of worker processes that lives as long as the test session.

::

    from tests.support.launch import device, run_distributed

    def body(rank: int, world_size: int, rows: int) -> float:          # at module level
        x = torch.full((rows,), rank + 1.0, device=device())
        dist.all_reduce(x)
        return x.sum().item()

    def test_sum() -> None:
        assert run_distributed(body, world_size=2, args=(4,)) == [12.0, 12.0]

Importing torch costs seconds and running a body milliseconds, so the workers are started once and kept. A call
gives its ranks a process group of their own, and takes it down afterwards. Whatever else a body changes in its
process (environment, patched modules, Megatron's global state) stays for the next body: undo it there, or ask
for ``fresh=True``, which runs the body in new processes that end with it. :func:`run_megatron` is for bodies that build
Megatron's models: they find it imported and patched.

``pytest --device cuda`` runs the same bodies over NCCL, rank r on GPU r; tests with more ranks than there are GPUs are
skipped. ``--ranks-per-gpu 2`` lets GPUs take several ranks in such tests (:func:`benchmarks.shared_gpus.sharing_gpus`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.prepared import patched_megatron, template_of, torch_alone, variables_of
from tests.support.protocol import BodyReference, Done, Failed, Job
from tests.support.template import Process
from tests.support.worker import answer_jobs

WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT_S = 180.0
"""How long a new worker may take to import torch; generous, for a machine that is busy with other things."""

DEVICE_VARIABLE = "ETP_TESTS_DEVICE"
"""Says to this process and to its workers which devices the session's bodies run on: "cpu" or "cuda"."""

RANKS_PER_GPU_VARIABLE = "ETP_TESTS_RANKS_PER_GPU"
"""Says to this process how many ranks a GPU may take."""

TRANSPORT_VARIABLE = "ETP_TESTS_TRANSPORT"
"""Says to the workers which transport a body's :class:`etp.EtpConfig` has if the body names none."""

STRAGGLER_S = 10.0
"""How long the other ranks may take to end by themselves once one has failed."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended.

    Attributes:
        rank: the rank.
        kind: name of the exception's class; "exit" for a process that died, "hang" for one that did not answer.
        report: the traceback on that rank, or what is known otherwise.
    """

    rank: int
    kind: str
    report: str


class RanksFailedError(Exception):
    """A body did not return on every rank. The text holds each failed rank's traceback, first failure first."""

    def __init__(self, body: str, world_size: int, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        parts = [f"{body} failed on {len(failures)} of {world_size} ranks, first on rank {failures[0].rank}"]
        parts += [f"--- rank {f.rank} ({f.kind}) ---\n{f.report.rstrip()}" for f in failures]
        super().__init__("\n".join(parts))


class RanksHungError(RanksFailedError):
    """A body did not return in time. The text shows where each rank stood."""


@dataclass
class _Worker:
    process: Process
    connection: Connection
    stacks: Path

    @classmethod
    def start(cls, folder: Path, number: int, prepare: Callable[[], None], more: Mapping[str, str]) -> _Worker:
        """Start a process; it is usable once :meth:`await_start` has returned."""
        ours, theirs = socket.socketpair()
        stacks = folder / f"stacks-{number}.txt"
        template, variables = template_of(prepare), {**variables_of(prepare), **more}
        process: Process
        with theirs:
            if template is not None:
                handed = [theirs.fileno()]
                process = template.start(
                    answer_jobs, (str(stacks),), variables=variables, descriptors=handed, leads_session=True
                )
            else:
                command = [sys.executable, str(WORKER), str(theirs.fileno()), str(stacks), str(os.getpid())]
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | variables,
                    start_new_session=True,
                )
        connection = Connection(ours.detach())
        connection.send([entry or str(Path.cwd()) for entry in sys.path])
        return cls(process, connection, stacks)

    def await_start(self) -> None:
        """Wait until the process has imported torch."""
        if not self.connection.poll(START_TIMEOUT_S):
            raise TimeoutError(f"a worker process did not start within {START_TIMEOUT_S:.0f} s")
        try:
            self.connection.recv()
        except EOFError:
            raise RuntimeError(f"a worker process ended with code {self.process.wait()} before it was ready") from None

    def where_it_stands(self) -> str:
        """The Python stacks of a worker that does not answer."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not (self.stacks.exists() and self.stacks.stat().st_size):
            time.sleep(0.05)
        time.sleep(0.1)
        return self.stacks.read_text() if self.stacks.exists() else "(it did not say where it stands)"

    def kill(self) -> None:
        """End it, and what it has started: Megatron's writer of checkpoints would live on."""
        with contextlib.suppress(ProcessLookupError):  # not if it ended with all of them, or has hardly begun
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()


@dataclass
class WorkerPool:
    """Worker processes, the first N of which run a body with N ranks.

    Args:
        prepare: what they have run before; one of :mod:`tests.support.prepared`.
        variables: environment variables of theirs, on top of this process's and of those that belong to ``prepare``.
    """

    prepare: Callable[[], None] = torch_alone
    variables: Mapping[str, str] = field(default_factory=dict)
    _workers: list[_Worker] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _calls: Iterator[int] = field(default_factory=itertools.count)

    def run[T](
        self, fn: Callable[..., T], world_size: int, backend: str | None, timeout_s: float, args: tuple[Any, ...]
    ) -> list[T]:
        """Run ``fn(rank, world_size, *args)`` on every rank; see :func:`run_distributed`."""
        body = BodyReference.of(fn)
        workers = self._ready(world_size)
        store = str(self._files() / f"store-{next(self._calls)}")
        arguments = pickle.dumps(args)
        for rank, worker in enumerate(workers):
            worker.connection.send(Job(body, rank, world_size, backend, timeout_s, store, arguments))
        results, failures = self._collect(workers, timeout_s)
        if failures:
            # Ranks that have got differently far number their next process groups differently. Copies cost nothing.
            if any(f.kind in ("exit", "hang") for f in failures) or template_of(self.prepare) is not None:
                self.close()
            kind = RanksHungError if all(f.kind == "hang" for f in failures) else RanksFailedError
            raise kind(f"{body.module}:{body.qualname}", world_size, failures)
        return [pickle.loads(results[rank]) for rank in range(world_size)]

    def close(self) -> None:
        """End every worker. The pool can be used again; it then starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _files(self) -> Path:
        """The folder of these workers' files."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.name)

    def _ready(self, world_size: int) -> list[_Worker]:
        """At least ``world_size`` workers that have imported torch."""
        if any(worker.process.poll() is not None for worker in self._workers):
            self.close()
        new = [
            _Worker.start(self._files(), number, self.prepare, self.variables)
            for number in range(len(self._workers), world_size)
        ]
        self._workers += new
        try:
            for worker in new:
                worker.await_start()
        except BaseException:
            self.close()
            raise
        return self._workers[:world_size]

    def _collect(self, workers: list[_Worker], timeout_s: float) -> tuple[dict[int, bytes], list[RankFailure]]:
        """Wait for every rank; after the first failure the others have a short while to end as well."""
        results: dict[int, bytes] = {}
        failed: list[tuple[float, RankFailure]] = []
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                answer = _receive(workers[rank])
                if isinstance(answer, Done):
                    results[rank] = answer.value
                else:
                    failed.append((answer.at, RankFailure(rank, answer.kind, answer.report)))
            if failed:
                deadline = min(deadline, time.monotonic() + STRAGGLER_S)
        hung = [
            RankFailure(rank, "hang", f"no answer in time; it stands at\n{workers[rank].where_it_stands()}")
            for rank in waiting.values()
        ]
        return results, [failure for _, failure in sorted(failed, key=lambda item: item[0])] + hung


def _receive(worker: _Worker) -> Done | Failed:
    try:
        answer = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.wait()
        crash = worker.stacks.read_text() if worker.stacks.exists() else ""
        return Failed("exit", f"the process ended with exit code {worker.process.returncode}\n{crash}", at=0.0)
    if not isinstance(answer, Done | Failed):
        raise TypeError(f"a worker answered with {answer!r}")
    return answer


@functools.cache
def session_pool(only_ranks: int | None = None, prepare: Callable[[], None] = torch_alone) -> WorkerPool:
    """A pool that all tests of a session share; it ends with the session.

    Args:
        only_ranks: a pool that runs bodies with this number of ranks only. torch numbers exchanges of symmetric memory
            in each process, so workers that shared a body of two ranks cannot run one of four with workers that did
            not.
        prepare: what its workers have run before.
    """
    del only_ranks
    pool = WorkerPool(prepare)
    atexit.register(pool.close)
    return pool


def on_gpus() -> bool:
    """Whether this session runs its bodies on GPUs."""
    return os.environ.get(DEVICE_VARIABLE) == "cuda"


def session_backend() -> str:
    """The backend of this session's bodies."""
    return "nccl" if on_gpus() else "gloo"


def run_distributed[T](
    fn: Callable[..., T],
    world_size: int,
    backend: str | None = "session",
    timeout_s: float = 120.0,
    args: tuple[Any, ...] = (),
    *,
    fresh: bool = False,
    prepared: Callable[[], None] = torch_alone,
) -> list[T]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` processes and return what each rank returned.

    Args:
        fn: a function at module level (or a static method of a class there); workers find it by file and name.
        world_size: number of ranks.
        backend: "gloo" or "nccl" for a default process group of that backend, "session" for the one that
            ``pytest --device`` names; with "nccl", rank r's current device is ``cuda:r``. None leaves the set-up of
            process groups to the body.
        timeout_s: seconds until the body counts as hung. A collective fails earlier, at 80 % of it, with a
            traceback of its own.
        args: further arguments; pickled once, so every rank gets a copy of the same. Tensors must be on the CPU.
        fresh: run in new processes instead of the session's.
        prepared: what the processes have run before, one of :mod:`tests.support.prepared`.

    Returns:
        One value per rank, in rank order, pickled across; keep tensors on the CPU.

    Raises:
        RanksFailedError: the body raised, or its process died, on some rank.
        RanksHungError: no rank failed but some did not return in time. The processes are killed.
    """
    backend = session_backend() if backend == "session" else backend
    over_nccl = backend is not None and "nccl" in backend
    if over_nccl:
        skip_without_gpus(world_size)
    pool = WorkerPool(prepared) if fresh else session_pool(world_size if over_nccl else None, prepared)
    try:
        return pool.run(fn, world_size, backend, timeout_s, args)
    except RanksFailedError:
        if over_nccl:
            pool.close()  # some ranks may have got further than others, with symmetric memory too
        raise
    finally:
        if fresh:
            pool.close()


def run_megatron[T](
    fn: Callable[..., T],
    world_size: int,
    backend: str | None = "session",
    timeout_s: float = 120.0,
    args: tuple[Any, ...] = (),
    *,
    fresh: bool = False,
) -> list[T]:
    """:func:`run_distributed` in processes that have imported and patched Megatron, apart from all others."""
    return run_distributed(fn, world_size, backend, timeout_s, args, fresh=fresh, prepared=patched_megatron)


def skip_without_gpus(count: int) -> None:
    """Skip the test that calls this unless there are ``count`` CUDA devices, or ranks may share them."""
    if rank_places() < count:
        import pytest

        pytest.skip(f"needs {count} CUDA devices")


def rank_places() -> int:
    """How many ranks with a CUDA device there may be."""
    return torch.cuda.device_count() * int(os.environ.get(RANKS_PER_GPU_VARIABLE, "1"))


def device() -> torch.device:
    """The device of this rank's body: the current CUDA device where bodies run on GPUs, else the CPU."""
    if dist.is_initialized() and re.search("nccl|cuda", dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
