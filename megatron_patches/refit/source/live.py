"""The bytes of this rank's live parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_patches.refit.packets import Bits

if TYPE_CHECKING:
    import torch


def finish_parameter_gather(chunks: Sequence[torch.nn.Module]) -> None:
    """Completes the distributed optimizer's parameter gather, which otherwise waits for the next forward."""
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def bits_of(memory: torch.Tensor) -> Bits:
    """A parameter's memory as unsigned integers of the elements' width, shared where it is on the CPU, else copied.

    Args:
        memory: a contiguous tensor of one dimension.
    """
    import torch

    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    bits: Bits = memory.detach().view(unsigned[memory.element_size()]).cpu().numpy()
    return bits
