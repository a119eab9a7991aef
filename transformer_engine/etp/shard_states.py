"""State dicts of modules that hold shards: refuses what would silently load another rank's rows.

Shards of all ranks have the same name and shape. Each module's entry in the state dict's ``_metadata``, which
``torch.save`` keeps, therefore says which shards the state dict holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from etp.param import ETPShardedParam

_CUTS = "etp_cuts"


def guard_states(module: nn.Module) -> list[RemovableHandle]:
    """Check what is loaded into modules that hold shards now, at any depth; returns the hooks' handles."""
    handles: list[RemovableHandle] = []
    for owner in module.modules():
        if any(True for _ in _shards(owner)):
            handles.append(owner.register_state_dict_post_hook(_note_cuts))
            handles.append(owner.register_load_state_dict_pre_hook(_check))
    return handles


def _shards(owner: nn.Module) -> Iterator[tuple[str, ETPShardedParam]]:
    return ((name, param) for name, param in owner._parameters.items() if isinstance(param, ETPShardedParam))


def _cut(param: ETPShardedParam) -> list[int]:
    """The shard's number, the number of shards, and the rows of the weight."""
    return [dist.get_rank(param.group), param.layout.num_shards, param.layout.rows]


def _note_cuts(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    del state, prefix
    metadata[_CUTS] = {name: _cut(param) for name, param in _shards(owner)}


def _check(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise ValueError for a state that does not hold this rank's shards, before anything is loaded into ``owner``."""
    cuts = metadata.get(_CUTS, {})
    for name, param in _shards(owner):
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor):
            continue
        # Out of the state, where PyTorch leaves it for the next load.
        if metadata.pop("assign_to_params_buffers", False):
            raise ValueError(
                f"{param.fqn}: load_state_dict with assign=True would replace the shard by an ordinary parameter; "
                "leave out assign=True"
            )
        if name in cuts and cuts[name] != _cut(param):
            (shard, of, rows), (own, size, own_rows) = cuts[name], _cut(param)
            raise ValueError(
                f"{param.fqn}: the state holds shard {shard} of {of} of a weight of {rows} rows, and this rank needs "
                f"shard {own} of {size} of one of {own_rows} rows; save module.state_dict() on every rank, each to a "
                "file of its own, or use etp.full_state_dict and etp.load_full_state_dict"
            )
        if tuple(value.shape) == param.layout.shape != param.layout.shard_shape:
            raise ValueError(
                f"{param.fqn}: the state holds the full weight of shape {tuple(value.shape)}, and this rank a shard of "
                f"{param.layout.shard_shape}; use etp.load_full_state_dict"
            )
