"""A model whose output layer uses the embedding's weight cannot start with sharded weights.

In this case ``ColumnParallelLinear`` has no weight: GPTModel passes the embedding's weight in each forward. Two things
go wrong. The constructor requests sharding of the missing weight; the seam's ``wrap_module_params_gtp`` ignores a
weight that is None. And ``forward`` compares the shape of the given weight with the full shape, but a sharded weight
has the shape of its shard. With this fix, ``forward`` compares the weight's logical shape; the rest of it, which
gathers the weight, runs as for a layer that owns its weight.

With two pipeline stages, each stage has its own copy. Megatron sums both copies and their gradients over the embedding
group, shard by shard, which is already correct.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patches.checkpoint.model_state import is_sharded
from megatron_patches.registry import PatchRecord


def _replace(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def replacement(
        self: Any, input_: torch.Tensor, weight: Any = None, runtime_gather_output: bool | None = None
    ) -> Any:
        if not is_sharded(weight):
            return forward(self, input_, weight, runtime_gather_output)
        expected = (self.output_size_per_partition, self.input_size)
        if tuple(weight.layout.shape) != expected:
            raise RuntimeError(
                f"the weight given to an output layer has the shape {tuple(weight.layout.shape)}, not {expected}"
            )
        if self.weight is weight:  # the last pipeline stage's own copy
            return forward(self, input_, None, runtime_gather_output)
        with _lent(self, weight):
            return forward(self, input_, None, runtime_gather_output)

    return replacement


@contextmanager
def _lent(module: torch.nn.Module, weight: torch.nn.Parameter) -> Iterator[None]:
    """Let ``module.weight`` be ``weight`` without registering it as a parameter of the module."""
    vars(module)["weight"] = weight
    try:
        yield
    finally:
        vars(module)["weight"] = None


RECORD = PatchRecord(
    target="megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
    replace=_replace,
    reason="it compares a shard's shape with that of the full weight when embeddings are tied",
    upstream="NVIDIA/Megatron-LM#6940",
    sha256="51749cdbe92db7c4",
)
