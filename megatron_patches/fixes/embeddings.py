"""A model whose output layer uses the embedding's weight cannot start with sharded weights.

``ColumnParallelLinear`` has no weight of its own then: GPTModel passes the embedding's in each forward. Two things
go wrong. Its constructor asks for the missing weight to be sharded; the seam's ``wrap_module_params_gtp`` leaves a
weight that is None alone. And ``forward`` compares the shape of the weight that it was given with the full one, while
a sharded weight has its shard's. With this fix the comparison is made with the weight's logical shape, and the rest
of ``forward``, which gathers the weight, runs as for a layer that owns it.

On two pipeline stages each has a copy of its own; Megatron sums both and their gradients over the embedding group,
shard by shard, which is right as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patches.registry import PatchRecord


def _replace(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def replacement(
        self: Any, input_: torch.Tensor, weight: Any = None, runtime_gather_output: bool | None = None
    ) -> Any:
        if weight is None or not getattr(weight, "is_gtp_weight_remat", False):
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
