"""Creates further communicators over all or some ranks of a process group, without other ranks taking part.

They inherit the group's timeout and stream priority, which ``torch.distributed.new_group`` would set to defaults.

[Note: numbers of groups] Ranks that create a group without the rest of the world derive its name from the number of
groups that each belongs to. If these numbers differ, the ranks would wait for each other until the timeout, so they are
compared first. If ``init_process_group`` was given a device, NCCL creates groups by splitting the world's communicator,
in which all ranks of the world must take part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from etp.collectives.works import gather_objects

logger = logging.getLogger(__name__)


def sibling_group(group: dist.ProcessGroup, timeout_s: float | None, device: torch.device) -> dist.ProcessGroup:
    """Another process group of the same ranks in the same order, whose collectives do not queue behind the first one's.

    See [Note: numbers of groups]. Collective over ``group``.

    Args:
        group: the ranks of the new group.
        timeout_s: timeout of the new group's collectives in seconds; None uses that of ``group``.
        device: the device that its collectives run on.

    Returns:
        The new group. ``group`` itself, with a warning, if the ranks cannot create a group by themselves, and without
        one if its ranks are not in ascending order, which ``torch.distributed.new_group`` would not preserve.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        return group
    obstacle = obstacle_to_new_group(group, ranks)
    if obstacle:
        logger.warning(
            "reductions of the shard group of ranks %s share a communicator with gathers, and may wait for them: %s",
            ranks,
            obstacle,
        )
        return group
    return new_group(group, ranks, timeout_s, device)


def obstacle_to_new_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> str:
    """Why the ranks of ``group`` cannot create more groups by themselves; "" if they can. The same on all ranks.

    See [Note: numbers of groups]. Collective over ``group``.

    Args:
        group: the ranks to compare.
        ranks: global ranks of the new group that this rank would be in.
    """
    own = len(distributed_c10d._world.pg_names), _splits_the_world(ranks)
    seen = gather_objects(own, group, "comparison before another communicator is made")
    return _obstacle([count for count, _ in seen], any(splits for _, splits in seen))


def new_group(
    group: dist.ProcessGroup, ranks: Sequence[int], timeout_s: float | None, device: torch.device
) -> dist.ProcessGroup:
    """A group of some ranks of ``group``, after :func:`obstacle_to_new_group`. Collective over ``ranks``.

    Args:
        group: has the timeout and priority to inherit.
        ranks: global ranks in ascending order, this one included.
        timeout_s: timeout of the new group's collectives in seconds; None uses that of ``group``.
        device: the device that its collectives run on.
    """
    parent = group._get_backend(device).options
    timeout = parent._timeout if timeout_s is None else timedelta(seconds=timeout_s)
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, pg_options=_options(parent, timeout), use_local_synchronization=True
    )
    return made


def _splits_the_world(ranks: Sequence[int]) -> bool:
    """Whether a new group of these ranks would be split from a communicator that includes other ranks."""
    world = distributed_c10d._get_default_group()
    return world.bound_device_id is not None and len(ranks) < world.size()


def _obstacle(counts: list[int], splits: bool) -> str:
    """Why the ranks, which belong to ``counts`` process groups each, cannot create another one; "" if they can."""
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
    """Options of a new NCCL group with ``parent``'s stream priority; None for other backends, which have no streams."""
    if not hasattr(parent, "is_high_priority_stream"):
        return None
    options = type(parent)(is_high_priority_stream=parent.is_high_priority_stream)
    options._timeout = timeout
    return options
