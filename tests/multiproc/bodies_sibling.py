"""Bodies of the tests of second communicators."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from etp.collectives.sibling import sibling_group
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
    kept = _Kept()
    logger = logging.getLogger("etp.collectives.sibling")
    logger.addHandler(kept)
    try:
        found = sibling_group(dist.group.WORLD, 20.0)  # type: ignore[arg-type]
    finally:
        logger.removeHandler(kept)
    total = torch.tensor(float(rank + 1), device=device())
    dist.all_reduce(total, group=found)
    return found is not dist.group.WORLD, kept.texts, float(total)
