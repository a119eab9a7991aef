"""Scalars that the ranks of a shard group must agree on: gradient norms and the overflow flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from etp.collectives.works import WorkLine, reported


class GroupScalars:
    """Combines numbers over shard groups.

    Args:
        timeout_s: seconds to wait for a collective; None uses the process group's timeout.
        watch: called with the group and a description of each collective once it is enqueued.
    """

    def __init__(self, timeout_s: float | None, watch: Callable[[dist.ProcessGroup, str], None]) -> None:
        self._timeout_s = timeout_s
        self._watch = watch
        self._line = WorkLine()

    def norms(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, norm_type: float) -> list[torch.Tensor]:
        """Norms of tensors that are distributed over the ranks of ``group``, equal on all of them. Collective.

        Args:
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
        everyone = self.gathered(own, group, "all-gather of gradient norms")
        if norm_type == 0:
            return list(everyone.sum(dim=0).unbind())
        return list(torch.linalg.vector_norm(everyone, norm_type, dim=0).unbind())

    def gathered(self, own: torch.Tensor, group: dist.ProcessGroup, label: str) -> torch.Tensor:
        """All-gather ``own``, ``[n]``, over ``group`` into ``[ranks, n]``. Collective."""
        size = dist.get_world_size(group)
        everyone = own.new_empty(size * own.numel())
        with reported(label, group):
            work = dist.all_gather_into_tensor(everyone, own.contiguous(), group=group, async_op=True)
            self._line.wait(work, self._timeout_s, keep=own.device.type == "cpu")
        self._watch(group, label)
        return everyone.view(size, own.numel())

    def spread(self, flag: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        """Set ``flag`` (one element; nonzero means set) on every rank that shares a group with a rank that set it.

        The groups are reduced one after the other, so a flag that one group sets is also spread over later groups.
        Collective.
        """
        label = "all-reduce of the overflow flag"
        for group in groups:
            with reported(label, group):
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
                self._line.wait(work, self._timeout_s, keep=flag.device.type == "cpu")
            self._watch(group, label)
