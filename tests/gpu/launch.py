"""Runs bodies over NCCL, in worker processes that only ever run with one number of ranks.

torch numbers exchanges of symmetric memory in each process, so workers that shared a body of two ranks cannot run one
of four with workers that did not.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

from tests.support.launch import RanksFailedError, WorkerPool


@functools.cache
def _pool(world_size: int) -> WorkerPool:
    del world_size
    pool = WorkerPool()
    atexit.register(pool.close)
    return pool


def run_on_gpus[T](
    fn: Callable[..., T], world_size: int, args: tuple[Any, ...] = (), timeout_s: float = 60.0
) -> list[T]:
    """Run ``fn(rank, world_size, *args)`` on as many GPUs; see :func:`tests.support.launch.run_distributed`."""
    pool = _pool(world_size)
    try:
        return pool.run(fn, world_size, "nccl", timeout_s, args)
    except RanksFailedError:
        # Some ranks may have got further than others.
        pool.close()
        raise
