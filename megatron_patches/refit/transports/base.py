"""The protocol of transports between processes: how a slot's content gets from one process to another.

Each pair of a source and a destination that the plan connects has a *link*. A link has a control connection, on which
packets are announced and slots returned. For the payload it has a pair of :class:`OutgoingWire` and
:class:`IncomingWire` with :data:`megatron_patches.refit.memory.staging.SLOTS` slots. The modules ``sending`` and
``receiving`` do everything that transports have in common; one module per transport makes the wires.

[Note: progress] Links are independent: each has its own slots on both sides. A source fills any free slot, and a
destination takes any packet that has arrived. So whatever the layout and however small the slots, a source that still
has data to send waits only for a slot of the same link, and that slot returns as soon as its destination has unpacked
it. No cycle of waits can arise. Where links do share something, namely the queue of an NCCL communicator, a source's
links take turns: [Note: turns] in the module ``turns``.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from megatron_patches.refit.errors import PartyFailedError, TransferError
from megatron_patches.refit.memory.loads import Load, Reach
from megatron_patches.refit.memory.ports import Memory, Payload, Pending
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.transports.nics import AUTO_NICS
from megatron_patches.refit.transports.turns import Turns

Check = Callable[[], None]
"""Raises if another party has failed, so that waiting is pointless."""


class TransportName(StrEnum):
    """How packets travel between processes."""

    SHM = "shm"
    TCP = "tcp"
    C10D = "c10d"
    NIXL = "nixl"
    CUDA_IPC = "cuda_ipc"


AUTO = "auto"
"""Option value for the fastest transport that reaches all parties."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a party tells those with which it links before links are made.

    Attributes:
        address: where its control connections are made; empty for a source.
        secret: first bytes that a control connection must send.
        to_all: whether all parties need it, because they connect together.
        slot_bytes: the largest slots that it can have.
        memory: kind of memory of its storages: ``cpu`` or ``cuda``.
        reach: what may travel directly to or from it; a number of :class:`Reach`.
        hidden: names of its storages that other processes cannot access in place.
        details: additional data of its transport.
    """

    address: str
    slot_bytes: int
    memory: str
    reach: int
    hidden: tuple[str, ...] = ()
    details: bytes = b""
    secret: bytes = b""
    to_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a party runs, and what its wires may use.

    Attributes:
        party: its party number; sources come first.
        sources: number of sources.
        host: address of this machine that other parties can reach.
        device: device of the party's storages: ``cpu``, or torch's name of a GPU.
        pool: memory for its slots.
        timeout_s: timeout of one wait, in seconds.
        nics: which NICs NIXL may use; see :func:`megatron_patches.refit.transports.nics.parse_nics`.
    """

    party: int
    sources: int
    host: str
    device: str
    pool: StagingPool
    timeout_s: float
    nics: str = AUTO_NICS

    @property
    def memory(self) -> str:
        """Kind of memory of the storages: ``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """One side of a link, from which its wire is made.

    Attributes:
        connection: the control connection. Wires may use it until both are made, both sides in the same order; later
            only as :meth:`IncomingWire.begin` says.
        peer: number of the other party.
        slot_bytes: size of a slot.
        patience: limits how long making the wire may take.
    """

    connection: socket.socket
    peer: int
    slot_bytes: int
    patience: Patience


class OutgoingWire(ABC):
    """The payload's way out of a source process.

    Attributes:
        slots: memory to pack into.
    """

    slots: Sequence[Payload]

    @abstractmethod
    def start(self, slot: int, payload: Payload) -> None:
        """Starts to send a payload. It stays in the slot until the slot is returned."""

    def start_direct(self, load: Load, memory: Memory) -> None:  # noqa: ARG002
        """Starts to send the boxes of a direct load from where they lie in ``memory``, until received.

        Raises:
            TransferError: by default, as the plan of a transport without reach has no such loads.
        """
        raise TransferError(f"{type(self).__name__} was given load {load.number} to send unpacked")

    def check(self) -> None:  # noqa: B027 - most transfers fail at the destination
        """Raises if a started transfer has failed."""

    @abstractmethod
    def close(self) -> None:
        """Closes the wire, even if transfers are under way, and frees its memory."""


class IncomingWire(ABC):
    """The payload's way into a destination process."""

    def begin(self, told: bytes, patience: Patience) -> None:  # noqa: B027 - most wires need no message
        """Takes what the source tells about its storages; see :meth:`Transport.begin`.

        Until this returns, the source sends nothing on the control connection but what the wire asks for, namely
        descriptors (:data:`megatron_patches.refit.transports.messages.ASK`).

        Args:
            told: the message.
            patience: limits how long it may take.

        Raises:
            PartyFailedError: if the storages cannot be accessed.
        """

    @abstractmethod
    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Starts to fetch what the source has announced in a slot.

        Args:
            slot: number of the slot.
            nbytes: size of the payload.

        Returns:
            The payload, valid until the slot is returned.
        """

    def fetch_direct(self, load: Load, memory: Memory) -> Pending[object]:  # noqa: ARG002
        """Starts to fetch the boxes of a direct load to their places.

        Args:
            load: the load.
            memory: the storages that its boxes belong to.

        Raises:
            TransferError: by default, as the plan of a transport without reach has no such loads.
        """
        raise TransferError(f"{type(self).__name__} was told of load {load.number}, unpacked")

    @abstractmethod
    def close(self) -> None:
        """Closes the wire, even if transfers are under way, and frees its memory."""


class Transport(ABC):
    """One party's part of a transport. By default, links have nothing in common, so that each ends for itself.

    Attributes:
        one_host: whether control connections are local sockets, which can pass file descriptors.
        together: whether all parties connect together, so that each needs the offers of all.
        reach: what may travel directly.
        turns: decides which link of a source sends next, once connected; None if links need no turns.
    """

    one_host = False
    together = False
    reach = Reach.NONE
    turns: Turns | None = None

    def hidden(self, memory: Memory) -> frozenset[str]:  # noqa: ARG002 - none by default
        """The storages of a source that other processes cannot access in place."""
        return frozenset()

    def details(self) -> bytes:
        """Data for the parties that receive its offer."""
        return b""

    def connect(self, offers: Mapping[int, Offer], check: Check) -> None:  # noqa: B027
        """Connects the transport, before links are made. All parties call it at the same time.

        Args:
            offers: of this party's peers, by party number; of all parties if they connect :attr:`together`.
            check: raises if another party has failed.
        """

    def begin(self, memory: Memory) -> bytes | None:  # noqa: ARG002 - most transports need no message
        """What a source tells all its destinations about its storages before it sends a version from them.

        Returns:
            The message, which the other ends of the links take; None if nothing has changed since the last one.

        Raises:
            PartyFailedError: if a storage can no longer be accessed in place.
        """
        return None

    def descriptor(self, number: int) -> int:
        """A file descriptor that a destination asks for, to take what it was told; the caller closes it.

        Raises:
            PartyFailedError: by default, as few transports need descriptors; also if there is no such number.
        """
        raise PartyFailedError(f"{type(self).__name__} was asked for descriptor {number}")

    @abstractmethod
    def outgoing(self, end: LinkEnd) -> OutgoingWire:
        """Makes the source's wire of a link."""

    @abstractmethod
    def incoming(self, end: LinkEnd) -> IncomingWire:
        """Makes the destination's wire of a link."""

    def stop(self) -> None:  # noqa: B027
        """Ends all transfers under way on any wire. Wires are closed next."""

    def close(self) -> None:  # noqa: B027
        """Closes what :meth:`connect` made. Wires must have been closed before."""
