"""Runs a function in several processes of this machine and passes on the first one's results as they arrive."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

_OTHERS_END_S = 15.0
_KILLED_END_S = 30.0
_LONGEST_REASON = 2000  # bytes that all ranks can write before anybody reads


def run_ranks[Task, Found](
    body: Callable[[int, Task, Connection], None],
    ranks: int,
    task: Task,
    take: Callable[[Found], None],
    limit_s: float,
) -> None:
    """Runs all ranks until they have ended; none outlives the call, whatever ends it.

    Args:
        body: what a rank does, given its number, the task, and where to send what it has found.
        ranks: number of processes.
        task: settings that every rank gets.
        take: called with what the first rank has sent, at once: what was found before a failure is not lost.
        limit_s: seconds that all may take.

    Raises:
        RuntimeError: if a rank failed, which ends the others, with its reason, or if the time is over.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    hearing, telling = context.Pipe(duplex=False)
    processes = [context.Process(target=_run_rank, args=(body, rank, task, sending, telling)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        sending.close()
        telling.close()
        late = _take_all(processes, receiving, take, limit_s)
        reasons = dict(_told(hearing))
        failures = [
            f"rank {rank} ended with {reasons.get(rank, f'exit status {code}')}"
            for rank, code in _failed(processes).items()
        ]
    finally:
        _end(processes)
        receiving.close()
        hearing.close()
    if late:
        when = f"{_OTHERS_END_S:g} s later" if failures else f"after {limit_s:g} s"
        failures.append(f"ranks {late} were still busy {when}")
    if failures:
        raise RuntimeError(", ".join(failures))


def _run_rank[Task](
    body: Callable[[int, Task, Connection], None], rank: int, task: Task, sending: Connection, telling: Connection
) -> None:
    try:
        body(rank, task, sending)
    except Exception as error:
        telling.send((rank, f"{type(error).__name__}: {error}"[:_LONGEST_REASON]))
        raise


def _told(hearing: Connection) -> Iterator[tuple[int, str]]:
    """The ranks that have told why they failed, and what they told."""
    with contextlib.suppress(EOFError):
        while hearing.poll():
            yield hearing.recv()


def _take_all[Found](
    processes: Sequence[BaseProcess], receiving: Connection, take: Callable[[Found], None], limit_s: float
) -> list[int]:
    """Returns the ranks that have not ended when the time is over or one has failed; none once all have ended."""
    deadline = time.monotonic() + limit_s
    closed = False
    while (busy := _busy(processes)) or (not closed and receiving.poll()):
        sentinels = [processes[rank].sentinel for rank in busy]
        ready = wait(sentinels if closed else [receiving, *sentinels], max(0.0, deadline - time.monotonic()))
        if receiving in ready:
            try:
                take(receiving.recv())
            except EOFError:
                closed = True
        elif _failed(processes):
            # The others may be waiting for it; what they say when they notice is worth a moment.
            deadline = min(deadline, time.monotonic() + _OTHERS_END_S)
        if not ready:
            return busy
    return []


def _busy(processes: Sequence[BaseProcess]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.exitcode is None]


def _failed(processes: Sequence[BaseProcess]) -> dict[int, int]:
    return {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}


def _end(processes: Sequence[BaseProcess]) -> None:
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in alive:
        process.join(_KILLED_END_S)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
