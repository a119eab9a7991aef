"""State dicts of modules that hold shards: refuses what would silently load another rank's rows.

Shards of all ranks have the same name and shape. Each module's entry in the state dict's ``_metadata``, which
``torch.save`` keeps, therefore says which shards the state dict holds. ``torch.distributed.checkpoint`` takes tensors
of equal names for copies, and would save one rank's; so a shard in a state dict refuses to be planned for that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from etp.param import ETPShardedParam
from etp.refusals import OneOfMany

_CUTS = "etp_cuts"


class ShardState(OneOfMany, torch.Tensor):
    """A shard in a module's state dict: saved as any other tensor, but not by distributed checkpoints."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def new_empty(self, *args: Any, **kwargs: Any) -> Self:
        """Of this type, because ``async_save`` fills a new one with its copy, and only then asks what to write."""
        return self._plain().new_empty(*args, **kwargs).as_subclass(type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy to a plain tensor, and what shares memory to tensors that do."""
        return copy.deepcopy(self._plain(), memo)


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


def _cut(param: ETPShardedParam) -> list[int]:
    """The shard's number, the number of shards, and the rows of the weight."""
    return [param.group_rank, param.layout.num_shards, param.layout.rows]


def _note_cuts(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    metadata[_CUTS] = {name: _cut(param) for name, param in _shards(owner)}
    for name, param in _shards(owner):
        value = state.get(prefix + name)
        # The parameter itself if the caller wants to keep variables.
        if isinstance(value, torch.Tensor) and value is not param:
            state[prefix + name] = value.as_subclass(ShardState)


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
