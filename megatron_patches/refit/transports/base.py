"""The protocol of transports between processes: how a slot's content gets from one process to another.

Each pair of a source and a destination that the plan connects has a *link*: a control connection, on which packets
are announced and slots given back, and for the payload a pair of :class:`OutgoingWire` and :class:`IncomingWire` with
:data:`megatron_patches.refit.staging.SLOTS` slots. The modules ``sending`` and ``receiving`` do everything that is
common; a module a transport makes the wires.

[Note: progress] Links depend on nothing of each other: each has its own slots on both sides, a source fills any slot
that is free, and a destination takes any packet that has come. So whatever the layout and however small the slots, as
long as something is left to move, the source of it waits for a slot of this link alone, and that comes back as soon
as its destination has unpacked what is in it; no cycle of waits can arise. Where links do share something, which is
the queue of an NCCL communicator, a source's links take turns: [Note: turns] in the module ``turns``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.loads import Load, Reach
from megatron_patches.refit.ports import Memory, Payload, Pending, Spot
from megatron_patches.refit.staging import StagingPool
from megatron_patches.refit.transports.turns import Turns

Check = Callable[[], None]
"""Raises if waiting has become pointless, because another party has failed."""


class TransportName(StrEnum):
    """How packets travel between processes."""

    SHM = "shm"
    TCP = "tcp"
    C10D = "c10d"
    NIXL = "nixl"
    CUDA_IPC = "cuda_ipc"


AUTO = "auto"
"""In the place of a name: the fastest that reaches all parties."""


def named_transport(name: str) -> TransportName | None:
    """What an option says; None for :data:`AUTO`.

    Raises:
        ValueError: for another name.
    """
    return None if name == AUTO else TransportName(name)


class Offer(msgspec.Struct, frozen=True):
    """What a party tells all others before links are made.

    Attributes:
        address: where its control connections are dialled; empty for a source.
        secret: what is said there first.
        slot_bytes: the largest slots that it can have.
        memory: kind of memory that its storages are in: ``cpu`` or ``cuda``.
        reach: what may travel directly, as far as it is concerned; a number of :class:`Reach`.
        hidden: its storages that others cannot reach where they lie, by name.
        details: what its transport adds.
    """

    address: str
    slot_bytes: int
    memory: str
    reach: int
    hidden: tuple[str, ...] = ()
    details: bytes = b""
    secret: bytes = b""


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

    @property
    def memory(self) -> str:
        """Kind of memory that the storages are in: ``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]


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
    def slots(self) -> Sequence[Payload]:
        """Memory to pack into."""

    def begin(self, memory: Memory) -> bytes | None:
        """What the destination must be told of the storages before a version's direct loads; None for nothing new.

        Raises:
            PartyFailedError: if a storage can no longer be reached where it lies.
        """

    def start(self, slot: int, payload: Payload) -> None:
        """Sets a payload on its way, which lies in the slot until that comes back."""

    def start_direct(self, load: Load, places: Sequence[Spot]) -> None:
        """Sets the boxes of a direct load on their way from where they lie; until it was received."""

    def check(self) -> None:
        """Raises if something that was set on its way has failed."""

    def close(self) -> None:
        """Ends it, whatever is under way, and gives its memory back."""


class IncomingWire(Protocol):
    """The payload's way into a destination."""

    def begin(self, told: bytes) -> None:
        """Learns what the source's wire tells of its storages.

        Raises:
            PartyFailedError: if they cannot be reached.
        """

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Begins to take what its source has announced in a slot.

        Args:
            slot: number of the slot.
            nbytes: size of the payload.

        Returns:
            The payload, valid until the slot is given back.
        """

    def fetch_direct(self, load: Load, places: Sequence[Spot]) -> Pending[object]:
        """Begins to take the boxes of a direct load to their places.

        Args:
            load: what they are.
            places: where they are to lie.
        """

    def close(self) -> None:
        """Ends it, whatever is under way, and gives its memory back."""


class Delivery:
    """A payload that is there once something pending has ended."""

    def __init__(self, pending: Pending[None], payload: Payload) -> None:
        self._pending, self._payload = pending, payload

    def done(self) -> bool:
        """See :class:`megatron_patches.refit.ports.Pending`."""
        return self._pending.done()

    def result(self) -> Payload:
        """See :class:`megatron_patches.refit.ports.Pending`."""
        self._pending.result()
        return self._payload


class NothingToTell:
    """Part of a wire whose destinations need to know nothing of storages."""

    def begin(self, memory_or_told: object) -> None:
        """Nothing."""


class Packed(NothingToTell):
    """Part of a wire of either side that knows no direct loads."""

    def start_direct(self, load: Load, places: Sequence[Spot]) -> None:
        """Not how packets travel here.

        Raises:
            TransferError: always.
        """
        raise TransferError(
            f"{type(self).__name__} was given {len(load.items)} boxes in {len(places)} places to send unpacked"
        )

    def fetch_direct(self, load: Load, places: Sequence[Spot]) -> Pending[object]:
        """Not how packets travel here.

        Raises:
            TransferError: always.
        """
        raise TransferError(
            f"{type(self).__name__} was told of {len(load.items)} boxes for {len(places)} places, unpacked"
        )


class Transport(Protocol):
    """One party's part of a transport."""

    @property
    def one_host(self) -> bool:
        """Whether control connections are local sockets, which carry descriptors."""

    @property
    def reach(self) -> Reach:
        """What may travel directly."""

    @property
    def turns(self) -> Turns | None:
        """Who says which link of a source sends next, once it is connected; None where links need no turns."""

    def hidden(self, memory: Memory) -> frozenset[str]:
        """The storages of a source that others cannot reach where they lie."""

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
