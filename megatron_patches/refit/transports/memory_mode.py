"""Where engine workers receive new weights: beside the serving weights, or in their memory."""

from __future__ import annotations

from enum import StrEnum

from megatron_patches.refit.transports.base import TransportName


class MemoryMode(StrEnum):
    """What a worker's memory must hold while a version arrives."""

    BESIDE = "beside"
    """A second copy of the weights; the engine is paused only for the commit."""
    IN_PLACE = "in_place"
    """Almost nothing more; the engine is paused from before the first byte, and the host keeps the old weights."""


def may_go_directly(mode: MemoryMode, transport: TransportName) -> bool:
    """Whether boxes may travel without being packed. Both sides of a link compute the same.

    Bytes that a peer or a thread writes could still arrive after a push was abandoned. So only copies on the worker's
    own GPU, whose end the worker can await, may write to serving memory.

    Args:
        mode: memory mode of the workers.
        transport: the transport in use.
    """
    return mode is MemoryMode.BESIDE or transport in (TransportName.CUDA_IPC, TransportName.C10D)
