"""Expert gradients are too large by the ratio of dense to expert shards, unless the loss is per token.

DistributedDataParallel scales all gradients by one over the size of the dense replicate group. This excludes the ``G``
dense shards, because the reduce-scatter has already averaged a dense gradient over them. An expert's gradient has been
averaged over its own ``E`` shards instead, so the sum over the expert replicate group is

    sum / (E * DP / G)    where    sum / DP

is correct. The scale of the expert buffers is therefore multiplied by ``E / G``. With per-token loss, nothing is
averaged and nothing is corrected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def correction(dense_shards: int, expert_shards: int, per_token_loss: bool) -> float:
    """Factor on the expert buffers' gradient scale; 1.0 if the scale is correct."""
    return 1.0 if per_token_loss else expert_shards / dense_shards


def _replace(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def replacement(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        factor = correction(
            config.gtp_weight_remat_size, config.expert_gtp_weight_remat_size, config.calculate_per_token_loss
        )
        if factor == 1.0:
            return
        for buffer in self.expert_parallel_buffers:
            buffer.gradient_scaling_factor *= factor
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor *= factor

    return replacement


RECORD = PatchRecord(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    replace=_replace,
    reason="it scales expert gradients as if experts had as many shards as dense weights",
    upstream="NVIDIA/Megatron-LM#7165",
    sha256="e843858d749f7771",
)
