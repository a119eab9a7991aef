"""Builds sharded state dict entries of input projections that Megatron stores as several tensors.

The input projections of Mamba mixers and gated delta rule layers are several stacked matrices. Each is a separate
tensor in a checkpoint, and tensor parallelism splits each separately. For a mixer, Megatron gathers only its own kind
of shards; for a gated delta rule layer, it finds too few rows in a shard. Here each rank stores the rows that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_patches.checkpoint.model_state import is_sharded
from megatron_patches.checkpoint.pieces import Part

_Offsets = Iterable[tuple[int, int, int]]
StateDict = Callable[..., dict[str, Any]]


def _wrap(original: StateDict, parts_of: Callable[[Any], tuple[Part, ...]]) -> StateDict:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any,
        prefix: str = "",
        sharded_offsets: _Offsets = (),
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        projection = self.in_proj
        if not is_sharded(projection.weight):
            return original(self, prefix, sharded_offsets, metadata, **kwargs)
        self.in_proj = _Unsharded(projection.weight.layout.rows)
        try:
            entries = original(self, prefix, sharded_offsets, metadata, **kwargs)
        finally:
            self.in_proj = projection
        del entries[f"{prefix}in_proj.weight"]
        entries |= sharded_state_dict_default(
            projection,
            f"{prefix}in_proj.",
            sharded_offsets,
            ensure_metadata_has_dp_cp_group(metadata),
            tp_group=kwargs.get("tp_group") or self.tp_group,
        )
        weight = f"{prefix}in_proj.weight"
        entries[weight] = entries[weight].with_parts(parts_of(self))
        return entries

    return sharded_state_dict


def _parts_of_mixer(mixer: Any) -> tuple[Part, ...]:
    """Gate, input, keys, queries and time steps: rows on this tensor-parallel rank, and Megatron's names for them."""
    states = mixer.ngroups_local_tp * mixer.d_state
    rows = {"z": mixer.d_inner_local_tp, "x": mixer.d_inner_local_tp, "B": states, "C": states}
    rows["dt"] = mixer.nheads_local_tp
    return tuple(Part(count, f".{name}") for name, count in rows.items())


def _parts_of_delta_rule(layer: Any) -> tuple[Part, ...]:
    """Queries, keys, values, gate and decay: rows on this tensor-parallel rank, and Megatron's names for them."""
    named = zip(layer.in_proj_split_sections, layer.in_proj_split_names, strict=True)
    return tuple(Part(count, f".{name}") for count, name in named)


class _Unsharded(torch.nn.Module):
    """Replaces the projection where Megatron's code counts the rows of its weight; takes no memory."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, 1, device="meta"))


wrap_mixer_state = functools.partial(_wrap, parts_of=_parts_of_mixer)
"""For ``megatron.core.ssm.mamba_mixer.MambaMixer.sharded_state_dict``."""

wrap_delta_rule_state = functools.partial(_wrap, parts_of=_parts_of_delta_rule)
"""For ``megatron.core.ssm.gated_delta_net.common._GDNBase.sharded_state_dict``."""
