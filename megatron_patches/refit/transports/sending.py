"""A source's end of links: announces packets, in slots or to be read in place, and collects returned slots.

The wires transfer the payload; see :mod:`megatron_patches.refit.transports.base`.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.memory.packets import NO_SLOT, Packet
from megatron_patches.refit.memory.ports import Memory, Payload
from megatron_patches.refit.memory.staging import SLOTS
from megatron_patches.refit.transports import frames, messages
from megatron_patches.refit.transports.base import Check, LinkEnd, Offer, OutgoingWire, Place, Transport
from megatron_patches.refit.transports.frames import Patience

_DRIVE_S = 0.001  # interval at which a waiting source drives its wires; some make progress only then
_HURRY_S = 0.00005  # the same while a packet waits for its turn
_A_SECOND = struct.pack("ll", 1, 0)  # as struct timeval


@dataclass(frozen=True, slots=True, eq=False)
class StagingSlot:
    """Memory of a link to pack into.

    Attributes:
        destination: destination rank of the link.
        number: number of the slot within its link.
        payload: the memory.
    """

    destination: int
    number: int
    payload: Payload


type _Departure = tuple[Packet, Callable[[], None]]
"""A packet that is ready to leave, and what starts its transfer."""


class _Outgoing:
    """A link of a source."""

    def __init__(self, connection: socket.socket, wire: OutgoingWire) -> None:
        self.connection, self.wire = connection, wire
        self.free = deque(range(SLOTS))
        self.direct = 0  # loads under way
        self.told = False  # and the destination has not taken that yet
        self.packed: deque[_Departure] = deque()
        self.unpacked: deque[_Departure] = deque()

    @property
    def waiting(self) -> bool:
        return not self.told and bool(self.packed or self.unpacked)

    def leave(self) -> _Departure:
        """The next departure. Packed ones go first, because they occupy slots."""
        return (self.packed or self.unpacked).popleft()

    @property
    def quiet(self) -> bool:
        return not self.direct and len(self.free) == SLOTS

    def close(self) -> None:
        self.wire.close()
        self.connection.close()


class SendingEnd:
    """The links of one source rank.

    Args:
        place: where the rank runs.
        transport: makes the wires.

    Attributes:
        sent_bytes: size of all payloads of the current version so far.
    """

    def __init__(self, place: Place, transport: Transport) -> None:
        self._place, self._transport = place, transport
        self._links: dict[int, _Outgoing] = {}
        self._selector = selectors.DefaultSelector()
        self._stopped = False
        self._news = 0  # number of what destinations have said so far
        self.sent_bytes = 0

    @property
    def timeout_s(self) -> float:
        """Seconds that one wait may take."""
        return self._place.timeout_s

    @property
    def late(self) -> list[int]:
        """Destination ranks that have not taken all packets that were sent to them. Any thread may ask."""
        return [rank for rank, link in list(self._links.items()) if not link.quiet]

    def offer(self, slot_bytes: int, memory: Memory) -> Offer:
        """What other parties must know of this end.

        Args:
            slot_bytes: the largest slots that it can have.
            memory: its storages.
        """
        return Offer(
            address="",
            slot_bytes=slot_bytes,
            memory=self._place.memory,
            reach=self._transport.reach,
            hidden=tuple(sorted(self._transport.hidden(memory))),
            details=self._transport.details(),
            to_all=self._transport.together,
        )

    def begin(self, memory: Memory, check: Check) -> None:
        """Begins a version: tells destinations where the storages are now, as far as they need to know.

        Raises:
            PartyFailedError: if a destination has gone, or a storage can no longer be accessed in place.
        """
        self.sent_bytes = 0
        told = self._transport.begin(memory)
        if told is None:
            return
        message = messages.encode_message(messages.Told(told))
        for destination, link in self._links.items():
            patience = self._patience(f"destination rank {destination} to listen", check)
            link.told = True
            frames.send(link.connection, message, patience)

    def connect(
        self, offers: Mapping[int, Offer], slots: Mapping[int, int], digests: Mapping[int, str], check: Check
    ) -> None:
        """Makes a link to each destination to which the plan sends something.

        Args:
            offers: of those with which this party links, by party number; see :meth:`Transport.connect`.
            slots: slot size of each link, by destination rank.
            digests: plan digest of each link, by destination rank.
            check: raises if another party has failed.

        Raises:
            PartyFailedError: if a destination cannot be reached in time.
        """
        self._transport.connect(offers, check)
        for destination, size in sorted(slots.items()):
            peer = self._place.sources + destination
            patience = Patience(self._place.timeout_s, f"a link to destination rank {destination}", check)
            connection = _dial(offers[peer].address, patience, local=self._transport.one_host)
            try:
                frames.send_all(connection, offers[peer].secret, patience)
                hello = messages.Hello(self._place.party, digests[destination], size)
                frames.send(connection, messages.encode_message(hello), patience)
                end = LinkEnd(connection=connection, peer=peer, slot_bytes=size, patience=patience)
                self._links[destination] = _Outgoing(connection, self._transport.outgoing(end))
            except BaseException:
                connection.close()
                raise
            self._selector.register(connection, selectors.EVENT_READ, destination)

    def free_slot(self, destinations: Collection[int], check: Check) -> StagingSlot | None:
        """Takes a free slot from the link to ``destinations`` that has the most; None if none of these links has one.

        Args:
            destinations: ranks for which something is left to pack.
            check: raises if another party has failed.

        Raises:
            PartyFailedError: if a destination has gone, or ``check`` raises.
        """
        self._collect(0.0, Patience(self._place.timeout_s, "slots that were given back", check))
        self._depart_in_turn(check)
        best = max(destinations, key=lambda destination: len(self._links[destination].free), default=None)
        if best is None or not self._links[best].free:
            return None
        link = self._links[best]
        number = link.free.popleft()
        return StagingSlot(best, number, link.wire.slots[number])

    def send(self, packet: Packet, slot: StagingSlot, check: Check) -> None:
        """Sends a packet that was packed into ``slot``.

        Raises:
            PartyFailedError: if the destination has gone, or ``check`` raises.
        """
        link = self._links[packet.destination]
        start = partial(link.wire.start, slot.number, slot.payload[: packet.nbytes])
        link.packed.append((replace(packet, slot=slot.number), start))
        self._depart_in_turn(check)

    def send_direct(self, packet: Packet, load: Load, memory: Memory, check: Check) -> None:
        """Sends a direct load whose boxes lie in ``memory``; raises as :meth:`send`."""
        link = self._links[packet.destination]
        link.direct += 1
        link.unpacked.append((packet, partial(link.wire.start_direct, load, memory)))
        self._depart_in_turn(check)

    def wait_for_news(self, check: Check, what: str) -> None:
        """Waits until a slot is returned or a direct load was received.

        Raises:
            PartyFailedError: if neither happens in time, a destination has gone, or ``check`` raises.
        """
        patience = Patience(self._place.timeout_s, what, check)
        before = self._news
        while True:
            self._depart_in_turn(check)
            waiting = any(link.waiting for link in self._links.values())
            self._collect(0.0 if waiting else _DRIVE_S, patience)
            if self._news != before:
                return
            patience.tick()
            if waiting:
                time.sleep(_HURRY_S)

    def finish(self, check: Check) -> None:
        """Waits until all packets have been unpacked.

        Raises:
            PartyFailedError: if a destination is late or has gone, or ``check`` raises.
        """
        while late := self.late:
            self.wait_for_news(check, f"destination ranks {late[:8]} to take their packets")
        if self._transport.turns is not None:
            self._transport.turns.finish()

    def stop(self) -> None:
        """Ends all transfers under way. Call :meth:`close` next."""
        if not self._stopped:
            self._stopped = True
            self._transport.stop()

    def close(self) -> None:
        """Closes all links, even if closing one fails."""
        self._selector.close()
        with ExitStack() as closing:
            closing.callback(self._transport.close)
            for link in self._links.values():
                closing.callback(link.close)
            self._links.clear()
            self.stop()

    def _depart_in_turn(self, check: Check) -> None:
        """Announces and starts the packets whose turn it is; all of them if links take no turns."""
        turns = self._transport.turns
        while waiting := [rank for rank, link in self._links.items() if link.waiting]:
            chosen = waiting[0] if turns is None else turns.choose(waiting)
            if chosen is None:
                return
            packet, start = self._links[chosen].leave()
            self._announce(packet, check)
            if packet.nbytes:  # nothing may have changed
                start()
            self.sent_bytes += packet.nbytes

    def _announce(self, packet: Packet, check: Check) -> None:
        patience = self._patience(f"destination rank {packet.destination} to take a packet", check)
        frames.send(self._links[packet.destination].connection, messages.encode_message(packet), patience)

    def _patience(self, what: str, check: Check) -> Patience:
        """A wait for a message to a destination, during which returned slots are collected.

        The destination may itself be blocked on returning a slot, and then reads nothing. Both would wait for ever.
        """

        def look_after() -> None:
            check()
            self._collect(0.0, Patience(self._place.timeout_s, "slots that were given back", check))

        return Patience(self._place.timeout_s, what, look_after)

    def _collect(self, wait_s: float, patience: Patience) -> None:
        """Collects returned slots and loads, and answers destinations. Waits up to ``wait_s`` for the first."""
        for link in self._links.values():
            link.wire.check()
        for key, _ in self._selector.select(wait_s):
            self._news += 1
            link = self._links[key.data]
            (number,) = messages.SLOT.unpack(frames.receive_exactly(link.connection, messages.SLOT.size, patience))
            if number == messages.ASK:
                self._hand_over(link, patience)
            elif number == messages.TAKEN:
                link.told = False
            elif number == NO_SLOT:
                link.direct -= 1
            else:
                link.free.append(number)

    def _hand_over(self, link: _Outgoing, patience: Patience) -> None:
        """Sends the descriptors that a destination asks for."""
        numbers = messages.decode_numbers(frames.receive(link.connection, patience))
        with ExitStack() as closing:
            descriptors = []
            for number in numbers:
                descriptors.append(self._transport.descriptor(number))
                closing.callback(os.close, descriptors[-1])
            frames.send_descriptors(link.connection, descriptors, patience)


def _dial(address: str, patience: Patience, *, local: bool) -> socket.socket:
    """A control connection to a destination."""
    if not local:
        return _dial_tcp(address, patience)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _A_SECOND)
    try:
        while True:
            try:
                connection.connect(f"\0{address}")
                break
            except BlockingIOError:  # the backlog is full, for example because the process hangs
                patience.tick()
        frames.refuse_another_user(connection)
    except PartyFailedError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise PartyFailedError(
            f"cannot reach {address} on this machine ({error}); this transport needs all parties on one host, "
            "use the tcp transport otherwise"
        ) from error
    patience.tick()
    return frames.prepare(connection)


def _dial_tcp(address: str, patience: Patience) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=30.0)
    except OSError as error:
        raise PartyFailedError(f"cannot reach {address}: {error}") from error
    patience.tick()
    return frames.prepare(connection)
