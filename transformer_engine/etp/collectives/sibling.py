"""A second communicator over the ranks of a process group, made by these ranks alone."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)


def sibling_group(group: dist.ProcessGroup, timeout_s: float | None) -> dist.ProcessGroup:
    """Another process group of the same ranks in the same order, so that its collectives need not queue behind others.

    Ranks that make a group without the rest of the world name it by how many groups each belongs to, and would wait for
    each other until the time-out where these numbers differ. So they are compared first. Collective over ``group``.

    Args:
        group: whose ranks take part.
        timeout_s: of the new group's collectives; None takes torch's default.

    Returns:
        The new group; ``group`` itself, with a warning, where ranks could not find each other, or where ``group`` has
        its ranks in another order than ``torch.distributed.new_group`` would give them.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        return group
    counts: list[int] = [0] * len(ranks)
    dist.all_gather_object(counts, len(distributed_c10d._world.pg_names), group=group)
    if len(set(counts)) > 1:
        logger.warning(
            "reductions of the shard group of ranks %s share a communicator with gathers, and may wait for them: these "
            "ranks belong to different numbers of process groups (%s), so they cannot make another one. Call "
            "torch.distributed.new_group alike on all of them",
            ranks,
            counts,
        )
        return group
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return made
