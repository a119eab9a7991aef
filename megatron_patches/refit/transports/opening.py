"""Makes a transport by its name."""

from __future__ import annotations

from megatron_patches.refit.transports.base import Place, Transport, TransportName
from megatron_patches.refit.transports.shm import ShmTransport
from megatron_patches.refit.transports.tcp import TcpTransport


def open_transport(name: TransportName, place: Place) -> Transport:
    """One party's part of the transport ``name``.

    Args:
        name: the transport.
        place: where the party runs.

    Raises:
        RefitError: if the transport needs something that is not installed.
    """
    if name is TransportName.SHM:
        return ShmTransport(place)
    if name is TransportName.TCP:
        return TcpTransport(place)
    # Imported here: they need torch, or more.
    if name is TransportName.NIXL:
        from megatron_patches.refit.transports.nixl import NixlTransport

        return NixlTransport(place)
    if name is TransportName.CUDA_IPC:
        from megatron_patches.refit.transports.cuda_ipc import CudaIpcTransport
        from megatron_patches.refit.transports.cuda_runtime import CudaRuntime

        return CudaIpcTransport(place, CudaRuntime(place.device))
    from megatron_patches.refit.transports.c10d import C10dTransport

    return C10dTransport(place)
