"""Guards state dicts of modules that hold shards: refuses states that would silently load another rank's rows.

Shards of all ranks have the same name and shape. Each records which one it is (``etp/shard_copy.py``), and so does each
module's entry in the state dict's ``_metadata``, which ``torch.save`` keeps. A state that has lost these records is
refused unless :func:`mark_own_shards` marks its shards as this rank's.
``torch.distributed.checkpoint`` treats tensors of equal names as copies, and would save one rank's. So a shard in a
state dict raises TypeError when such a checkpoint is planned.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from etp.param import ETPShardedParam
from etp.shard_copy import CUT, Cut, ShardCopy

_CUTS = "etp_cuts"

# A constant text, because Python shows equal warnings from one line only once.
_WHAT_IT_HOLDS = (
    "state_dict() of a sharded module holds this rank's shards only: save it on every rank, each to a file of its own. "
    "For whole weights use etp.full_state_dict(module), or etp.ShardedCheckpoint with torch.distributed.checkpoint"
)


def guard_states(module: nn.Module) -> list[RemovableHandle]:
    """Check what is loaded into modules that hold shards now, at any depth; returns the hooks' handles."""
    handles: list[RemovableHandle] = []
    for owner in module.modules():
        if any(True for _ in _shards(owner)):
            handles.append(owner.register_state_dict_post_hook(_note_cuts))
            handles.append(owner.register_load_state_dict_pre_hook(_check))
    return handles


def refuse_hidden_shards(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``state``, made by ``module.state_dict(keep_vars=True)``, has the shards themselves."""
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, ETPShardedParam) and state.get(name, param) is not param:
            raise ValueError(
                f"{name}: a hook of the module's state dict has put another tensor in the shard's place, which would "
                "be taken for the whole weight; remove the hook"
            )


def _shards(owner: nn.Module) -> Iterator[tuple[str, ETPShardedParam]]:
    return ((name, param) for name, param in owner._parameters.items() if isinstance(param, ETPShardedParam))


def _note_cuts(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    metadata[_CUTS] = {name: list(param.cut) for name, param in _shards(owner)}
    for name, param in _shards(owner):
        value = state.get(prefix + name)
        # With keep_vars=True, the entry is the parameter itself.
        if isinstance(value, torch.Tensor) and value is not param:
            state[prefix + name] = ShardCopy.of(value, param.cut)
            if param.cut[1] > 1 and param.group_rank == 0:
                warnings.warn(_WHAT_IT_HOLDS, stacklevel=1)


def _check(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise ValueError for a state that does not hold this rank's shards, before anything is loaded into ``owner``."""
    cuts = metadata.get(_CUTS, {})
    for name, param in _shards(owner):
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor):
            continue
        # Popped, because PyTorch leaves it in the state's metadata for the next load.
        if metadata.pop("assign_to_params_buffers", False):
            raise ValueError(
                f"{param.fqn}: load_state_dict with assign=True would replace the shard by an ordinary parameter; "
                "leave out assign=True"
            )
        if tuple(value.shape) == param.layout.shape != param.layout.shard_shape:
            raise ValueError(
                f"{param.fqn}: the state holds the full weight of shape {tuple(value.shape)}, and this rank a shard of "
                f"{param.layout.shard_shape}; use etp.load_full_state_dict"
            )
        said = [tuple(cut) for cut in (getattr(value, CUT, None), cuts.get(name)) if cut is not None]
        for cut in said:
            _refuse_other(param, cut)
        if not said and param.knows_copies and param.layout.num_shards > 1:
            raise ValueError(
                f"{param.fqn}: the state does not say which of the {param.layout.num_shards} ranks' shards it holds, "
                "so it may be another rank's. If this rank saved it, load etp.mark_own_shards(module, state); "
                "tensors made anew, as from safetensors, lose what torch.save(module.state_dict()) keeps"
            )


def _refuse_other(param: ETPShardedParam, cut: Cut) -> None:
    if cut != param.cut:
        (shard, of, rows), (own, size, own_rows) = cut, param.cut
        raise ValueError(
            f"{param.fqn}: the state holds shard {shard} of {of} of a weight of {rows} rows, and this rank needs "
            f"shard {own} of {size} of one of {own_rows} rows; save module.state_dict() on every rank, each to a "
            "file of its own, or use etp.full_state_dict and etp.load_full_state_dict"
        )


def mark_own_shards(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Mark the shards in ``state`` as this rank's shards of ``module``, so that ``load_state_dict`` accepts them.

    For states that have lost this record, such as safetensors files of ``param.local_shard()``, one per rank. The mark
    cannot be checked: passing what another rank saved mixes up rows.

    Args:
        module: a sharded module.
        state: entries of its state dict by name, with shards of ``layout.shard_shape``.

    Returns:
        The same entries, in the same memory.

    Raises:
        ValueError: naming an entry that is recorded as another shard.
    """
    marked = copy.copy(state) if isinstance(state, OrderedDict) else dict(state)  # with its _metadata
    for name, param in module.named_parameters(remove_duplicate=False):
        value = marked.get(name)
        if isinstance(param, ETPShardedParam) and isinstance(value, torch.Tensor):
            _refuse_other(param, getattr(value, CUT, None) or param.cut)
            if tuple(value.shape) == param.layout.shard_shape:
                marked[name] = ShardCopy.of(value, param.cut)
    return marked
