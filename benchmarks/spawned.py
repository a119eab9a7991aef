"""Runs a function in several processes of this machine and passes on the first one's results as they arrive."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_OTHERS_END_S = 15.0
_KILLED_END_S = 30.0
_LONGEST_REASON = 2000  # bytes that all ranks can write before anybody reads


def run_ranks[Task, Found](
    body: Callable[[int, Task, str, Connection], None],
    ranks: int,
    task: Task,
    take: Callable[[Found], None],
    limit_s: float,
) -> None:
    """Runs all ranks until they have ended; none outlives the call, whatever ends it.

    Args:
        body: what a rank does, given its number, the task, the URL at which ``init_process_group`` lets the ranks meet,
            and where to send what it has found.
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
    reasons: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        # A file: another process could take a port before a rank listens on it.
        meeting = (Path(folder) / "meeting").as_uri()
        processes = [
            context.Process(target=_run_rank, args=(body, rank, task, meeting, sending, telling))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            sending.close()
            telling.close()
            late = _take_all(processes, receiving, hearing, take, reasons, limit_s)
            failures = [
                f"rank {rank} ended with {reasons.get(rank, f'exit status {process.exitcode}')}"
                for rank, process in enumerate(processes)
                if rank in reasons or process.exitcode
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
    body: Callable[[int, Task, str, Connection], None],
    rank: int,
    task: Task,
    meeting: str,
    sending: Connection,
    telling: Connection,
) -> None:
    try:
        body(rank, task, meeting, sending)
    except Exception as error:
        telling.send((rank, f"{type(error).__name__}: {error}"[:_LONGEST_REASON]))
        raise


def _take_all[Found](
    processes: Sequence[BaseProcess],
    receiving: Connection,
    hearing: Connection,
    take: Callable[[Found], None],
    reasons: dict[int, str],
    limit_s: float,
) -> list[int]:
    """Takes what ranks send, and why they failed, until all have ended.

    Returns:
        The ranks that had not when the time was over, or a while after one had failed. One that has told why is not
        among them: its process may take long to end.
    """
    deadline = time.monotonic() + limit_s
    connections = [receiving, hearing]
    while (busy := _busy(processes, reasons)) or any(connection.poll() for connection in connections):
        sentinels = [processes[rank].sentinel for rank in busy]
        ready = wait([*connections, *sentinels], max(0.0, deadline - time.monotonic()))
        if not ready:
            return busy
        for connection in [connection for connection in connections if connection in ready]:
            try:
                found = connection.recv()
            except EOFError:
                connections.remove(connection)
                continue
            if connection is receiving:
                take(found)
            else:
                rank, reason = found
                reasons[rank] = reason
        if reasons or any(process.exitcode for process in processes):
            # The others may be waiting for it; what they say when they notice is worth a moment.
            deadline = min(deadline, time.monotonic() + _OTHERS_END_S)
    return []


def _busy(processes: Sequence[BaseProcess], reasons: Mapping[int, str]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.exitcode is None and rank not in reasons]


def _end(processes: Sequence[BaseProcess]) -> None:
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in alive:
        process.join(_KILLED_END_S)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, for programs that are told where to listen.

    It is below those that the system gives to whoever asks for any, so that few others will take it.
    """
    for port in random.sample(range(20_000, 32_000), 500):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise RuntimeError("none of 500 ports below 32000 is free")
