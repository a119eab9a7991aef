"""Optimizer state in checkpoints: the layout that survives resharding, steps of torch's Adam, momentum of SGD."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.checkpoint.model_state import is_sharded

_RESHARDABLE = "fully_reshardable"


def wrap_distributed_optimizer_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DistributedOptimizer.sharded_state_dict``.

    Among its layouts, only ``fully_reshardable`` stores states weight by weight, through the weight's own entry. The
    others store the flat buffers, which contain the padded shards in an order that depends on every parallel size.
    Checkpoints in such a layout can be neither written nor read while weights are sharded.
    """

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        asked = sharding_type or (metadata or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space")
        if asked != _RESHARDABLE and any(is_sharded(p) for chunk in self.model_chunks for p in chunk.parameters()):
            if is_loading:
                raise ValueError(
                    f"the checkpoint's optimizer state has the layout {asked!r}, which cannot be loaded with "
                    "--etp-size > 1; save it again with --dist-ckpt-optim-fully-reshardable, or start a new optimizer "
                    "with --no-load-optim"
                )
            raise ValueError(
                f"optimizer state in the layout {asked!r} cannot be saved with --etp-size > 1: it would hold the "
                "shards' padding; add --dist-ckpt-optim-fully-reshardable"
            )
        return original(self, model_sharded_state_dict, is_loading, sharding_type, metadata)

    return sharded_state_dict


def wrap_fully_reshardable_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``DistributedOptimizer.sharded_param_state_fully_reshardable``.

    The original puts the buckets of a buffer together without the padding at their ends, and then reads each parameter
    where it lies in the buffer with this padding: behind the first bucket, parts of other parameters, and zeros.
    """

    @functools.wraps(original)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffers = self.buffers
        self.buffers = [_without_padding_of_buckets(buffer) for buffer in buffers]
        try:
            return original(self, *args, **kwargs)
        finally:
            self.buffers = buffers

    return sharded_param_state


def _without_padding_of_buckets(buffer: Any) -> Any:
    """The same buffer, whose parameters lie where they would without the padding at the ends of buckets."""
    padding = [
        end - start - bucket.numel_unpadded
        for (start, end), bucket in zip(buffer.bucket_indices, buffer.buckets, strict=True)
    ]
    before = list(itertools.accumulate(padding, initial=0))
    unpadded = copy.copy(buffer)
    unpadded.param_index_map = {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }
    return unpadded


def wrap_set_optimizer_states(original: Callable[..., None]) -> Callable[..., None]:
    """For ``DistributedOptimizer._set_main_param_and_optimizer_states``.

    Without Transformer Engine and apex the optimizer is torch's Adam, whose step is a tensor. Megatron restores the
    step from the parameter groups. From the states that it loads it omits the step, and then looks it up in them, or
    (``dp_reshardable``, its default) it takes the step that this run had before the load, which is 0 at its start.
    In that layout it also copies with gradients enabled, which fails for master weights that are the fp32 weights.
    """

    @functools.wraps(original)
    @torch.no_grad()
    def set_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, {**tensors, "step": None})  # None is skipped

    return set_optimizer_states


def wrap_load_optimizer_state(original: Callable[..., None]) -> Callable[..., None]:
    """For ``DistributedOptimizer.load_state_dict``.

    The original gives all states of torch's Adam the same step tensor, which every parameter then increments. The first
    step after a load counts as many steps as there are parameters, and the bias correction is wrong from then on.
    It also asks for the step of an optimizer that has no parameters on this rank, which has none (on CPUs, see
    ``megatron_patches/cpu/megatron_code.py``): any number will do.
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        for group in state_dict.get("optimizer", {}).get("param_groups", ()):
            if group.get("step", 0) is None and not any(own["params"] for own in self.optimizer.param_groups):
                group["step"] = 0
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    return load_state_dict


def wrap_state_of_sgd(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``FP32Optimizer.sharded_state_dict`` and ``Float16OptimizerWithFloat16Params.sharded_state_dict``.

    Before a load, Megatron calls a function that creates the state to load into. For SGD this function is None.
    """

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> Any:
        if is_loading and self.init_state_fn is None:
            self.init_state_fn = _start_momentum
        return original(self, model_sharded_state_dict, is_loading, metadata)

    return sharded_state_dict


def _start_momentum(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else ():
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param.data))
