"""Copies one strided box into or out of a packet, and digests it on the way, on the device where it lies.

On a GPU with Triton one kernel reads each element once for both; plain torch operations are its reference and serve
everywhere else. All work on integers as wide as the elements, on the current stream.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.digest import add_digest


def pack_box(
    values: torch.Tensor, packed: torch.Tensor, box: Box, shape: tuple[int, ...], digest: torch.Tensor
) -> None:
    """Copies a box into a packet and adds its digest to ``digest``.

    Args:
        values: the box's elements in place, of its shape, strided as they lie.
        packed: flat, of the same type and number of elements.
        box: which region they are.
        shape: shape of the whole tensor.
        digest: int64 of no dimension on the same device; sums wrap.
    """
    if values.is_cuda and _has_triton():
        from megatron_patches.refit.device_kernels import pack_and_digest

        pack_and_digest(values, packed, box, shape, digest)
        return
    packed.view(values.shape).copy_(values)
    add_digest(packed.view(values.shape), box, shape, digest)


def unpack_box(packed: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a box out of a packet; arguments as of :func:`pack_box`."""
    values.copy_(packed.view(values.shape))


def digest_box(values: torch.Tensor, box: Box, shape: tuple[int, ...], digest: torch.Tensor) -> None:
    """Adds a box's digest to ``digest``; arguments as of :func:`pack_box`."""
    if values.is_cuda and _has_triton():
        from megatron_patches.refit.device_kernels import pack_and_digest

        pack_and_digest(values, None, box, shape, digest)
        return
    add_digest(values, box, shape, digest)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
