"""Defines a sharded parameter with the attributes and methods that Megatron-core 0.19.2 expects.

Megatron's local layers, DistributedDataParallel, the optimizers and checkpoints access a sharded weight through these
attributes and methods, which forward to the engine. There are no ``prev_w`` and ``next_w``, through which Megatron
would look for the gradient in another layer's graph: each graph finishes the gradients that it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from etp import ETPShardedParam


class MegatronShardedParam(ETPShardedParam):
    """One rank's shard of a Megatron weight.

    Attributes:
        is_gtp_weight_remat: Megatron's marker of a sharded weight.
        is_routed_expert: whether it is one of a grouped layer's experts.
        is_qkv: whether it is a weight of query, key and value, for Muon.
        qkv_split_shapes: rows of query, key and value in a query group of such a weight.
        knows_copies: False, because Megatron's checkpoints address rows of whole weights, and its optimizers compute
            with copies, which should be plain tensors.
    """

    is_gtp_weight_remat = True
    is_routed_expert = False
    is_qkv: bool
    qkv_split_shapes: list[int]
    knows_copies = False

    @property
    def gtp_remat_size(self) -> int:
        """Number of ranks that hold a shard each."""
        return self.layout.num_shards

    @property
    def pad_length(self) -> int:
        """Padding rows of the gathered weight."""
        return self.layout.pad_rows

    @property
    def _debug_name(self) -> str:
        return self.fqn

    @property
    def _weights(self) -> list[Any]:
        return list(self.weight_group.shards)

    def numel(self) -> int:
        """Elements of the shard, including padding, which Megatron's optimizers use as the number in memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.numel(self)

    nelement = numel

    def belong_to_current_stream(self) -> None:
        """Associate this leaf with the current stream for autograd from now on."""
        if self.requires_grad:
            self._leaf = torch.autograd.graph.get_gradient_edge(self)

    def all_gather_and_prefetch(self, fwd: bool = True, nvtx_label: str | None = None) -> Any:
        """The full weight (all weights of a group of several) for the GEMM that follows at once."""
        del fwd, nvtx_label  # the engine knows whether a backward pass is running
        return self._materialized()

    def all_gather_and_prefetch_bwd(self, nvtx_label: str | None = None) -> Any:
        """The full weight again, for the gradient of the input."""
        del nvtx_label
        return self._materialized()

    def _materialized(self) -> torch.Tensor | list[torch.Tensor]:
        weights = self.materialize()
        return weights[0] if len(weights) == 1 else weights

    def wgrad_reduce_scatter(self, wgrad: torch.Tensor, nvtx_label: str | None = None) -> torch.Tensor | None:
        """Start reducing the full gradient, ``[rows, columns]``; it arrives in ``main_grad`` or ``grad``.

        Returns:
            what to pass to autograd; see :meth:`etp.ETPShardedParam.reduce_wgrads`.
        """
        del nvtx_label
        return self.reduce_wgrads([wgrad])[0]

    def register_grad_accum_hook(self, grad_accum_node: Any, hook: Callable[..., None]) -> None:
        """Call DistributedDataParallel's ``hook`` once this weight's gradient is in ``main_grad``."""
        del grad_accum_node
        # Hooks of a grouped layer are called together: see megatron_patches/fixes/grouped_experts.py.
        if not getattr(hook, "told_with_its_layer", False):
            self.register_reduce_hook(hook)
        # Megatron calls it by this name after the replay of a layer's graph, where no reduction is seen to finish.
        self._grad_accum_hook = hook


def shard_parameter(
    param: torch.nn.Parameter, group: dist.ProcessGroup, pad_for_alignment: int, fqn: str
) -> MegatronShardedParam:
    """Cut this rank's shard from a full (TP-local) Megatron parameter and keep the attributes that Megatron set.

    Raises:
        ValueError: naming the parameter, if it cannot be sharded.
    """
    try:
        shard = MegatronShardedParam.from_full(param, group, pad_for_alignment)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from error
    # tensor_model_parallel, partition_dim, partition_stride, allreduce, sequence_parallel, shared_embedding, ...
    vars(shard).update(vars(param))
    return shard


class EmbeddingWeight(torch.autograd.Function):
    """The full table of a sharded embedding, differentiable; Megatron looks up rows in it."""

    @staticmethod
    def forward(ctx: Any, weight: MegatronShardedParam) -> torch.Tensor:
        """The table of the shard ``weight``, ``[vocabulary, hidden]``, valid until the next gather of that shape."""
        # Not save_for_backward: hooks on saved tensors, such as activation offloading, would return a plain tensor
        # instead of the shard.
        ctx.weight = weight
        (full,) = weight.materialize()
        return full.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor | None:
        """Reduce the table's gradient into the shard."""
        found: torch.Tensor | None = ctx.weight.wgrad_reduce_scatter(grads[0])
        return found
