"""Chooses the port that fits a party's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.ports import Bits, HostPort, Memory, Port
from megatron_patches.refit.staging import StagingPool

if TYPE_CHECKING:
    import torch


def open_port(memory: Memory, where: str, pool: StagingPool | None = None) -> Port:
    """The port for storages that are all arrays, or all tensors on one device.

    Args:
        memory: the storages, by name.
        where: owner of the storages, for messages.
        pool: pool of the buffer through which a device moves payloads on the host.

    Raises:
        TransferError: if the storages are of several kinds.
    """
    arrays: dict[str, Bits] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, storage in memory.items():
        if isinstance(storage, np.ndarray):
            arrays[name] = storage
        else:
            tensors[name] = storage
    if not tensors:
        return HostPort(arrays, where)
    if arrays:
        raise TransferError(f"some storages on {where} are arrays and others are tensors; they must be of one kind")
    from megatron_patches.refit.device_port import DevicePort

    return DevicePort(tensors, where, pool)
