"""Common parts of the FP8 formats: Transformer Engine's scales, E4M3, and the bytes of gathered weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etp.formats.quantized import transpose
from etp.stack import Stack

LARGEST_E4M3 = 448.0
"""The largest number of ``torch.float8_e4m3fn``."""

_EXPONENT = 0x7F800000


def scale_of(
    amax: torch.Tensor, *, power_of_two: bool, epsilon: float, largest: float = torch.finfo(torch.float32).max
) -> torch.Tensor:
    """The factors that bring numbers into the range of E4M3, as Transformer Engine computes them.

    Args:
        amax: largest magnitudes, fp32.
        power_of_two: round each scale down to a power of two.
        epsilon: smaller magnitudes are raised to this before a scale is computed.
        largest: the scale to use where it would be infinite.

    Returns:
        fp32, of the shape of ``amax``; 1 where a magnitude is 0, infinite or NaN.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    usable = (amax > 0) & (amax < torch.inf)
    # Not "448 / amax", which PyTorch computes as 448 * (1 / amax), rounding twice.
    scale = torch.div(torch.full_like(amax, LARGEST_E4M3), torch.where(usable, amax, 1.0))
    scale = torch.where(scale < torch.inf, scale, largest)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where(usable, scale, 1.0)


def to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``values * scale`` in E4M3, saturated, as bytes of the shape of ``values``."""
    scaled = (values.float() * scale).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def data_of(gathered: Stack, rows: int, *, columns: bool) -> tuple[Sequence[torch.Tensor], bool]:
    """The first ``rows`` rows of each weight, or their transposes, and whether they are new memory."""
    weights = gathered.block()[:, :rows]
    return (transpose(weights) if columns else weights).unbind(0), columns or not gathered.is_one_block
