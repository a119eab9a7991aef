"""``--gradient-accumulation-fusion`` requires APEX even if a sharded layer would not use it.

With this option, the constructor of ``ColumnParallelLinear`` raises unless APEX's ``fused_weight_gradient_mlp_cuda`` is
installed. For a sharded weight, the backward pass disables the fusion: the full gradient goes to a reduce-scatter,
which adds it to ``main_grad``. The extension is therefore never called. Transformer Engine's layers fuse without APEX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord

_FLAG = "_grad_accum_fusion_available"


def _replace(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.tensor_parallel import layers

        config = kwargs["config"]
        expert = kwargs.get("is_expert", False)
        shards = config.expert_gtp_weight_remat_size if expert else config.gtp_weight_remat_size
        if shards == 1 or not config.gradient_accumulation_fusion:
            init(self, *args, **kwargs)
            return
        available = getattr(layers, _FLAG)
        setattr(layers, _FLAG, True)
        try:
            init(self, *args, **kwargs)
        finally:
            setattr(layers, _FLAG, available)

    return replacement


RECORD = PatchRecord(
    target="megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__",
    replace=_replace,
    reason="it demands APEX for a fusion that a sharded weight does not use",
    sha256="89d5190a2c748607",
)
