"""Copies one strided box into or out of a packet, and digests it, with plain torch operations.

They are the reference for the kernel in :mod:`megatron_patches.refit.device_kernels`, and the fallback without Triton.
All operate on integers as wide as the elements, on the current stream.
"""

from __future__ import annotations

import torch

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.digest import add_digest


def pack_box(
    values: torch.Tensor, packed: torch.Tensor, box: Box, shape: tuple[int, ...], digest: torch.Tensor
) -> None:
    """Copies a box into a packet and adds its digest to ``digest``.

    Args:
        values: the box's elements in place, in its shape and with their strides.
        packed: flat, of the same dtype and number of elements.
        box: the region.
        shape: shape of the whole tensor.
        digest: int64 scalar tensor on the same device; sums wrap.
    """
    packed.view(values.shape).copy_(values)
    add_digest(packed.view(values.shape), box, shape, digest)


def unpack_box(packed: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a box out of a packet; arguments as in :func:`pack_box`."""
    values.copy_(packed.view(values.shape))
