"""Full state dicts of sharded modules: gathered from the shards, and loaded into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from etp.digest import check_peers_agree, unless_refused
from etp.param import ETPShardedParam, cut_shard
from etp.shard_copy import ShardCopy
from etp.shard_states import refuse_hidden_shards
from etp.wrap import runtimes_of


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` as the unsharded module would return it. Collective over the shard groups.

    Returns:
        Every entry by its name, with sharded weights gathered to logical shape (no padding). All tensors are newly
        allocated, on their own device. Shared weights appear under each of their names and share memory.

    Raises:
        ValueError: naming a shard that is hidden by a hook of the state dict.
    """
    gathered: dict[int, torch.Tensor] = {}
    full: dict[str, Any] = {}
    state = module.state_dict(keep_vars=True)
    refuse_hidden_shards(module, state)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            full[name] = value
            continue
        if id(value) not in gathered:
            gathered[id(value)] = value.full_tensor() if isinstance(value, ETPShardedParam) else value.detach().clone()
        full[name] = gathered[id(value)]
    return full


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what :func:`full_state_dict` returns into a sharded module. Collective over the shard groups.

    Args:
        module: a sharded module; the number of shards may differ from that of the module that ``state`` came from.
        state: every entry of the unsharded module by name, the same on all ranks; any dtype that converts.

    Raises:
        ValueError: naming every missing, unexpected or misshapen entry, or a shard that is hidden by a hook of the
            state dict; nothing is loaded then.
        PeerMismatchError: if the ranks pass different values, or another rank refuses, with its reason; nothing is
            loaded then.
    """
    own = module.state_dict(keep_vars=True)
    names_by_group = _names_by_group(module, own)
    checked: Mapping[str, Any] | Exception = state
    try:
        refuse_hidden_shards(module, own)
        _check_names_and_shapes(own, state)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know; a lazy state reads files
        checked = error
    unless_refused(checked, list(names_by_group), "load_full_state_dict")
    for group, names in names_by_group.items():
        check_peers_agree({name: state[name] for name in names}, group, "load_full_state_dict")
    others: dict[str, Any] = {}
    with torch.no_grad():
        for name, value in own.items():
            if isinstance(value, ETPShardedParam):
                shard = value.local_shard()
                shard.copy_(cut_shard(state[name].to(shard.device), value.layout, value.group_rank))
                others[name] = ShardCopy.of(shard, value.cut)
            else:
                others[name] = state[name]
    module.load_state_dict(others)
    for runtime in runtimes_of(module):
        runtime.mark_weights_changed()


def _check_names_and_shapes(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    problems = [f"missing {name}" for name in own if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in own]
    for name, value in own.items():
        if name in state and isinstance(value, torch.Tensor):
            expected = value.layout.shape if isinstance(value, ETPShardedParam) else tuple(value.shape)
            if not isinstance(state[name], torch.Tensor):
                problems.append(f"{name} is a {type(state[name]).__name__} instead of a tensor")
            elif tuple(state[name].shape) != expected:
                problems.append(f"{name} has shape {tuple(state[name].shape)} instead of {expected}")
    if problems:
        raise ValueError("the state does not fit the module: " + "; ".join(problems))


def _names_by_group(module: nn.Module, own: Mapping[str, Any]) -> dict[torch.distributed.ProcessGroup, list[str]]:
    """Names of the parameters that the ranks of each group share, sharded or replicated."""
    replicated = {param: group for runtime in runtimes_of(module) for param, group in runtime.replicated.groups.items()}
    names: dict[torch.distributed.ProcessGroup, list[str]] = {}
    for name, value in own.items():
        if isinstance(value, ETPShardedParam):
            group = value.group
        elif isinstance(value, nn.Parameter) and value in replicated:
            group = replicated[value]
        else:
            continue
        names.setdefault(group, []).append(name)
    return names
