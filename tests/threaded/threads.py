"""Runs one function as N ranks in N threads, over torch's in-process "threaded" backend.

That backend has what the engine needs (``all_gather_into_tensor``, ``all_to_all_single``, ``all_reduce``,
``all_gather_object``); it moves the data when the last rank has come, so nothing is ever under way. What overlaps is
tested on real backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

LIMIT_S = 120.0


def run_threads[T](fn: Callable[..., T], world_size: int, *args: Any) -> list[T]:
    """``fn(rank, world_size, *args)`` on every rank; what each returned.

    Raises:
        RuntimeError: with the first failure as its cause, or if a thread does not end in time.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    store = dist.HashStore()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()  # its groups are thread-local and end with their threads

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = fn(rank, world_size, *args)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody above it to catch even SystemExit
            failures.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        if failures:
            raise RuntimeError(f"{len(failures)} of {world_size} ranks failed: {failures[0]!r}") from failures[0]
        if any(thread.is_alive() for thread in threads):
            raise RuntimeError(f"ranks did not end within {LIMIT_S} s")
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    return [results[rank] for rank in range(world_size)]
