"""Megatron's Muon for sharded weights: each matrix is orthogonalized by one rank of its shard group.

Megatron gathers each weight's momentum over the shard group, padding included, and every rank orthogonalizes it.
Padding changes the sizes by which the update is scaled, and query, key and value are split only if each shard holds
whole query groups. Here whole matrices without padding are orthogonalized as in an unsharded run, and the ranks of a
group share the work. :mod:`megatron_patches.fixes.muon` builds this optimizer; only import it where
``emerging_optimizers`` is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from etp.matrices import MatrixExchange
from etp.shard_grad import plain
from megatron_patches.sharded_weight import MegatronShardedParam


class ShardedMuon(TensorParallelMuon):
    """Megatron's Muon, with the same arguments.

    Args:
        params: groups of the model's parameters; Megatron may replace them by copies in fp32 (``main_param``).
        **options: see ``TensorParallelMuon``.
    """

    def __init__(self, params: list[dict[str, Any]], **options: Any) -> None:
        self._shards = [p for group in params for p in group["params"] if isinstance(p, MegatronShardedParam)]
        self._exchange = MatrixExchange()
        super().__init__(params, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step all parameters that have a gradient. Collective over the shard groups.

        Args:
            closure: must be None.

        Raises:
            ValueError: if there is a closure.
        """
        if closure is not None:
            raise ValueError("Megatron's Muon takes no closure; compute gradients before the step")
        shards = {getattr(shard, "main_param", shard): shard for shard in self._shards}
        # Of each process group, any shard, and what is to be stepped. Ranks without gradients take part, too.
        shared: dict[dist.ProcessGroup, tuple[MegatronShardedParam, list[_Update]]] = {}
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                shard = shards.get(param)
                if shard is not None:
                    shared.setdefault(shard.group, (shard, []))
                if param.grad is None:
                    continue
                update = _Update(self, param, group, shard)
                if shard is None:
                    update.apply(update.orthogonalized(update.advance_momentum()))
                else:
                    shared[shard.group][1].append(update)
        for member, updates in shared.values():
            self._step_together(member, updates)

    def _step_together(self, member: MegatronShardedParam, updates: list[_Update]) -> None:
        self._exchange.run(
            member,
            [update.shard for update in updates if update.shard is not None],
            send=lambda index: updates[index].advance_momentum(),
            compute=lambda index, whole: updates[index].orthogonalized(whole),
            receive=lambda index, rows: updates[index].apply(rows),
        )

    def scaled_orthogonalize_fn_with_gtp_remat(
        self, p: torch.Tensor, grad: torch.Tensor, tp_group: Any, partition_dim: int | None
    ) -> torch.Tensor:
        """Orthogonalize ``grad``, which is already the whole matrix of this tensor-parallel rank."""
        del p
        found: torch.Tensor = self.scaled_orthogonalize_fn(grad, tp_group, partition_dim)
        return found


class _Update:
    """The step of one parameter, as ``OrthogonalizedOptimizer.step`` performs it.

    Args:
        optimizer: whose step it is.
        param: the parameter, or its copy in fp32.
        group: its parameter group.
        shard: the model's shard; None if it is not sharded.
    """

    def __init__(
        self, optimizer: ShardedMuon, param: torch.Tensor, group: dict[str, Any], shard: MegatronShardedParam | None
    ) -> None:
        self._optimizer, self._param, self._group = optimizer, param, group
        self.shard = shard

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without padding."""
        return tensor if self.shard is None else tensor[: self.shard.layout.logical_rows(self.shard.group_rank)]

    def advance_momentum(self) -> torch.Tensor:
        """Decay the weights, or add the decay to the gradient; add the gradient to the momentum.

        Returns:
            what is to be orthogonalized, without padding.
        """
        param, options = self._param, self._group
        grad, momentum = plain(param.grad), self._optimizer.state[param]["momentum_buffer"]  # type: ignore[arg-type]
        self._optimizer._apply_weight_decay_inplace(param, grad, options["lr"], options["weight_decay"])
        momentum.lerp_(grad, 1 - options["momentum"])
        return self._rows(grad.lerp(momentum, options["momentum"]) if self._optimizer.nesterov else momentum)

    def orthogonalized(self, whole: torch.Tensor) -> torch.Tensor:
        """The scaled update of the whole matrix."""
        with fp32_matmul_precision(self._optimizer.fp32_matmul_prec):
            options = {name: value for name, value in self._group.items() if name != "params"}
            found: torch.Tensor = self._optimizer.orthogonalize(self._param, whole, **options)
        return found

    def apply(self, update: torch.Tensor) -> None:
        """Subtract this rank's rows of the update."""
        param = self._param
        weight = param.local_shard() if isinstance(param, MegatronShardedParam) else param
        self._rows(weight).add_(update, alpha=-self._group["lr"])
