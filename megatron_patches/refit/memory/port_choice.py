"""Chooses the port that fits a party's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from megatron_patches.refit.memory.ports import HostPort, Memory, Port
from megatron_patches.refit.memory.staging import StagingPool

if TYPE_CHECKING:
    import torch


def open_port(memory: Memory, where: str, pool: StagingPool | None = None, *, urgent: bool = False) -> Port:
    """The port for storages that are all in host memory, or all on one GPU.

    Args:
        memory: the storages, by name.
        where: owner of the storages, for messages.
        pool: pool of the buffer through which a device moves payloads on the host.
        urgent: whether a GPU does its work before other work that is ready.

    Raises:
        TransferError: if the storages are of several kinds.
    """
    if not memory or any(
        isinstance(storage, np.ndarray) or storage.device.type == "cpu" for storage in memory.values()
    ):
        return HostPort(memory, where)  # which names those that are not on the host
    from megatron_patches.refit.memory.device_port import DevicePort

    return DevicePort(cast("dict[str, torch.Tensor]", memory), where, pool, urgent=urgent)
