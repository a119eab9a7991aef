"""One process in the role of a rank of a group: for code that asks for sizes and ranks, but runs no collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[dist.ProcessGroup]:
    """A default group of the "fake" backend, whose collectives return at once and move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
