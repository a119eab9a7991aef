"""How shards travel: one transport per file behind the protocol in :mod:`etp.collectives.base`."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.config import EtpConfig, TransportName


def select_transport(config: EtpConfig, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport for one shard group on one kind of device. Collective over the group.

    Raises:
        ValueError: if the configuration asks for a transport that cannot serve this group.
    """
    if config.transport is not TransportName.C10D and device.type == "cuda":
        obstacle = _copy_engine_obstacle(group, device)
        if not obstacle:
            from etp.collectives.copy_engine import CopyEngineTransport

            return CopyEngineTransport(group, device, timeout_s=config.timeout_s)
    else:
        obstacle = f"it needs CUDA and the weights are on {device.type}"
    if config.transport is TransportName.COPY_ENGINE:
        raise ValueError(f"transport 'copy_engine' cannot serve this group: {obstacle}; use 'c10d' or 'auto'")
    return C10dTransport(group, fp32_accumulation=config.fp32_accumulation, timeout_s=config.timeout_s, device=device)


def _copy_engine_obstacle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why these ranks cannot copy from each other's memory, or "". The same on all ranks. Collective."""
    index = torch.cuda.current_device() if device.index is None else device.index
    everyone: list[tuple[str, int, int]] = [("", 0, 0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (socket.gethostname(), index, torch.cuda.device_count()), group=group)
    hosts = {host for host, _, _ in everyone}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    if len({peer for _, peer, _ in everyone}) < len(everyone):
        return "several of its ranks use one device, or each sees only its own (CUDA_VISIBLE_DEVICES)"
    reachable = all(torch.cuda.can_device_access_peer(index, peer) for _, peer, _ in everyone if peer != index)
    answers = [True] * len(everyone)
    dist.all_gather_object(answers, reachable, group=group)
    return "" if all(answers) else "its devices have no direct access to each other's memory"
