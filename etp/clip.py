"""Clipping gradients by their total norm, over the shard groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from etp.errors import PeerMismatchError
from etp.param import ETPShardedParam

# Totals that should agree may differ by rounding, because ranks sum in different orders.
_SAME = 1e-5


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients down so that the total norm of the unsharded model's gradients is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` has the same result, with one small collective per weight. This function needs
    one per shard group and dtype, and detects misuse that the other cannot. Padding does not count; replicated
    parameters, and parameters that are passed twice, count once. Collective over the shard groups.

    Args:
        parameters: a module, or parameters in the same order on all ranks. Those without a gradient are ignored.
        max_norm: upper bound of the total norm.
        norm_type: p of the p-norm; may be ``float("inf")``.
        error_if_nonfinite: raise if the total norm is not finite; otherwise gradients are scaled by it.
        foreach: as in ``torch.nn.utils.clip_grad_norm_``, but None means True.

    Returns:
        The total norm before clipping, 0-dim, equal on all ranks of the shard groups.

    Raises:
        ValueError: for a parameter whose gradient is in ``main_grad``, which Megatron clips itself.
        EtpStateError: if a gradient is not complete; see :func:`etp.wait_async_comms`.
        PeerMismatchError: if ranks that share weights get different totals because they hold different experts; no
            gradient has been scaled then.
        RuntimeError: see ``error_if_nonfinite``.
    """
    params = _unique(parameters)
    for param in params:
        if isinstance(param, ETPShardedParam) and getattr(param, "main_grad", None) is not None:
            raise ValueError(
                f"{param.fqn} has its gradient in main_grad, which clip_grad_norm_ does not look at; Megatron clips "
                "it: --clip-grad"
            )
    foreach = True if foreach is None else foreach
    grads = [param.grad for param in params if param.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    _check_peers_agree(total, [p for p in params if isinstance(p, ETPShardedParam) and p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
    return total


def _unique(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return list({id(param): param for param in parameters}.values())


def _check_peers_agree(total: torch.Tensor, shards: list[ETPShardedParam]) -> None:
    """Compare totals over each shard group: with several groups (experts), ranks may hold different weights."""
    by_ranks: dict[tuple[int, ...], ETPShardedParam] = {}
    for shard in shards:
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(shard.group)), shard)
    if len(by_ranks) < 2:
        return
    for ranks, shard in by_ranks.items():
        own = total.to(shard.device, torch.float64).view(1)
        totals = shard.driver.routes.gather_numbers(own, shard.group, "all-gather of total norms").view(-1)
        if not torch.allclose(totals, totals[0].expand_as(totals), rtol=_SAME, atol=0.0, equal_nan=True):
            raise PeerMismatchError(
                f"clip_grad_norm_: ranks {list(ranks)} share {shard.fqn} but have total norms {totals.tolist()}, so "
                "they would clip it differently: they hold different experts, or experts that saw different data. "
                "Combine the norm yourself: torch.nn.utils.get_total_norm of the gradients of the experts and of the "
                "others apart, reduce the experts' over all of these ranks, and give the total to "
                "torch.nn.utils.clip_grads_with_norm_"
            )
