"""A second communicator over the ranks of a process group, made by these ranks alone.

It takes from the group what a user may have chosen for it, its time-out and the priority of its stream, which
``torch.distributed.new_group`` would set to torch's defaults.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)


def sibling_group(group: dist.ProcessGroup, timeout_s: float | None, device: torch.device) -> dist.ProcessGroup:
    """Another process group of the same ranks in the same order, so that its collectives need not queue behind others.

    Ranks that make a group without the rest of the world name it by how many groups each belongs to, and would wait for
    each other until the time-out where these numbers differ. So they are compared first. Where ``init_process_group``
    was told a device, NCCL makes groups by splitting the world's communicator, in which all of the world take part.
    Collective over ``group``.

    Args:
        group: whose ranks take part.
        timeout_s: of the new group's collectives; None takes that of ``group``.
        device: where its collectives run.

    Returns:
        The new group; ``group`` itself, with a warning, where ranks could not find each other, or where ``group`` has
        its ranks in another order than ``torch.distributed.new_group`` would give them.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        return group
    seen: list[Any] = [None] * len(ranks)
    dist.all_gather_object(seen, (len(distributed_c10d._world.pg_names), _splits_the_world(ranks)), group=group)
    obstacle = _obstacle([count for count, _ in seen], any(splits for _, splits in seen))
    if obstacle:
        logger.warning(
            "reductions of the shard group of ranks %s share a communicator with gathers, and may wait for them: %s",
            ranks,
            obstacle,
        )
        return group
    parent = group._get_backend(device).options
    timeout = parent._timeout if timeout_s is None else timedelta(seconds=timeout_s)
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, pg_options=_options(parent, timeout), use_local_synchronization=True
    )
    return made


def _splits_the_world(ranks: list[int]) -> bool:
    """Whether a new group of these ranks would be split from a communicator that other ranks belong to as well."""
    world = distributed_c10d._get_default_group()
    return world.bound_device_id is not None and len(ranks) < world.size()


def _obstacle(counts: list[int], splits: bool) -> str:
    """Why ranks that belong to so many process groups each cannot make another by themselves; "" if they can."""
    if len(set(counts)) > 1:
        return (
            f"these ranks belong to different numbers of process groups ({counts}), so they cannot make another one. "
            "Call torch.distributed.new_group alike on all of them"
        )
    if splits:
        return (
            "init_process_group was given a device_id, so that another group of them would have to be split from the "
            "world's communicator by all of its ranks. Leave device_id out, and call torch.cuda.set_device instead"
        )
    return ""


def _options(parent: Any, timeout: timedelta) -> Any:
    """Options of a new NCCL group, of the priority of ``parent``'s; None for other backends, which have no streams."""
    if not hasattr(parent, "is_high_priority_stream"):
        return None
    options = type(parent)(is_high_priority_stream=parent.is_high_priority_stream)
    options._timeout = timeout
    return options
