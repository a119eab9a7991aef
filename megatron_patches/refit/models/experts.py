"""How Megatron names and lays out routed experts, and the traits of their routers, for every family with experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_patches.refit.models import rules
from megatron_patches.refit.models.config_fields import integer, number
from megatron_patches.refit.models.shard import ParamShard, RowSpan
from megatron_patches.refit.models.traits import RouterTraits

# One module per expert (SequentialMLP), or one weight per expert in a grouped module (TEGroupedMLP). Numbers are those
# of the whole model.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))")


def expert_shapes(prefix: str, count: int, hidden: int, width: int, gated: bool) -> Mapping[str, tuple[int, ...]]:
    """Tensors of all experts of a layer. Their names begin with ``prefix`` and the expert's number."""
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(count):
        for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
            shapes[f"{prefix}{expert}.{name}.weight"] = (width, hidden)
        shapes[f"{prefix}{expert}.down_proj.weight"] = (hidden, width)
    return shapes


def expert_pieces(shard: ParamShard, name: str, prefix: str, count: int, gated: bool) -> Sequence[RowSpan] | None:
    """Pieces of an expert's weight; None if ``name`` is not that of an expert's parameter.

    Args:
        shard: the parameter.
        name: its name within the layer.
        prefix: prefix of the tensors' names, up to the expert's number.
        count: number of experts of the layer.
        gated: whether the first weight holds gate and up projection.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    expert = int(match[1] or match[4])
    if expert >= count:
        return None
    tensors = f"{prefix}{expert}."
    if (match[2] or match[3]) == "linear_fc2":
        return rules.row_parallel(shard, tensors + "down_proj.weight")
    if gated:
        return rules.gated(shard, tensors + "gate_proj.weight", tensors + "up_proj.weight")
    return rules.column_parallel(shard, tensors + "up_proj.weight")


def sigmoid_router(config: Any) -> RouterTraits:
    """Traits of a router with sigmoid scores, from Megatron's configuration."""
    return RouterTraits(
        groups=config.moe_router_num_groups or 1,
        groups_per_token=config.moe_router_group_topk or 1,
        scaling=float(config.moe_router_topk_scaling_factor or 1.0),
    )


def sigmoid_router_from_config(config: Mapping[str, object]) -> RouterTraits:
    """The same from a ``config.json``.

    Raises:
        UnsupportedModelError: if a field is invalid.
    """
    return RouterTraits(
        groups=integer(config, "n_group", 1),
        groups_per_token=integer(config, "topk_group", 1),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )
