"""Bodies that build the training benchmark's systems on CPUs and look at what their steps leave."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import megatron_patches


def gradients_of_steps(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Loss, and the sum of squares of all gradients over all ranks, after one step and after another, by system."""
    megatron_patches.apply()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs

    from benchmarks.train_shapes import SHAPES
    from benchmarks.train_systems import BuildOptions, build

    # There is no Transformer Engine on a CPU; the benchmark looks this up when it builds a model.
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = gpt_layer_specs.get_gpt_layer_local_spec
    systems = {name: build(name, SHAPES["test"], BuildOptions()) for name in names}
    found: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        system.activate()
        squares = []
        for _ in range(2):
            system.step(2)
            squares.append(_squares(name, system.model))
        found[name] = {"loss": float(system.loss), "squares": squares, "ranks": system.tensor_ranks}
    parallel_state.destroy_model_parallel()
    return found


def _squares(name: str, model: Any) -> float:
    """Every element of the gradient counts once, though norms' scales are on all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    if name == "dp":
        for bucket in (bucket for group in model.bucket_groups for bucket in group.buckets):
            # After the reduction each rank has the sum in its own part only.
            total += bucket.grad_data.chunk(dist.get_world_size())[dist.get_rank()].double().square().sum()
    else:
        for param in model.parameters():
            cut = hasattr(param, "driver") or getattr(param, "tensor_model_parallel", False)
            copies = 1 if cut else dist.get_world_size()
            total += param.main_grad.double().square().sum() / copies
    dist.all_reduce(total)
    return float(total)
