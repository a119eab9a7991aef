"""A frozen layer keeps its gathered weight from forward to backward.

``linear_with_frozen_weight`` gathers a sharded weight and saves the result for the gradient of its input. This keeps
one full-size weight alive per frozen layer. If the gather buffer is shared with other layers, backward reads a weight
that another layer has gathered there since. With this fix, the shard is saved, and backward gathers the weight again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import PatchRecord


class FrozenShardedLinear(torch.autograd.Function):
    """``input @ weight.T + bias`` with the gradient of ``input`` only; the weight is gathered in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        tensor_group: torch.distributed.ProcessGroup | None,
    ) -> torch.Tensor:
        """Args: ``input_`` ``[..., in]``; ``weight`` a shard; ``tensor_group`` sums the gradient of ``input_``."""
        # Not save_for_backward: under hooks on saved tensors it returns a plain tensor, without the shard's methods.
        ctx.weight = weight
        ctx.tensor_group = tensor_group
        output = torch.matmul(input_, weight.all_gather_and_prefetch(fwd=True).t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Gradient of ``input_``."""
        (grad_output,) = grad_outputs
        grad_input = grad_output.matmul(ctx.weight.all_gather_and_prefetch_bwd())
        if ctx.tensor_group is not None:
            torch.distributed.all_reduce(grad_input, group=ctx.tensor_group)
        return grad_input, None, None, None


def _replace(linear_with_frozen_weight: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(linear_with_frozen_weight)
    def replacement(*args: Any, gtp_remat_size: int = 1, **kwargs: Any) -> torch.Tensor:
        if gtp_remat_size == 1:
            return linear_with_frozen_weight(*args, **kwargs)
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
        from megatron.core.utils import get_tensor_model_parallel_group_if_none

        given = inspect.signature(linear_with_frozen_weight).bind(*args, **kwargs).arguments
        whole, group = given["input"], get_tensor_model_parallel_group_if_none(given["tp_group"])
        if given["sequence_parallel"]:
            whole = gather_from_sequence_parallel_region(whole, tensor_parallel_output_grad=True, group=group)
        summed_over = group if given["allreduce_dgrad"] else None
        output: torch.Tensor = FrozenShardedLinear.apply(whole, given["weight"], given["bias"], summed_over)
        return output

    return replacement


RECORD = PatchRecord(
    target="megatron.core.tensor_parallel.layers:linear_with_frozen_weight",
    replace=_replace,
    reason="it keeps the gathered weight of a frozen layer from forward to backward",
    upstream="NVIDIA/Megatron-LM#4967",
    sha256="c0a7bf53a124febf",
)
