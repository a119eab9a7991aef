"""Runs bodies over NCCL, whatever the session's device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.launch import run_distributed


def run_on_gpus[T](
    fn: Callable[..., T], world_size: int, args: tuple[Any, ...] = (), timeout_s: float = 60.0
) -> list[T]:
    """Run ``fn(rank, world_size, *args)`` on as many GPUs; see :func:`tests.support.launch.run_distributed`."""
    return run_distributed(fn, world_size, "nccl", timeout_s, args)
