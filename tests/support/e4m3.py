"""Comparison of E4M3 bytes where Triton's interpreter made one of them: it does not round."""

from __future__ import annotations

import torch


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether normal numbers are within a factor of what is expected. Both are bytes."""
    values, wanted = (bytes_.view(torch.float8_e4m3fn).float() for bytes_ in (found, expected))
    normal = wanted.abs() >= 2.0**-5
    ratio = values[normal] / wanted[normal]
    return bool(((ratio >= 0.5) & (ratio <= 1.125)).all())
