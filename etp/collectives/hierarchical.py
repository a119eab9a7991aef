"""Transport for groups that span hosts: between hosts first, then within each host, so each byte enters a host once.

With H hosts of L ranks, the shards of rank i of every host are *column* i of a weight. A gather has two steps: rank i
of each host gathers column i from its H - 1 counterparts over the network, and then the L ranks of a host exchange
their columns. A host thus receives each shard of other hosts once, spread over the network interfaces of all its GPUs.
A reduction is the mirror image: each rank of a host sums one column of that host's gradients, and then each column is
summed over the hosts. (DeepSpeed's ZeRO++ and Horovod call such collectives hierarchical.)

Each step is a collective of another transport: ``c10d`` between hosts; within a host whatever serves the host's ranks.
The rows of one host are one block of the weight, because ranks are numbered host by host. The step within the host can
therefore treat a weight as a stack of H weights, one for each host, and neither step knows about the other.

Inside a CUDA graph, ``c10d``'s collectives over the whole group run instead, and sums are in its order: the flags of
staged shards order gathers on one stream, but not those of a graph that is replayed beside it (see [Note: capture] in
``etp/collectives/copy_engine.py``).

With fp32 accumulation, the sums within hosts travel in fp32, so that the result is rounded once. It is the sum over
each host's ranks in rank order, summed in the order of the hosts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.collectives.sibling import obstacle_to_new_group
from etp.collectives.works import gather_objects
from etp.config import EtpConfig
from etp.stack import Stack
from etp.streams import InFlight

HOST_VARIABLE = "NCCL_HOSTID"
"""NCCL's environment variable for the identity of a host, instead of its name."""


def hosts_of(group: dist.ProcessGroup) -> list[str]:
    """The host of each rank of the group. Collective."""
    own = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    return gather_objects(own, group, "exchange of the ranks' hosts")


def parts_of(group: dist.ProcessGroup, hosts: int) -> tuple[list[int], list[int]]:
    """The group's ranks on this host, and the ranks at this rank's position on every host; as global ranks.

    Every host has equally many ranks of the group.
    """
    ranks = dist.get_process_group_ranks(group)
    per_host = len(ranks) // hosts
    host, column = divmod(dist.get_rank(group), per_host)
    return ranks[host * per_host : (host + 1) * per_host], ranks[column::per_host]


def obstacle_to_two_steps(group: dist.ProcessGroup, hosts: Sequence[str]) -> str:
    """Why a group cannot be served in two steps; "" if it can. The same on all ranks. Collective.

    Args:
        group: the shard group.
        hosts: the host of each of its ranks.
    """
    counts = [len(list(ranks)) for _, ranks in groupby(hosts)]
    if len(counts) > len(set(hosts)):
        return f"its ranks are not numbered host by host but are on {', '.join(hosts)}"
    if len(set(counts)) > 1:
        return f"it has {counts} ranks on {', '.join(dict.fromkeys(hosts))}, not equally many"
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        return f"its ranks are not in ascending order but {ranks}"
    parts = parts_of(group, len(counts))
    return next(filter(None, (obstacle_to_new_group(group, part) for part in parts)), "")


class HierarchicalTransport(C10dTransport):
    """See the module's docstring. Only gathers and reductions take two steps, and none does in a CUDA graph.

    Args:
        group: the shard group, whose ranks are numbered host by host.
        within: moves shards between the ranks of this host.
        between: moves shards between the ranks at this rank's position on every host.
        hosts: number of hosts.
        config: see :class:`etp.collectives.c10d.C10dTransport`.
        device: where the weights are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        within: Transport,
        between: C10dTransport,
        hosts: int,
        config: EtpConfig,
        device: torch.device,
    ) -> None:
        super().__init__(group, config, device=device)
        self._within, self._between = within, between
        self._hosts = hosts

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        """See :class:`etp.collectives.base.Transport`. On a CPU, the call blocks until the first step is done."""
        if self.capturing:
            return super().all_gather(outputs, shards, label)
        if self.order is not None:
            self.order.record(label)
        blocks = self._by_host(outputs)
        staged = self._within.stage(blocks)
        # NCCL and the copies are ordered by the calling stream: join() waits for gloo only.
        self._between.all_gather(self._columns(staged, shards), shards, f"{label} between hosts").join()
        return self._within.all_gather(blocks, staged, f"{label} within the host")

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        """See :class:`etp.collectives.base.Transport`. On a CPU, the call blocks until the first step is done."""
        if self.capturing:
            return super().reduce_scatter(wgrads, sinks, divisor, label, accumulate=accumulate)
        if self.order is not None:
            self.order.record(label)
        blocks = self._by_host(wgrads)
        sums = self._sums(wgrads, sinks)
        self._within.reduce_scatter(blocks, sums, 1, f"{label} within the host", accumulate=False).join()
        columns = self._columns(sums, sinks)
        return self._between.reduce_scatter(columns, sinks, divisor, f"{label} between hosts", accumulate=accumulate)

    def expect(self, end: Any, label: str) -> None:
        """See :class:`etp.collectives.base.Transport`. What moves shards within a host has a timeout of its own."""
        super().expect(end, label)
        if not self.capturing:
            self._within.expect(end, label)

    def nbytes(self) -> dict[str, int]:
        """See :class:`etp.collectives.base.Transport`."""
        return self._within.nbytes()

    def _by_host(self, whole: Stack) -> Stack:
        """The part of each tensor that belongs to each host, flat; ordered by tensor, then by host."""
        return whole.derived(
            self, "by host", lambda: Stack([part for tensor in whole for part in tensor.view(self._hosts, -1)])
        )

    def _columns(self, parts: Stack, shards: Stack) -> Stack:
        """``parts``, one block ordered by tensor and then by host, as whole columns: one for each of ``shards``."""
        shape = (self._hosts * shards.shape[0], *shards.shape[1:])
        return parts.derived(self, shape, lambda: Stack.within(parts.block().view(-1), len(shards), shape))

    def _sums(self, wgrads: Stack, sinks: Stack) -> Stack:
        """Memory for the sums over this host's ranks: this rank's column of each gradient. Kept with ``wgrads``."""
        dtype = torch.promote_types(wgrads.dtype, torch.float32) if self._fp32_accumulation else wgrads.dtype
        count = len(sinks) * self._hosts
        return wgrads.derived(self, "sums", lambda: Stack.allocate(count, (sinks.numel,), dtype, wgrads.device))
