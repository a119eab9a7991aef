"""Chooses the transport if the user named none, and says why one that was named cannot be used."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from megatron_patches.refit.transports.base import TransportName


class Locality(msgspec.Struct, frozen=True):
    """Where a party runs, as far as transports depend on it.

    Attributes:
        host: equal for processes that can share memory: one running kernel, one network namespace, in which local
            sockets are found, and one user.
        cuda: major version of CUDA; empty if the party's storages are in the host's memory.
        nixl: whether NIXL is installed.
    """

    host: str
    cuda: str
    nixl: bool


def locality_of(device: str) -> Locality:
    """The locality of this process.

    Args:
        device: of the party's storages: ``cpu``, or torch's name of a GPU.
    """
    # Imported here: it needs torch, which users of only this module's rule do without.
    from megatron_patches.refit.transports import nixl_agent

    kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = Path("/proc/self/ns/net").stat().st_ino
    cuda = ""
    if not device.startswith("cpu"):
        import torch

        cuda = str(torch.version.cuda).partition(".")[0]
    return Locality(f"{kernel}:{network}:{os.geteuid()}", cuda, nixl_agent.is_installed())


def choose(localities: Collection[Locality]) -> TransportName:
    """The fastest transport that reaches all parties.

    Args:
        localities: of all parties.

    Returns:
        Within one host and one user, ``cuda_ipc`` if all are on GPUs, else ``shm``. Otherwise ``nixl`` if all have it,
        else ``tcp``. Never ``c10d``: with it, engines answer no requests while a version arrives.
    """
    if len({locality.host for locality in localities}) == 1:
        cuda = {locality.cuda for locality in localities}
        return TransportName.CUDA_IPC if len(cuda) == 1 and "" not in cuda else TransportName.SHM
    return TransportName.NIXL if all(locality.nixl for locality in localities) else TransportName.TCP


def why_not_here(transport: TransportName | None) -> str:
    """Why this process cannot use a transport that the user named; empty if nothing is known against it."""
    # Imported here, as above.
    import torch

    from megatron_patches.refit.transports import nixl_agent

    if transport is TransportName.NIXL and not nixl_agent.is_installed():
        return "nixl is not installed here: pip install nixl, or choose another transport"
    if transport is TransportName.CUDA_IPC and not torch.cuda.is_available():
        return "cuda_ipc reads weights on a GPU, and PyTorch sees none here; choose another transport"
    return ""
