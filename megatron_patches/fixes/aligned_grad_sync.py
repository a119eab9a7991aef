"""A pipeline stage reduces gradients over its replicas before they have arrived on the shards.

With ``--overlap-grad-reduce`` and more than one pipeline stage, all stages start the reduction over the data-parallel
replicas at the same time, through ``DistributedDataParallel.start_grad_sync`` at the end of a model chunk's last
backward pass (``--align-grad-reduce``, the default). The last reduce-scatters of the shard group are still in flight at
that point. Their gradients would be missing from the reduction and differ between replicas. Megatron waits for them in
``finalize_model_grads``, and with this fix also in ``start_grad_sync``.

During this wait, gradients are not counted as ready: a bucket group that is started explicitly must have counted either
none or all of its gradients in an iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from etp.wrap import runtimes_of
from megatron_patches.registry import PatchRecord
from megatron_patches.weight_shard_api import join_replays


def _replace(start_grad_sync: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start_grad_sync)
    def replacement(self: Any, *unused: Any) -> None:
        runtimes = runtimes_of(self.module)
        if runtimes:
            join_replays()
        with _nothing_counted(self.bucket_groups + self.expert_parallel_bucket_groups):
            for runtime in runtimes:
                runtime.wait()
        start_grad_sync(self, *unused)

    return replacement


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
