"""Summarizes a plan: bytes by rank and by link, and the minimum time that given links allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.planning.plan import Plan


@dataclass(frozen=True, slots=True, order=True)
class LinkTraffic:
    """Total that one source sends to one destination.

    Attributes:
        source: rank that sends.
        destination: rank that receives.
        nbytes: bytes.
        same_host: whether both are on the same host.
    """

    source: int
    destination: int
    nbytes: int
    same_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a plan moves.

    Attributes:
        links: bytes by link, in order of source and destination.
        sent: bytes by source rank.
        received: bytes by destination rank.
        egress_seconds: least time for the busiest source to send its bytes.
        ingress_seconds: least time for the busiest destination to receive its bytes.
    """

    links: tuple[LinkTraffic, ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    egress_seconds: float
    ingress_seconds: float

    @property
    def least_seconds(self) -> float:
        """Least time of the whole plan, reached if everything overlaps."""
        return max(self.egress_seconds, self.ingress_seconds)

    @property
    def bytes_within_hosts(self) -> int:
        """Bytes that stay on one host."""
        return sum(link.nbytes for link in self.links if link.same_host)


def traffic_of(
    plan: Plan,
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    *,
    within_host: float,
    between_hosts: float,
) -> Traffic:
    """Sums the bytes of a plan, or of one rank's part, in the dtype in which they arrive.

    Args:
        plan: the plan.
        sources: what each source rank holds.
        destinations: what each destination rank wants.
        within_host: bytes per second of one rank to, and at the same time from, ranks of the same host.
        between_hosts: the same for ranks of other hosts.
    """
    speeds = {True: within_host, False: between_hosts}
    host_of_source = {manifest.rank: manifest.host for manifest in sources}
    host_of_destination = {manifest.rank: manifest.host for manifest in destinations}
    links = tuple(
        LinkTraffic(source, destination, nbytes, host_of_source[source] == host_of_destination[destination])
        for (source, destination), nbytes in plan.nbytes_by_link.items()
    )
    sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
    egress, ingress = defaultdict[tuple[int, bool], int](int), defaultdict[tuple[int, bool], int](int)
    for link in links:
        sent[link.source] += link.nbytes
        received[link.destination] += link.nbytes
        egress[link.source, link.same_host] += link.nbytes
        ingress[link.destination, link.same_host] += link.nbytes
    return Traffic(
        links=links,
        sent=dict(sorted(sent.items())),
        received=dict(sorted(received.items())),
        egress_seconds=_slowest(egress, speeds),
        ingress_seconds=_slowest(ingress, speeds),
    )


def _slowest(totals: Mapping[tuple[int, bool], int], speeds: Mapping[bool, float]) -> float:
    return max((nbytes / speeds[same_host] for (_, same_host), nbytes in totals.items()), default=0.0)
