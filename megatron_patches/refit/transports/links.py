"""Both ends of links between processes: control connections, slots, and what is announced and given back.

A source announces a packet when it is in its slot, and the destination gives the slot back when it has unpacked it.
Everything else about how the payload travels is the wire's; see :mod:`megatron_patches.refit.transports.base`.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.packets import Packet, Part
from megatron_patches.refit.ports import Payload, Pending
from megatron_patches.refit.staging import SLOTS
from megatron_patches.refit.transports.base import (
    Check,
    IncomingWire,
    LinkEnd,
    Offer,
    OutgoingWire,
    Place,
    Transport,
)

MakeRoom = Callable[[Packet], Payload | None]

_LOOK_AROUND_S = 0.1  # how often a wait looks whether it should end
_POLL_S = 0.0002  # how often a wait looks whether a payload that is under way has come
_EMPTY = np.empty(0, dtype=np.uint8)


class _Hello(msgspec.Struct):
    """The first message on a link."""

    source: int
    plan_digest: str
    slot_bytes: int


class _Head(msgspec.Struct):
    """Announces a packet."""

    plan_digest: str
    version: int
    round: int
    number: int
    source: int
    destination: int
    parts: tuple[Part, ...]
    nbytes: int
    slot: int


_decode_hello = msgspec.msgpack.Decoder(_Hello).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_SLOT = struct.Struct("<B")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory of a link to pack into.

    Attributes:
        destination: where the link leads.
        number: which of the link's slots it is.
        payload: the memory.
        direct: whether a payload may leave from where it lies instead.
    """

    destination: int
    number: int
    payload: Payload
    direct: bool


class _Outgoing:
    """A link of a source."""

    def __init__(self, connection: socket.socket, wire: OutgoingWire) -> None:
        self.connection, self.wire = connection, wire
        self.free = deque(range(SLOTS))

    def close(self) -> None:
        self.wire.close()
        self.connection.close()


