"""What a transport between processes offers: an end that sends packets, and an end that receives them.

Addresses are made by destinations, exchanged once, and dialled by sources. Each pair of a source and a destination
has a link of its own, on which packets keep their order. Sources send round by round, in each round to destinations
in order; destinations receive round by round, in each round from sources in order. Then, however little a link can
hold, somebody can always proceed: the first packet in (round, destination, source) that has not arrived is the next
one of both its parties.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from megatron_patches.refit.packets import Packet

Check = Callable[[], None]
"""Raises if waiting has become pointless, because another party has failed."""


class TransportName(StrEnum):
    """How packets travel between processes."""

    SHM = "shm"
    TCP = "tcp"


class SendingEnd(Protocol):
    """The side of one source rank."""

    def send(self, packet: Packet, check: Check) -> None:
        """Sends a packet to its destination; returns when the packet's payload may be overwritten.

        Raises:
            PartyFailedError: if the destination does not take it in time or has gone, or ``check`` raises.
        """

    def close(self) -> None:
        """Ends all links."""


class ReceivingEnd(Protocol):
    """The side of one destination rank."""

    @property
    def address(self) -> str:
        """Where sources dial."""

    def receive(self, source: int, check: Check) -> AbstractContextManager[Packet]:
        """The next packet from ``source``; its payload is valid inside the context.

        Raises:
            PartyFailedError: if none comes in time, the source has gone, or ``check`` raises.
        """

    def close(self) -> None:
        """Ends all links."""
