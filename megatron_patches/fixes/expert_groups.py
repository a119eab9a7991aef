"""Experts are reduced with dense weights if there is neither expert parallelism nor expert tensor parallelism.

Expert parameters are marked ``allreduce=False``, and thus reduced over the expert process groups, only if EP is above 1
or the experts' TP differs. Otherwise experts count as dense: DistributedDataParallel reduces them over the ranks that
hold the same *dense* shard, but experts are sharded over another group. If ``--etp-size`` and ``--expert-etp-size``
differ, this adds gradients of different rows. With this fix, experts always use their own groups if anything is
sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def replacement(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        if config.gtp_weight_remat_size > 1 or config.expert_gtp_weight_remat_size > 1:
            for parameter in self.experts.parameters():
                parameter.allreduce = False

    return replacement


RECORD = PatchRecord(
    target="megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
    replace=_replace,
    reason="without expert parallelism it leaves experts in the dense groups, which are not those they are cut over",
    sha256="91abb0e24021fedf",
)
