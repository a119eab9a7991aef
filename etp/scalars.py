"""Scalars that the ranks of a shard group must agree on: gradient norms and the overflow flag."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from etp.collectives.works import all_gather_single

if TYPE_CHECKING:
    from etp.routes import Routes


def norms(
    routes: Routes, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, norm_type: float
) -> list[torch.Tensor]:
    """Norms of tensors that are distributed over the ranks of ``group``, equal on all of them. Collective.

    Args:
        routes: waits for the collective.
        parts: this rank's part of each tensor, all on one device; without padding, so possibly empty.
        group: the ranks that hold the parts.
        norm_type: p of the p-norm; inf and -inf for the largest and the smallest magnitude, 0 for the number of
            nonzero elements.

    Returns:
        One 0-dim tensor per part, in fp64 if any part is fp64, else in fp32.
    """
    wide = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    filled = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(filled, norm_type, dtype=wide) if filled else ())
    # The neutral element for an empty part: 0 for sums and maxima, inf for minima.
    nothing = parts[0].new_full((), 0.0 if norm_type >= 0 else float("inf"), dtype=wide)
    own = torch.stack([next(found) if part.numel() else nothing for part in parts])
    everyone = gathered(routes, own, group, "all-gather of gradient norms")
    if norm_type == 0:
        return list(everyone.sum(dim=0).unbind())
    return list(torch.linalg.vector_norm(everyone, norm_type, dim=0).unbind())


def gathered(routes: Routes, own: torch.Tensor, group: dist.ProcessGroup, label: str) -> torch.Tensor:
    """All-gather ``own``, ``[n]``, over ``group`` into ``[ranks, n]``. Collective."""
    size = dist.get_world_size(group)
    everyone = own.new_empty(size * own.numel())
    gather = partial(all_gather_single, everyone, own.contiguous(), group=group, async_op=True)
    routes.wait_for(gather, group, label, own.device.type == "cpu")
    return everyone.view(size, own.numel())


def spread(routes: Routes, flag: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """Set ``flag`` (one element; nonzero means set) on every rank that shares a group with a rank that set it.

    The groups are reduced one after the other, so a flag that one group sets is also spread over later groups.
    Collective.
    """
    label = "all-reduce of the overflow flag"
    for group in groups:
        reduce = partial(dist.all_reduce, flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
        routes.wait_for(reduce, group, label, flag.device.type == "cpu")
