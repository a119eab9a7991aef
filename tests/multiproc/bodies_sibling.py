"""Bodies of the tests of second communicators."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from etp.collectives.sibling import _splits_the_world, sibling_group
from tests.support.launch import device


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def makes_another_group(rank: int, world_size: int, alike: bool) -> tuple[bool, list[str], float]:
    """Whether the group is another one, what was said, and a sum over it; ``alike`` says how many groups ranks have."""
    if not alike:
        dist.new_group([0])  # only rank 0 belongs to it
    world = dist.group.WORLD
    assert world is not None
    return _made_of(world, rank)


def _made_of(group: dist.ProcessGroup, rank: int) -> tuple[bool, list[str], float]:
    kept = _Kept()
    logger = logging.getLogger("etp.collectives.sibling")
    logger.addHandler(kept)
    try:
        found = sibling_group(group, 20.0, device())
    finally:
        logger.removeHandler(kept)
    total = torch.tensor(float(rank + 1), device=device())
    dist.all_reduce(total, group=found)
    return found is not group, kept.texts, float(total)


def split_from_the_world(rank: int, world_size: int) -> tuple[bool, list[str], float] | None:
    """What is made of all ranks but the first, one of which gave ``init_process_group`` a device."""
    part = dist.new_group(list(range(1, world_size)))
    world = dist.group.WORLD
    assert world is not None
    if rank == 0:
        return None
    if rank == 1:
        world.bound_device_id = torch.device("cuda", 0)
    assert not _splits_the_world(list(range(world_size))), "all ranks of the world's communicator take part"
    return _made_of(part, rank)


def time_outs(rank: int, world_size: int) -> list[float]:
    """Seconds that siblings of a group wait: of their own, and where nobody has said."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=77))
    made = [sibling_group(group, timeout_s, device()) for timeout_s in (20.0, None)]
    dist.all_reduce(torch.zeros(1, device=device()), group=made[-1])  # another rank may still connect to this one
    return [each._get_backend(device()).options._timeout.total_seconds() for each in made]
