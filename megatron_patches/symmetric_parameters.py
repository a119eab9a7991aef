"""Moves DistributedDataParallel's parameter buffers into symmetric memory, so that peers read shards in place.

With the distributed optimizer, all parameters of a model chunk are views of a few flat buffers. If a shard group's
transport gathers by peer copies, these buffers move into symmetric memory. Otherwise the transport would keep a copy of
every shard, 1/N of the model's bytes. It does so with ``--async-save``: Megatron passes the parameters to another
process, and CUDA has no IPC handle for symmetric memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from etp import ETPShardedParam
from etp.runtime import EtpRuntime


def move_into_symmetric_memory(chunk: Any, runtime: EtpRuntime) -> None:
    """Move a model chunk's parameter buffers that hold shards, before an optimizer is built on them. Collective.

    Args:
        chunk: Megatron's DistributedDataParallel. Anything else is left unchanged (``--skip-train`` wraps nothing), and
            so are chunks without the distributed optimizer, whose parameters share no buffer.
        runtime: drives the chunk's shards.
    """
    if not hasattr(chunk, "expert_parallel_buffers"):
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        shards = [param for param in buffer.params if isinstance(param, ETPShardedParam)]
        if not shards or getattr(buffer, "param_data", None) is None:
            continue
        groups: set[dist.ProcessGroup] = {shard.group for shard in shards}
        if len(groups) > 1:
            continue
        transport = runtime.routes.of(shards[0].weight_group).transport
        new = transport.symmetric_memory(buffer.param_data.numel(), buffer.param_data.dtype)
        if new is not None:
            _rebind(buffer, new)


def _rebind(buffer: Any, new: torch.Tensor) -> None:
    old = buffer.param_data
    new.copy_(old)

    def moved(view: torch.Tensor) -> torch.Tensor:
        start = (view.data_ptr() - old.data_ptr()) // old.element_size()
        return new[start : start + view.numel()].view(view.shape)

    for param in buffer.params:
        param.data = moved(param.data)
    for bucket in buffer.buckets:
        if bucket.param_data is not None:
            bucket.param_data = moved(bucket.param_data)
    buffer.param_data = new
