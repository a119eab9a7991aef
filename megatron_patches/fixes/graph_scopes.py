"""``--cuda-graph-impl local --cuda-graph-modules mlp`` fails with an AttributeError while the model is built.

A layer decides what to capture in its base class's constructor. There it checks whether it has experts, but its own
constructor builds them only later. With this fix, the check uses the specification from which they are built. A layer
with experts has no dense MLP, so this scope captures nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import PatchRecord


def _replace(create: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    from megatron.core.transformer.enums import CudaGraphModule

    @functools.wraps(create)
    def replacement(self: Any, config: Any) -> None:
        modules = config.cuda_graph_modules
        if config.gtp_weight_remat_size > 1 and CudaGraphModule.mlp in modules and not hasattr(self, "is_moe_layer"):
            self.is_moe_layer = _has_experts(self.submodules_config.mlp)
            if self.is_moe_layer and CudaGraphModule.attn not in modules:
                return
        create(self, config)

    return replacement


def _has_experts(mlp: Any) -> bool:
    """Whether a layer's specification builds experts: it is a partial call, or an older ``ModuleSpec``."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    built = mlp.func if isinstance(mlp, functools.partial) else getattr(mlp, "module", mlp)
    return isinstance(built, type) and issubclass(built, MoELayer)


RECORD = PatchRecord(
    target="megatron.core.transformer.transformer_layer:TransformerLayer.create_mcore_cudagraph_manager",
    replace=_replace,
    reason="it asks whether a layer has experts before they are built, where only MLPs are to be captured",
    sha256="6eff778336bae558",
)
