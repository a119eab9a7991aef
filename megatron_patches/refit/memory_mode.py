"""Where engine workers receive new weights: beside those that serve, or in their memory."""

from __future__ import annotations

from enum import StrEnum

from megatron_patches.refit.transports.base import TransportName


class MemoryMode(StrEnum):
    """What a worker's memory must hold while a version is on its way."""

    BESIDE = "beside"
    """A second copy of the weights; the engine is paused for the commit alone."""
    IN_PLACE = "in_place"
    """Next to nothing more; the engine is paused from before the first byte, and the host keeps the old weights."""


def may_go_directly(mode: MemoryMode, transport: TransportName, memory: str) -> bool:
    """Whether boxes may travel without being packed; both sides of a link come to the same.

    Bytes that a peer or a thread writes could still arrive after a push was given up. Into memory that serves only
    that may write whose end the worker can await: copies on its own GPU.

    Args:
        mode: of the workers.
        transport: that is taken.
        memory: kind of memory that all storages are in: ``cpu`` or ``cuda``.
    """
    awaited = transport is TransportName.CUDA_IPC or (transport is TransportName.C10D and memory != "cpu")
    return mode is MemoryMode.BESIDE or awaited
