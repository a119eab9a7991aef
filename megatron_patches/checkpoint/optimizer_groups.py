"""Loads optimizer state where Megatron fails: if experts were distributed differently, or a stage has none.

Megatron gives experts a separate optimizer if they are parallel in any way (EP, their own TP, or shards), and otherwise
keeps them in the optimizer of the dense weights. Either way, a checkpoint stores each tensor under its weight's name,
but other values (learning rates, steps, loss scale) are stored per optimizer. A run with two optimizers may not find
its second, and Megatron notices only after the weights have been loaded.

One rank of the first pipeline stage writes these values for all. If this stage has no experts, they may lack the step
of the experts' optimizer: torch's Adam then fails, and Transformer Engine's counts from one again (its release 2.20.2
counts the steps of groups without weights, too). The other optimizers know the step, which is the same for all. Lists
of master weights, which are written only where they are empty, cannot be merged with those of stages with experts.

This module requests tensors as this run's optimizers need them, and looks up non-tensor values among all groups of the
checkpoint, before anything is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

_State = dict[Any, Any]

_KEY = "optimizer"
_REQUESTED = "optimizer of this run"
_EXPERTS = "is_expert_parallel"
_MODEL_SPACE = "fully_reshardable"
_MASTERS = "fp32_from_fp16_params"
_STEP = "common_step"


class OptimizerStateMismatchError(ValueError):
    """The checkpoint lacks settings that an optimizer of this run needs. Nothing of it has been loaded."""


def wrap_load_of_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``megatron.core.dist_checkpointing.serialization.load``."""

    @functools.wraps(original)
    def load(sharded_state_dict: _State, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        requested = sharded_state_dict.get(_KEY)
        if not _is_known(requested):
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        from megatron.core.dist_checkpointing import serialization

        saved = serialization.load_common_state_dict(checkpoint_dir).get(_KEY)
        if not _is_known(saved):
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        empty = [{_MASTERS: part[_MASTERS]} if not any(part.get(_MASTERS, [1])) else {} for part in _parts(requested)]
        if len(_parts(saved)) == len(_parts(requested)) and _is_whole(_parts(saved)):
            answer = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            loaded = answer[0] if isinstance(answer, tuple) else answer
            for part, masters in zip(_parts(loaded[_KEY]), empty, strict=True):
                _add(part, masters)
            return answer
        settings = [_settings(part, _parts(saved), checkpoint_dir) for part in _parts(requested)]
        renamed = {_REQUESTED if key == _KEY else key: value for key, value in sharded_state_dict.items()}
        answer = original(renamed, checkpoint_dir, *args, **kwargs)
        loaded = answer[0] if isinstance(answer, tuple) else answer
        tensors = loaded.pop(_REQUESTED)
        if _is_chain(requested):  # an optimizer that has no weights on this rank asked for no tensors, and got no part
            tensors = {number: tensors.get(number, {}) for number in sorted(requested)}
        for part, values, masters in zip(_parts(tensors), settings, empty, strict=True):
            _add(part, {**values, **masters})
        loaded[_KEY] = tensors
        return answer

    return load


def _is_known(state: object) -> TypeGuard[_State]:
    """Whether ``state`` belongs to Megatron's Adam or SGD, with tensors stored weight by weight."""
    return isinstance(state, dict) and all(
        isinstance(part, dict)
        and part.get("param_state_sharding_type", _MODEL_SPACE) == _MODEL_SPACE
        and isinstance(_torch_state(part).get("param_groups"), list)
        for part in _parts(state)
    )


def _parts(state: _State) -> list[_State]:
    """The states of a chain of optimizers, in order; for a single optimizer, its state."""
    return [state[number] for number in sorted(state)] if _is_chain(state) else [state]


def _is_chain(state: _State) -> bool:
    return bool(state) and all(isinstance(key, int) for key in state)


def _torch_state(part: _State) -> _State:
    """The state of torch's optimizer: Megatron's fp32 optimizer stores just that, the others store it inside theirs."""
    inner = part.get(_KEY, part)
    return inner if isinstance(inner, dict) else part


def _is_whole(saved: list[_State]) -> bool:
    """Whether the rank that wrote for all had weights of every optimizer: then all of a kind have a step, or none."""
    if any(_MASTERS in part for part in saved):  # elsewhere than here, they may be tensors
        return False
    inner = [_torch_state(part) for part in saved]
    of_states = [(kind, _STEP in part.get("state", {})) for part in inner for kind in _kinds(part)]  # torch's Adam
    of_groups = [(_kind(group), group.get("step") is not None) for part in inner for group in part["param_groups"]]
    return all(has or (kind, True) not in known for known in (of_states, of_groups) for kind, has in known)


def _settings(part: _State, saved: list[_State], checkpoint: str) -> _State:
    """The non-tensor state of one optimizer of this run, from the checkpoint's."""
    groups = [group for other in saved for group in _torch_state(other)["param_groups"]]
    values = {
        key: value
        for key, value in saved[0].items()
        if key not in (_KEY, "state", "param_groups", "param_state", _MASTERS)
    }
    inner: _State = {"param_groups": [_counterpart(group, groups, checkpoint) for group in _groups(part)]}
    # Not of other kinds: a step in Muon's state would be saved with it, and go stale.
    same = [other for other in saved if _kinds(other) & _kinds(part)]
    steps = [step for other in same if (step := _torch_state(other).get("state", {}).get(_STEP)) is not None]
    if steps:
        inner["state"] = {_STEP: steps[0]}
    elif "state" in _torch_state(part):  # which has no tensors, and so is not loaded, if there is nothing to step
        inner["state"] = {}
    return {**values, _KEY: inner} if _KEY in part else {**values, **inner}


def _kinds(part: _State) -> set[Any]:
    """Names of the optimizers that ``part`` has the state of."""
    return set(map(_kind, _groups(part)))


def _kind(group: _State) -> Any:
    """Name of the optimizer that steps a group: in a run with Muon, None is Muon and "adam" is Adam."""
    return group.get("optimizer")


def _groups(part: _State) -> Iterator[_State]:
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    for group in _torch_state(part)["param_groups"]:
        yield {
            key: value.unwrap() if isinstance(value, LocalNonpersistentObject) else value
            for key, value in group.items()
        }


def _counterpart(group: _State, saved: list[_State], checkpoint: str) -> _State:
    """``group`` of this run with the values that it, or the group of the same weights, has in the checkpoint."""
    by_experts = {_identity(other): other for other in saved}
    anyway = {_identity(other, without=_EXPERTS): other for other in reversed(saved)}
    found = by_experts.get(_identity(group)) or anyway.get(_identity(group, without=_EXPERTS))
    if found is None:
        settings = ", ".join(f"{name} {value}" for name, value in _named_identity(group) if value is not None)
        raise OptimizerStateMismatchError(
            f"checkpoint {checkpoint}: experts are divided otherwise than in this run, and no group of its optimizer "
            f"state has this run's {settings}; load the weights alone with --no-load-optim"
        )
    kept = {name: group[name] for name in (_EXPERTS, "params") if name in group}
    if found.get("step") is None:
        same = (other for other in saved if other.get("step") is not None and _kind(other) == _kind(found))
        kept |= next(({"step": other["step"]} for other in same), {})
    return {**found, **kept}


def _identity(group: _State, without: str | None = None) -> tuple[Any, ...]:
    return tuple(value for name, value in _named_identity(group) if name != without)


def _named_identity(group: _State) -> list[tuple[str, Any]]:
    """The keys by which Megatron identifies a parameter group, including NeMo's names for them."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return [(name, group.get(name, group.get(f"pre_{name}"))) for name in param_group_identifier_keys]


def _add(target: _State, values: _State) -> None:
    """Merge ``values`` into the nested dictionaries of ``target``; lists are replaced."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _add(target[key], value)
        else:
            target[key] = value
