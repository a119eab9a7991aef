"""Log-probabilities of given tokens under a model that is sharded over trainer ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_patches.refit.errors import RefitError


def log_probabilities(chunks: list[torch.nn.Module], tokens: torch.Tensor) -> torch.Tensor | None:
    """Log-probability of each token after the first. Collective over the model's ranks.

    Args:
        chunks: this rank's part of the model, one module per virtual pipeline stage.
        tokens: ``[sequences, length]``, int64, equal on all ranks. With a virtual pipeline, the number of sequences
            must be a multiple of the number of stages.

    Returns:
        ``[sequences, length - 1]``, float32; None on ranks that do not have the end of the model.

    Raises:
        RefitError: if Megatron cannot run the model here.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device = next(chunks[0].parameters()).device
    inputs, labels = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    positions = torch.arange(inputs.shape[1], device=device)[None]

    def step(numbers: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        number = next(numbers)
        one = slice(number, number + 1)
        losses: torch.Tensor = model(inputs[one], positions, None, labels=labels[one])
        return losses, lambda output, non_loss_data: output  # noqa: ARG005 - Megatron names it

    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            outputs: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(range(len(inputs))) for _ in chunks],
                model=chunks,
                num_microbatches=len(inputs),
                seq_length=inputs.shape[1],
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
    except (NotImplementedError, AssertionError) as error:
        raise RefitError(f"Megatron cannot run this model here: {error or type(error).__name__}") from error
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
    return -torch.cat(outputs).float().cpu() if outputs else None
