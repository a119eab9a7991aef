"""With Transformer Engine layers, biases are built with the size of a shard, but the output has full size.

Megatron passes Transformer Engine a shard's ``out_features``, so that it allocates only a shard of the weight. The
bias, which is not sharded, then has the size of a shard too, and forward fails or adds too little. Megatron also draws
each shard's initial values from a separate generator, so a sharded run starts from different weights than the same run
unsharded.

With this fix, the layer is built at full size, exactly as without shards, and its weights are sharded afterwards. While
the model is built, only one layer at a time exists at full size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(
    init_gtp_remat_context: Callable[..., AbstractContextManager[int]],
) -> Callable[..., AbstractContextManager[int]]:
    @functools.wraps(init_gtp_remat_context)
    @contextmanager
    def replacement(
        module: Any,
        output_size: int,
        gtp_remat_group: Any,
        extra_kwargs: dict[str, Any],  # noqa: ARG001
        *,
        is_expert: bool = False,  # noqa: ARG001
        is_grouped: bool = False,
        rng_via_kwarg: bool = True,  # noqa: ARG001
        out_split_size: int = 1,  # noqa: ARG001
    ) -> Iterator[int]:
        yield output_size
        if gtp_remat_group is None or gtp_remat_group.size() <= 1:
            return
        from megatron.core.tensor_parallel.gtp_api import wrap_module_params_gtp

        names = [f"weight{index}" for index in range(module.num_gemms)] if is_grouped else ["weight"]
        wrap_module_params_gtp(module, names, gtp_remat_group, is_grouped=is_grouped)

    return replacement


RECORD = PatchRecord(
    target="megatron.core.extensions.transformer_engine:_init_gtp_remat_context",
    replace=_replace,
    reason="it builds a bias at the size of a shard, and draws initial values that no unsharded run has",
    upstream="NVIDIA/Megatron-LM#6940, #6986",
    sha256="1f86449a5de2e911",
)
