"""A pipeline stage reduces gradients over its replicas before they have arrived on the shards.

With ``--overlap-grad-reduce`` and more than one pipeline stage Megatron lets all stages start the reduction over the
data-parallel replicas at the same time, by ``DistributedDataParallel.start_grad_sync`` at the end of a model chunk's
last backward pass (``--align-grad-reduce``, its default). The last reduce-scatters of the shard group are still under
way then: what they bring would be left out of the reduction and stay different on each replica. In
``finalize_model_grads`` Megatron waits for them, and so does ``start_grad_sync`` with this fix.

While it waits, gradients are not counted as ready: bucket groups that are started from outside must see none of their
gradients counted in an iteration, or all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from etp.runtime import EtpRuntime
from megatron_patches.registry import PatchRecord
from megatron_patches.weight_shard_api import join_replays


def _replace(start_grad_sync: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start_grad_sync)
    def replacement(self: Any, *unused: Any) -> None:
        runtimes = _runtimes(self)
        if runtimes:
            join_replays()
        with _nothing_counted(self.bucket_groups + self.expert_parallel_bucket_groups):
            for runtime in runtimes:
                runtime.wait()
        start_grad_sync(self, *unused)

    return replacement


def _runtimes(chunk: Any) -> list[EtpRuntime]:
    """What drives the shards of a model chunk, in the order of its parameters, which all ranks share."""
    drivers = (p.driver for p in chunk.module.parameters() if getattr(p, "is_gtp_weight_remat", False))
    return list({id(driver): driver for driver in drivers}.values())


@contextmanager
def _nothing_counted(bucket_groups: list[Any]) -> Iterator[None]:
    before = [group.is_last_microbatch for group in bucket_groups]
    for group in bucket_groups:
        group.is_last_microbatch = False
    try:
        yield
    finally:
        for group, counted in zip(bucket_groups, before, strict=True):
            group.is_last_microbatch = counted


RECORD = PatchRecord(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.start_grad_sync",
    replace=_replace,
    reason="pipeline stages call it while gradients are still on their way to the shards",
    sha256="7daa24124d1e7c14",
)
