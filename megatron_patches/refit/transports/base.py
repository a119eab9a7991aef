"""What a transport between processes is: how a slot's content gets from one process into another.

Each pair of a source and a destination that the plan connects has a *link*: a control connection, on which packets
are announced and slots given back, and for the payload a pair of :class:`OutgoingWire` and :class:`IncomingWire` with
:data:`megatron_patches.refit.staging.SLOTS` slots. :mod:`megatron_patches.refit.transports.links` does everything
that is common; a module a transport makes the wires.

[Note: progress] Links depend on nothing of each other: each has its own slots on both sides, a source fills any slot
that is free, and a destination takes any packet that has come. So whatever the layout and however small the slots, as
long as something is left to move, the source of it waits for a slot of this link alone, and that comes back as soon
as its destination has unpacked what is in it; no cycle of waits can arise.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from megatron_patches.refit.frames import Patience
from megatron_patches.refit.ports import Payload, Pending
from megatron_patches.refit.staging import StagingPool

Check = Callable[[], None]
"""Raises if waiting has become pointless, because another party has failed."""


class TransportName(StrEnum):
    """How packets travel between processes."""

    SHM = "shm"
    TCP = "tcp"
    C10D = "c10d"
    NIXL = "nixl"
    CUDA_IPC = "cuda_ipc"


class Offer(msgspec.Struct, frozen=True):
    """What a party tells all others before links are made.

    Attributes:
        address: where its control connections are dialled; empty for a source.
        slot_bytes: the largest slots that it can have.
        details: what its transport adds.
    """

    address: str
    slot_bytes: int
    details: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a party is, and what its wires may use.

    Attributes:
        party: its number among all parties; sources come first.
        sources: number of sources.
        host: address of this machine that other parties reach.
        device: device of the party's storages: ``cpu``, or torch's name of a GPU.
        pool: memory for its slots.
        timeout_s: seconds that one wait may take.
    """

    party: int
    sources: int
    host: str
    device: str
    pool: StagingPool
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """One side of a link, from which its wire is made.

    Attributes:
        connection: the control connection, which wires may use until they are made, both sides in the same order.
        peer: number of the other party.
        slot_bytes: size of a slot.
        patience: how long making it may take.
    """

    connection: socket.socket
    peer: int
    slot_bytes: int
    patience: Patience


class OutgoingWire(Protocol):
    """The payload's way out of a source."""

    @property
    def direct(self) -> bool:
        """Whether a payload may leave from the source's own storages as well as from a slot."""

    @property
    def slots(self) -> Sequence[Payload]:
        """Memory to pack into."""

    def start(self, slot: int, payload: Payload) -> None:
        """Sets a payload on its way, which lies in the slot or, if ``direct``, elsewhere; until the slot comes back."""

    def check(self) -> None:
        """Raises if something that was set on its way has failed."""

    def close(self) -> None:
        """Ends it, whatever is under way, and gives its memory back."""


class IncomingWire(Protocol):
    """The payload's way into a destination."""

    @property
    def direct(self) -> bool:
        """Whether a payload may be received into the destination's own storages."""

    def fetch(self, slot: int, nbytes: int, room: Payload | None) -> Pending[Payload]:
        """Begins to take what its source has announced in a slot.

        Args:
            slot: number of the slot.
            nbytes: size of the payload.
            room: memory of that size to receive it into, if ``direct``; None for a slot.

        Returns:
            The payload, in ``room`` or valid until the slot is given back.
        """

    def close(self) -> None:
        """Ends it, whatever is under way, and gives its memory back."""


class Transport(Protocol):
    """One party's part of a transport."""

    @property
    def one_host(self) -> bool:
        """Whether control connections are local sockets, which carry descriptors."""

    def details(self) -> bytes:
        """What all other parties must know of this one."""

    def connect(self, offers: Sequence[Offer], check: Check) -> None:
        """Done by all parties at once, with everybody's offers, before links are made."""

    def outgoing(self, end: LinkEnd) -> OutgoingWire:
        """Makes the source's wire of a link."""

    def incoming(self, end: LinkEnd) -> IncomingWire:
        """Makes the destination's wire of a link."""

    def stop(self) -> None:
        """Makes everything that is under way on any wire end; wires are closed next."""

    def close(self) -> None:
        """Ends what :meth:`connect` made; wires have been closed before."""
