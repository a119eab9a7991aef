"""Replaces what in Megatron's own code needs a GPU, Transformer Engine or apex, or fails with its local layers."""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import PatchRecord


def _start_adam(distributed_optimizer: Any) -> None:
    """Make Adam allocate its state, with the values that it has before the first step.

    Megatron's own helper takes a step with zero gradients, in which weight decay would shrink the weights.
    """
    adam = distributed_optimizer.optimizer
    rates = [group["lr"] for group in adam.param_groups]
    try:
        for group in adam.param_groups:
            group["lr"] = 0.0
        distributed_optimizer._init_optimizer_states_with_dummy_values()
    finally:
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate
    for state in adam.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def _without_parameters(distributed_optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer that has nothing to step on this rank: settings of groups, whose step is None.

    A load fills in the step of the others (:mod:`megatron_patches.checkpoint.optimizer_groups`).
    """
    groups = distributed_optimizer.optimizer.state_dict()["param_groups"]
    settings = [{name: value for name, value in group.items() if name != "params"} | {"step": None} for group in groups]
    scaler = distributed_optimizer.grad_scaler
    return {"optimizer": {"param_groups": settings}, **({"grad_scaler": scaler.state_dict()} if scaler else {})}


def _as_numpy_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    return replacement


def _with_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=()):
            return original(*args, **kwargs)

    return replacement


def _with_adam_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(self: Any) -> Any:
        if not any(group["params"] for group in self.optimizer.param_groups):
            return _without_parameters(self)
        if not self.optimizer.state:
            _start_adam(self)
        return original(self)

    return replacement


def records() -> tuple[PatchRecord, ...]:
    """Every replacement."""
    return (
        PatchRecord(
            target="megatron.training.initialize:initialize_megatron",
            replace=lambda original: functools.partial(original, allow_no_cuda=True),
            reason="pretrain() does not pass its allow_no_cuda on",
            sha256="c813ba71782bfc73",
        ),
        PatchRecord(
            target="megatron.training.training:build_train_valid_test_data_iterators",
            replace=_with_random_state,
            reason="data loaders draw seeds from the CPU's random state, which a resumed run has just loaded",
            sha256="8cdf53b117538b27",
        ),
        PatchRecord(
            target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            replace=_as_numpy_on_cpu,
            reason="it converts to numpy only what it has moved from a GPU",
            sha256="c2e4d07c3813ade9",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.mapping:ShardedTensor.init_data",
            replace=_empty_on_cpu,
            reason="its default is torch.empty as it was on import, which creates tensors on a GPU",
            sha256="8a9af5c2888a9947",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
            replace=lambda _original: lambda *_args, **_kwargs: queue.Queue(),
            reason="it spawns a process that imports the script and Megatron anew; without --async-save, threads write",
            sha256="fe7322bffa193a02",
        ),
        PatchRecord(
            target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
            replace=_with_adam_state,
            reason="without TE and apex it reads the step from Adam's state, which is empty before the first step, and "
            "always if this rank has none of the parameters, such as experts on other pipeline stages",
            sha256="0f707320dc52f77a",
        ),
        PatchRecord(
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            replace=_norm_for_sequence_parallelism,
            reason="it refuses sequence parallelism, though its parameters need only be marked for it",
            sha256="7a86dd6ea62cfd68",
        ),
        PatchRecord(
            target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            replace=_attention_with_widths,
            reason="it computes heads whose values are narrower than their keys, but does not take the widths",
            sha256="a03e05a45275648c",
        ),
        *(
            PatchRecord(
                target=f"megatron.core.tensor_parallel.mappings:{name}",
                replace=_reduce_over_several,
                reason="of one rank it returns a view, to which experts that are not cut cannot add a bias in place",
                sha256=sha256,
            )
            for name, sha256 in (
                ("reduce_from_tensor_model_parallel_region", "7be87b901bc3a4ff"),
                ("reduce_scatter_to_sequence_parallel_region", "d02d50d7fdbf2882"),
            )
        ),
    )


def _reduce_over_several(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def replacement(input_: torch.Tensor, group: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else original(input_, group, *args, **kwargs)

    return replacement


def _attention_with_widths(original: Callable[..., None]) -> Callable[..., None]:
    """Accept the widths of a head's key and value, which multi-latent attention passes as to Transformer Engine."""

    @functools.wraps(original)
    def replacement(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        del k_channels  # read off the keys
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return replacement


def _empty_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def replacement(self: Any, device: Any, init_fn: Callable[..., torch.Tensor] | None = None) -> None:
        original(self, device, torch.empty if init_fn is None else init_fn)

    return replacement


def _norm_for_sequence_parallelism(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def replacement(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of these parameters over the tensor-parallel ranks.
            setattr(parameter, "sequence_parallel", True)  # noqa: B010  # not an attribute that torch declares
        return norm

    return replacement
