"""The transports that move shards, one per file, behind the interface in :mod:`etp.collectives.base`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.collectives.hierarchical import HierarchicalTransport, hosts_of, obstacle_to_two_steps, parts_of
from etp.collectives.reach import obstacle_to_peer_copies
from etp.collectives.sibling import new_group
from etp.config import EtpConfig, TransportName


def select_transport(config: EtpConfig, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport for one shard group on one kind of device. Collective over the group.

    Raises:
        ValueError: if the configuration selects a transport that cannot serve this group.
    """
    if config.transport in {TransportName.AUTO, TransportName.HIERARCHICAL}:
        hosts = hosts_of(group)
        # There is only one step on one host, or with one rank on each.
        if 1 < len(set(hosts)) < len(hosts):
            obstacle = obstacle_to_two_steps(group, hosts)
            if not obstacle:
                return _in_two_steps(config, group, device, len(set(hosts)))
            if config.transport is TransportName.HIERARCHICAL:
                raise ValueError(f"transport 'hierarchical' cannot serve this group: {obstacle}; use 'c10d' or 'auto'")
    return _in_one_step(config, group, device)


def direct_transport(config: EtpConfig, group: dist.ProcessGroup) -> Transport:
    """A transport that reads the shards themselves, wherever they are, and does not compare orders."""
    return C10dTransport(group, config)


def _in_one_step(
    config: EtpConfig, group: dist.ProcessGroup, device: torch.device, *, supervises: bool = True
) -> Transport:
    if config.transport is not TransportName.C10D and device.type == "cuda":
        obstacle = obstacle_to_peer_copies(group, device)
        if not obstacle:
            from etp.collectives.copy_engine import CopyEngineTransport

            return CopyEngineTransport(group, device, timeout_s=config.timeout_s)
    else:
        obstacle = f"it needs CUDA and the weights are on {device.type}"
    if config.transport is TransportName.COPY_ENGINE:
        raise ValueError(f"transport 'copy_engine' cannot serve this group: {obstacle}; use 'c10d' or 'auto'")
    return C10dTransport(group, config, device=device, supervises=supervises)


def _in_two_steps(
    config: EtpConfig, group: dist.ProcessGroup, device: torch.device, hosts: int
) -> HierarchicalTransport:
    within, between = (new_group(group, part, config.timeout_s, device) for part in parts_of(group, hosts))
    return HierarchicalTransport(
        group,
        _in_one_step(config, within, device, supervises=False),
        C10dTransport(between, config, device=device, supervises=False),
        hosts,
        config,
        device,
    )