class SendingEnd:
    """The links of one source rank.

    Args:
        place: where it is.
        transport: makes the wires.
    """

    def __init__(self, place: Place, transport: Transport) -> None:
        self._place, self._transport = place, transport
        self._links: dict[int, _Outgoing] = {}
        self._selector = selectors.DefaultSelector()

    def offer(self, slot_bytes: int) -> Offer:
        """What other parties must know."""
        return Offer("", slot_bytes, self._transport.details())

    def connect(self, offers: Sequence[Offer], slots: Mapping[int, int], plan_digest: str, check: Check) -> None:
        """Makes a link to each destination to which the plan sends something.

        Args:
            offers: of all parties.
            slots: size of a slot of each, by rank.
            plan_digest: digest of the plan.
            check: raises if another party has failed.

        Raises:
            PartyFailedError: if one cannot be reached in time.
        """
        self._transport.connect(offers, check)
        for destination, size in sorted(slots.items()):
            peer = self._place.sources + destination
            patience = Patience(self._place.timeout_s, f"a link to destination rank {destination}", check)
            connection = _dial(offers[peer].address, patience, local=self._transport.one_host)
            try:
                hello = _Hello(self._place.party, plan_digest, size)
                frames.send(connection, msgspec.msgpack.encode(hello), patience)
                end = LinkEnd(connection=connection, peer=peer, slot_bytes=size, patience=patience)
                self._links[destination] = _Outgoing(connection, self._transport.outgoing(end))
            except BaseException:
                connection.close()
                raise
            self._selector.register(connection, selectors.EVENT_READ, destination)

    def ready(self, destinations: Collection[int], check: Check, *, wait: bool) -> Slot | None:
        """A free slot of one of the links to ``destinations``, of the one with most of them; taken until it returns.

        Args:
            destinations: ranks for which something is left to send.
            check: raises if another party has failed.
            wait: whether to wait until there is one; otherwise None is an answer.

        Raises:
            PartyFailedError: if none comes back in time, the destination has gone, or ``check`` raises.
        """
        patience = Patience(
            self._place.timeout_s, f"room for a packet to destination ranks {sorted(destinations)}", check
        )
        self._collect(0.0, patience)
        while True:
            best = max(destinations, key=lambda destination: len(self._links[destination].free))
            link = self._links[best]
            if link.free:
                number = link.free.popleft()
                return Slot(best, number, link.wire.slots[number], link.wire.direct)
            if not wait:
                return None
            self._collect(_LOOK_AROUND_S, patience)
            patience.tick()

    def send(self, packet: Packet, slot: Slot, check: Check) -> None:
        """Sends a packet that was packed into ``slot``.

        Raises:
            PartyFailedError: if the destination has gone, or ``check`` raises.
        """
        patience = Patience(self._place.timeout_s, f"destination rank {slot.destination} to take a packet", check)
        link = self._links[slot.destination]
        head = _Head(
            packet.plan_digest,
            packet.version,
            packet.round,
            packet.number,
            packet.source,
            packet.destination,
            packet.parts,
            len(packet.payload),
            slot.number,
        )
        frames.send(link.connection, msgspec.msgpack.encode(head), patience)
        link.wire.start(slot.number, packet.payload)

    def finish(self, check: Check) -> None:
        """Waits until all packets have been unpacked.

        Raises:
            PartyFailedError: if a destination does not in time or has gone, or ``check`` raises.
        """
        while True:
            late = [rank for rank, link in self._links.items() if len(link.free) < SLOTS]
            if not late:
                return
            patience = Patience(self._place.timeout_s, f"destination ranks {late[:8]} to take their packets", check)
            before = sum(len(link.free) for link in self._links.values())
            while sum(len(link.free) for link in self._links.values()) == before:
                self._collect(_LOOK_AROUND_S, patience)
                patience.tick()

    def close(self) -> None:
        """Ends all links."""
        self._selector.close()
        self._transport.stop()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._transport.close()

    def _collect(self, wait_s: float, patience: Patience) -> None:
        """Takes slots that were given back; waits up to ``wait_s`` for the first."""
        for link in self._links.values():
            link.wire.check()
        for key, _ in self._selector.select(wait_s):
            link = self._links[key.data]
            content = frames.receive_exactly(link.connection, _SLOT.size, patience)
            link.free.append(_SLOT.unpack(content)[0])


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A packet that has come.

    Attributes:
        packet: it; its payload is valid until it is released.
        slot: number of its slot.
        source: rank that sent it.
    """

    packet: Packet
    slot: int
    source: int


class _Arriving:
    """A packet that was announced."""

    def __init__(self, source: int, packet: Packet, slot: int, payload: Pending[Payload]) -> None:
        self._source, self._packet, self._slot, self._payload = source, packet, slot, payload

    def done(self) -> bool:
        return self._payload.done()

    def result(self) -> Incoming:
        return Incoming(replace(self._packet, payload=self._payload.result()), self._slot, self._source)


class ReceivingEnd:
    """The links of one destination rank.

    Args:
        place: where it is.
        transport: makes the wires.
    """

    def __init__(self, place: Place, transport: Transport) -> None:
        self._place, self._transport = place, transport
        self._links: dict[int, tuple[socket.socket, IncomingWire]] = {}
        self._selector = selectors.DefaultSelector()
        self._arriving: deque[_Arriving] = deque()
        if transport.one_host:
            self._address = f"refit-{secrets.token_hex(12)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # A leading zero byte: a name that is no file and goes with the process.
            self._listener.bind(f"\0{self._address}")
            self._listener.listen(256)
        else:
            self._listener = socket.create_server((place.host, 0), backlog=256)
            self._address = f"{place.host}:{self._listener.getsockname()[1]}"
        frames.prepare(self._listener)

    def offer(self, slot_bytes: int) -> Offer:
        """What other parties must know."""
        return Offer(self._address, slot_bytes, self._transport.details())

    def connect(self, offers: Sequence[Offer], slots: Mapping[int, int], plan_digest: str, check: Check) -> None:
        """Waits until every source that sends something has made its link; arguments as of a :class:`SendingEnd`.

        Raises:
            PlanMismatchError: if one follows another plan.
            PartyFailedError: if one does not come in time.
        """
        self._transport.connect(offers, check)
        waiting = set(slots)
        while waiting:
            patience = Patience(self._place.timeout_s, f"links from source ranks {sorted(waiting)[:8]}", check)
            connection = self._accept(patience)
            try:
                hello = _decode_hello(frames.receive(connection, patience))
                if hello.plan_digest != plan_digest or hello.source not in waiting:
                    raise PlanMismatchError(
                        f"source rank {hello.source} follows plan {hello.plan_digest[:12]}, not {plan_digest[:12]}, "
                        "or has a link already"
                    )
                size = slots[hello.source]
                if hello.slot_bytes != size:
                    raise PlanMismatchError(
                        f"source rank {hello.source} has slots of {hello.slot_bytes} bytes for this link, not {size}"
                    )
                end = LinkEnd(connection=connection, peer=hello.source, slot_bytes=size, patience=patience)
                self._links[hello.source] = connection, self._transport.incoming(end)
            except BaseException:
                connection.close()
                raise
            self._selector.register(connection, selectors.EVENT_READ, hello.source)
            waiting.remove(hello.source)

    def receive(self, make_room: MakeRoom, check: Check, *, wait: bool) -> Incoming | None:
        """The next packet of any source.

        Args:
            make_room: gives, for a packet that was announced, memory to receive its payload into instead of a slot.
            check: raises if another party has failed.
            wait: whether to wait for one; otherwise None is an answer.

        Raises:
            PartyFailedError: if none comes in time, a source has gone, or ``check`` raises.
        """
        patience = Patience(self._place.timeout_s, f"a packet from source ranks {sorted(self._links)[:8]}", check)
        self._begin_fetching(0.0, make_room, patience)
        while True:
            for arriving in self._arriving:
                if arriving.done():
                    self._arriving.remove(arriving)
                    return arriving.result()
            if not wait:
                return None
            self._begin_fetching(_POLL_S if self._arriving else _LOOK_AROUND_S, make_room, patience)
            patience.tick()

    def release(self, incoming: Incoming, check: Check) -> None:
        """Gives the packet's slot back to its source.

        Raises:
            PartyFailedError: if the source has gone.
        """
        patience = Patience(self._place.timeout_s, f"source rank {incoming.source} to take a slot back", check)
        frames.send_all(self._links[incoming.source][0], _SLOT.pack(incoming.slot), patience)

    def close(self) -> None:
        """Ends all links."""
        self._listener.close()
        self._selector.close()
        self._transport.stop()
        self._arriving.clear()
        for connection, wire in self._links.values():
            wire.close()
            connection.close()
        self._links.clear()
        self._transport.close()

    def _begin_fetching(self, wait_s: float, make_room: MakeRoom, patience: Patience) -> None:
        """Begins to take every packet that was announced; waits up to ``wait_s`` for the first."""
        for key, _ in self._selector.select(wait_s):
            connection, wire = self._links[key.data]
            head = _decode_head(frames.receive(connection, patience))
            packet = Packet(
                head.plan_digest,
                head.version,
                head.round,
                head.number,
                head.source,
                head.destination,
                head.parts,
                b"",
            )
            room = make_room(packet) if wire.direct else None
            if room is not None and len(room) != head.nbytes:
                room = None  # the packet is refused when it has come
            payload = wire.fetch(head.slot, head.nbytes, room)
            self._arriving.append(_Arriving(key.data, packet, head.slot, payload))

    def _accept(self, patience: Patience) -> socket.socket:
        while True:
            try:
                connection, _ = self._listener.accept()
                return frames.prepare(connection)
            except TimeoutError:
                patience.tick()


def _dial(address: str, patience: Patience, *, local: bool) -> socket.socket:
    """A control connection to a destination."""
    if not local:
        host, _, port = address.rpartition(":")
        return dial_tcp(host, int(port), patience)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address}")
    except OSError as error:
        connection.close()
        raise PartyFailedError(
            f"cannot reach {address} on this machine ({error}); this transport needs all parties on one host, "
            "use the tcp transport otherwise"
        ) from error
    patience.tick()
    return frames.prepare(connection)


def dial_tcp(host: str, port: int, patience: Patience) -> socket.socket:
    """A connection to another party.

    Raises:
        PartyFailedError: if it cannot be reached.
    """
    try:
        connection = socket.create_connection((host, port), timeout=30.0)
    except OSError as error:
        raise PartyFailedError(f"cannot reach {host}:{port}: {error}") from error
    patience.tick()
    return frames.prepare(connection)
