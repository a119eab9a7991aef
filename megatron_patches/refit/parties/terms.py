"""The terms on which links carry a plan: slot sizes, where versions arrive, and which boxes travel unpacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.memory.loads import DEFAULT_TERMS, Reach, Terms
from megatron_patches.refit.memory.staging import useful_bytes
from megatron_patches.refit.planning.plan import Link, Plan
from megatron_patches.refit.transports.base import Offer, TransportName
from megatron_patches.refit.transports.nics import AUTO_NICS


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


_LOAD_BYTES = {TransportName.C10D: 512 << 20}
"""Largest direct load per transport, where not the default. Over NCCL each load costs the host about 0.4 ms."""


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """How the parties move bytes; the same for all but for ``nics``.

    Attributes:
        transport: how packets travel; None for the fastest that reaches all parties.
        staging_bytes: limit of all packets of one party together.
        sources: number of source parties.
        memory: where destinations receive.
        payload: what versions travel as. Deltas are always packed.
        direct_bytes: least size of a box that travels unpacked, if transport and memory allow it.
        load_bytes: limit of the unpacked boxes that one announcement covers; None for the transport's default.
        nics: which NICs this party may use for NIXL; see :func:`megatron_patches.refit.transports.nics.parse_nics`.
    """

    transport: TransportName | None
    staging_bytes: int
    sources: int
    memory: MemoryMode = MemoryMode.BESIDE
    payload: PayloadKind = PayloadKind.WHOLE
    direct_bytes: int = DEFAULT_TERMS.direct_bytes
    load_bytes: int | None = None
    nics: str = AUTO_NICS


def links_of_party(plan: Plan, party: int, sources: int) -> list[Link]:
    """The links of one party. Party numbers count sources first."""
    if party < sources:
        return [link for link in plan.by_link if link[0] == party]
    return [link for link in plan.by_link if link[1] == party - sources]


def terms_of(
    plan: Plan, links: Sequence[Link], offers: Mapping[int, Offer], options: LinkOptions, transport: TransportName
) -> dict[Link, Terms]:
    """The terms of some links, from what both of their ends offer. Both ends compute the same.

    Args:
        plan: what moves.
        links: the links.
        offers: of the parties that these links connect, and those for everybody, by party.
        options: of all parties.
        transport: the one that all parties have agreed on.
    """
    together = {offer.memory for offer in offers.values() if offer.to_all}
    load_bytes = options.load_bytes or _LOAD_BYTES.get(transport, DEFAULT_TERMS.load_bytes)
    terms = {}
    for link in links:
        source, destination = offers[link[0]], offers[options.sources + link[1]]
        # If some storages are on the host and others on GPUs, no transport can move all of them unpacked.
        alike = len(together | {source.memory, destination.memory}) == 1
        directly = alike and may_go_directly(options.memory, transport) and options.payload is PayloadKind.WHOLE
        terms[link] = Terms(
            packet_bytes=min(source.slot_bytes, destination.slot_bytes, useful_bytes(plan.nbytes_by_link[link])),
            reach=Reach(min(source.reach, destination.reach)) if directly else Reach.NONE,
            hidden=frozenset(source.hidden),
            direct_bytes=options.direct_bytes,
            load_bytes=load_bytes,
        )
    return terms
