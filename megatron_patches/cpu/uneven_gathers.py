"""Gathers parts of different sizes over gloo, which requires equal ones.

An expert layer with tensor-parallel experts gathers the tokens of all tensor-parallel ranks. They have different
numbers of tokens with expert parallelism, or with a capacity that drops tokens. NCCL gathers such parts as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import PatchRecord


def _replace(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(gather)
    def replacement(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        ranks = len(output_split_sizes)
        # Gloo exchanges parts of any size, so each rank sends its own to every rank.
        sent = input_.repeat(ranks, *[1] * (input_.dim() - 1))
        gathered = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        sizes = [len(input_)] * ranks
        torch.distributed.all_to_all_single(gathered, sent, output_split_sizes, sizes, group=group)
        return gathered

    return replacement


RECORD = PatchRecord(
    target="megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
    replace=_replace,
    reason="it gathers the tokens of tensor-parallel experts in parts of different sizes, which gloo refuses",
    sha256="2312ce7bb8f3ca4b",
)
