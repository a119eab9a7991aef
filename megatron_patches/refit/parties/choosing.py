"""Chooses the transport if none was named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.transports.base import TransportName


class Site(msgspec.Struct, frozen=True):
    """Where a party is, as far as transports mind.

    Attributes:
        host: the same for processes that can hand each other memory: one running kernel, and on it one network
            namespace, which is where local sockets are found.
        cuda: major version of CUDA; empty if the party's storages are in the host's memory.
        nixl: whether NIXL is installed.
    """

    host: str
    cuda: str
    nixl: bool


def site_of(device: str) -> Site:
    """This process's.

    Args:
        device: of its storages: ``cpu``, or torch's name of a GPU.
    """
    # Imported here: it needs torch, which those that only read this module's rule do without.
    from megatron_patches.refit.transports import nixl_agent

    kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = Path("/proc/self/ns/net").stat().st_ino
    cuda = ""
    if not device.startswith("cpu"):
        import torch

        cuda = str(torch.version.cuda).partition(".")[0]
    return Site(f"{kernel}:{network}", cuda, nixl_agent.is_installed())


def choose(sites: Sequence[Site]) -> TransportName:
    """The fastest that reaches all.

    Args:
        sites: of all parties.

    Returns:
        Within one host ``cuda_ipc`` if all are on GPUs, else ``shm``; between hosts ``nixl`` if all have it, else
        ``tcp``. Not ``c10d``: with it engines answer no requests while a version arrives.
    """
    if len({site.host for site in sites}) == 1:
        cuda = {site.cuda for site in sites}
        return TransportName.CUDA_IPC if len(cuda) == 1 and "" not in cuda else TransportName.SHM
    return TransportName.NIXL if all(site.nixl for site in sites) else TransportName.TCP


def agree_on_transport(assembly: Assembly, device: str) -> TransportName:
    """The same for all parties; taken by all of them together.

    Args:
        assembly: this party's place among them.
        device: of its storages.

    Raises:
        PartyFailedError: on all parties, if any failed.
    """
    return choose(assembly.gather("choosing a transport", Site, lambda: site_of(device)))
