"""Lets ranks share GPUs, for tests and long runs on machines with fewer GPUs than ranks."""

from __future__ import annotations


def sharing_gpus(rank: int, gpus: int) -> dict[str, str]:
    """Environment variables with which a rank may share its GPU with others.

    NCCL refuses ranks of one host that have the same GPU. Here it is told that they are on different hosts, between
    which it uses sockets: slow, but with the results of as many GPUs.

    Args:
        rank: of the process; its GPU is ``rank % gpus``.
        gpus: how many GPUs there are.
    """
    return {
        "NCCL_HOSTID": f"shares-{rank // gpus}",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
