"""One rank of context parallelism in ``examples/pretrain_gpt.py``, for :mod:`tests.multiproc.test_context`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core import parallel_state

SEQUENCE = 16


class Noting(torch.nn.Module):
    """Stands for a model: its losses are the labels, and it notes what it was given."""

    vp_stage = None
    config = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=None)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, _mask: torch.Tensor | None, *, labels: torch.Tensor
    ) -> torch.Tensor:
        self.given = (tokens.tolist(), positions.tolist())
        return labels.float()


def step(rank: int, world_size: int) -> tuple[list[list[int]], list[list[int]], float, int]:
    """Tokens and positions that the model of this rank gets, and the sums of losses and of tokens."""
    from examples.pretrain_gpt import forward_step

    parallel_state.initialize_model_parallel(context_parallel_size=world_size)
    try:
        tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
        positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
        batch = {"tokens": tokens, "labels": tokens + 1, "position_ids": positions.contiguous()}
        model = Noting()
        losses, loss_function = forward_step(iter([{**batch, "loss_mask": torch.ones(2, SEQUENCE)}]), model)
        loss, number, _ = loss_function(losses)
        return *model.given, float(loss), int(number)
    finally:
        parallel_state.destroy_model_parallel()
