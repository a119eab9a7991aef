"""Runs one function as several processes of this machine, and shows what the first of them finds, as it comes."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection


def run_ranks[Task, Found](
    body: Callable[[int, Task, Connection], None], ranks: int, task: Task, line: Callable[[Found], str]
) -> list[Found]:
    """Runs all ranks, and gives what the first has sent.

    Args:
        body: what a rank does, given its number, the task, and where to send what it has found.
        ranks: number of processes.
        task: what every rank is told.
        line: the row that is printed of each.

    Raises:
        RuntimeError: if a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    processes = [context.Process(target=body, args=(rank, task, sending)) for rank in range(ranks)]
    for process in processes:
        process.start()
    sending.close()
    found: list[Found] = []
    try:
        while True:
            found.append(receiving.recv())
            print(line(found[-1]), flush=True)
    except EOFError:
        pass  # all ranks have ended
    for process in processes:
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        raise RuntimeError(f"ranks {failed} failed")
    return found


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
