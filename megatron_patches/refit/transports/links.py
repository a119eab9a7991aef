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
from typing import cast

import msgspec

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError, TransferError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.loads import Load
from megatron_patches.refit.packets import Packet, Part
from megatron_patches.refit.ports import Memory, Payload, Pending, Spot
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

LoadOf = Callable[[Packet], Load]
PlacesOf = Callable[[Load], Sequence[Spot]]

_LOOK_AROUND_S = 0.1  # how often a wait looks whether it should end
_DRIVE_S = 0.001  # how often a source calls its wires, some of which move nothing else while it waits


class _Hello(msgspec.Struct):
    """The first message on a link."""

    source: int
    plan_digest: str
    slot_bytes: int


class _Told(msgspec.Struct, tag=True, array_like=True):
    """What a source's wire tells its destination's."""

    content: bytes


class _Head(msgspec.Struct, tag=True, array_like=True):
    """Announces a packet.

    The boxes are not named: both ends have cut the same plan on the same terms.
    """

    plan_digest: str
    version: int
    round: int
    number: int
    source: int
    destination: int
    digests: tuple[int, ...]
    nbytes: int
    slot: int


_decode_hello = msgspec.msgpack.Decoder(_Hello).decode
_decode_message = msgspec.msgpack.Decoder(_Told | _Head).decode
_encode = msgspec.msgpack.Encoder().encode
_SLOT = struct.Struct("<B")
_NO_SLOT = 255  # of a direct load


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory of a link to pack into.

    Attributes:
        destination: where the link leads.
        number: which of the link's slots it is.
        payload: the memory.
    """

    destination: int
    number: int
    payload: Payload


class _Outgoing:
    """A link of a source."""

    def __init__(self, connection: socket.socket, wire: OutgoingWire) -> None:
        self.connection, self.wire = connection, wire
        self.free = deque(range(SLOTS))
        self.direct = 0  # loads under way

    @property
    def quiet(self) -> bool:
        return not self.direct and len(self.free) == SLOTS

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

    def offer(self, slot_bytes: int, memory: Memory) -> Offer:
        """What other parties must know.

        Args:
            slot_bytes: the largest slots that it can have.
            memory: its storages.
        """
        return Offer(
            address="",
            slot_bytes=slot_bytes,
            memory=_kind(self._place),
            reach=self._transport.reach,
            hidden=tuple(sorted(self._transport.hidden(memory))),
            details=self._transport.details(),
        )

    def begin(self, memory: Memory, check: Check) -> None:
        """Tells destinations where the storages are now, as far as they must know.

        Raises:
            PartyFailedError: if one has gone, or a storage can no longer be reached where it lies.
        """
        for destination, link in self._links.items():
            told = link.wire.begin(memory)
            if told is not None:
                patience = self._patience(f"destination rank {destination} to listen", check)
                frames.send(link.connection, _encode(_Told(told)), patience)

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
                frames.send(connection, _encode(hello), patience)
                end = LinkEnd(connection=connection, peer=peer, slot_bytes=size, patience=patience)
                self._links[destination] = _Outgoing(connection, self._transport.outgoing(end))
            except BaseException:
                connection.close()
                raise
            self._selector.register(connection, selectors.EVENT_READ, destination)

    def free_slot(self, destinations: Collection[int], check: Check) -> Slot | None:
        """A free slot of one of the links to ``destinations``, of the one with most of them; taken until it returns.

        Args:
            destinations: ranks for which something is left to pack.
            check: raises if another party has failed.

        Raises:
            PartyFailedError: if a destination has gone, or ``check`` raises.
        """
        self._collect(0.0, Patience(self._place.timeout_s, "slots that were given back", check))
        best = max(destinations, key=lambda destination: len(self._links[destination].free), default=None)
        if best is None or not self._links[best].free:
            return None
        link = self._links[best]
        number = link.free.popleft()
        return Slot(best, number, link.wire.slots[number])

    def send(self, packet: Packet, slot: Slot, check: Check) -> None:
        """Sends a packet that was packed into ``slot``.

        Raises:
            PartyFailedError: if the destination has gone, or ``check`` raises.
        """
        self._announce(packet, len(packet.payload), slot.number, check)
        self._links[packet.destination].wire.start(slot.number, packet.payload)

    def send_direct(self, packet: Packet, nbytes: int, places: Sequence[Spot], check: Check) -> None:
        """Sends a direct load, of ``nbytes`` bytes, whose boxes lie in ``places``; raises as :meth:`send` does."""
        self._announce(packet, nbytes, _NO_SLOT, check)
        link = self._links[packet.destination]
        link.direct += 1
        link.wire.start_direct(places)

    def wait_for_news(self, check: Check, what: str) -> None:
        """Waits until a slot has come back, or a direct load was received.

        Raises:
            PartyFailedError: if none does in time, a destination has gone, or ``check`` raises.
        """
        patience = Patience(self._place.timeout_s, what, check)
        while not self._collect(_DRIVE_S, patience):
            patience.tick()

    def finish(self, check: Check) -> None:
        """Waits until all packets have been unpacked.

        Raises:
            PartyFailedError: if a destination does not in time or has gone, or ``check`` raises.
        """
        while late := [rank for rank, link in self._links.items() if not link.quiet]:
            self.wait_for_news(check, f"destination ranks {late[:8]} to take their packets")

    def close(self) -> None:
        """Ends all links."""
        self._selector.close()
        self._transport.stop()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._transport.close()

    def _announce(self, packet: Packet, nbytes: int, slot: int, check: Check) -> None:
        patience = self._patience(f"destination rank {packet.destination} to take a packet", check)
        head = _Head(
            packet.plan_digest,
            packet.version,
            packet.round,
            packet.number,
            packet.source,
            packet.destination,
            tuple(part.digest for part in packet.parts),
            nbytes,
            slot,
        )
        frames.send(self._links[packet.destination].connection, _encode(head), patience)

    def _patience(self, what: str, check: Check) -> Patience:
        """For a message to a destination, which may itself be waiting to give something back, and reads nothing then.

        Both would wait for ever if what comes back were not taken meanwhile.
        """

        def look_after() -> None:
            check()
            self._collect(0.0, Patience(self._place.timeout_s, "slots that were given back", check))

        return Patience(self._place.timeout_s, what, look_after)

    def _collect(self, wait_s: float, patience: Patience) -> bool:
        """Takes what was given back; waits up to ``wait_s`` for the first. Whether there was anything."""
        for link in self._links.values():
            link.wire.check()
        found = self._selector.select(wait_s)
        for key, _ in found:
            link = self._links[key.data]
            (number,) = _SLOT.unpack(frames.receive_exactly(link.connection, _SLOT.size, patience))
            if number == _NO_SLOT:
                link.direct -= 1
            else:
                link.free.append(number)
        return bool(found)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A packet that has come.

    Attributes:
        packet: it; its payload is valid until it is released.
        slot: number of its slot; of a direct load, a number that no slot has.
        source: rank that sent it.
    """

    packet: Packet
    slot: int
    source: int


class _Arriving:
    """A packet that was announced."""

    def __init__(self, source: int, packet: Packet, slot: int, payload: Pending[object]) -> None:
        self._source, self._packet, self._slot, self._payload = source, packet, slot, payload

    def done(self) -> bool:
        return self._payload.done()

    def result(self) -> Incoming:
        payload = self._payload.result()
        if self._slot == _NO_SLOT:
            return Incoming(self._packet, self._slot, self._source)
        return Incoming(replace(self._packet, payload=cast(Payload, payload)), self._slot, self._source)


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
        """What other parties must know; arguments as of a :class:`SendingEnd`, less the memory."""
        return Offer(
            address=self._address,
            slot_bytes=slot_bytes,
            memory=_kind(self._place),
            reach=self._transport.reach,
            details=self._transport.details(),
        )

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

    def receive(self, load_of: LoadOf, places_of: PlacesOf, check: Check, *, wait_s: float) -> Incoming | None:
        """The next packet of any source.

        Args:
            load_of: gives what is planned, for a packet that was announced.
            places_of: gives where the boxes of a direct load are to lie.
            check: raises if another party has failed.
            wait_s: how long to wait for one to be announced if none is; None is an answer.

        Raises:
            PartyFailedError: if a source has gone, or ``check`` raises.
            TransferError: if a packet was announced that is not planned.
        """
        patience = Patience(self._place.timeout_s, f"a packet from source ranks {sorted(self._links)[:8]}", check)
        self._begin_fetching(0.0 if self._arriving else wait_s, load_of, places_of, patience)
        for arriving in self._arriving:
            if arriving.done():
                self._arriving.remove(arriving)
                return arriving.result()
        return None

    @property
    def idle(self) -> bool:
        """Whether nothing that was announced is still on its way."""
        return not self._arriving

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

    def _begin_fetching(self, wait_s: float, load_of: LoadOf, places_of: PlacesOf, patience: Patience) -> None:
        """Begins to take every packet that was announced; waits up to ``wait_s`` for the first."""
        for key, _ in self._selector.select(wait_s):
            connection, wire = self._links[key.data]
            message = _decode_message(frames.receive(connection, patience))
            if isinstance(message, _Told):
                wire.begin(message.content)
                continue
            self._arriving.append(self._fetch(key.data, wire, message, load_of, places_of))

    def _fetch(self, source: int, wire: IncomingWire, head: _Head, load_of: LoadOf, places_of: PlacesOf) -> _Arriving:
        """Begins to take one packet."""
        packet = Packet(head.plan_digest, head.version, head.round, head.number, head.source, head.destination, (), b"")
        load = load_of(packet)
        planned = len(load.items), load.nbytes, load.direct
        announced = len(head.digests), head.nbytes, head.slot == _NO_SLOT
        if planned != announced:
            raise TransferError(
                f"source rank {source} announces {announced[0]} boxes, {announced[1]} bytes, direct: {announced[2]}, "
                f"in round {head.round}; the plan says {planned[0]}, {planned[1]}, {planned[2]}"
            )
        parts = tuple(Part(item.box, item.dtype, digest) for item, digest in zip(load.items, head.digests, strict=True))
        payload: Pending[object] = (
            wire.fetch_direct(load, places_of(load)) if load.direct else wire.fetch(head.slot, head.nbytes)
        )
        return _Arriving(source, replace(packet, parts=parts), head.slot, payload)

    def _accept(self, patience: Patience) -> socket.socket:
        while True:
            try:
                connection, _ = self._listener.accept()
                return frames.prepare(connection)
            except TimeoutError:
                patience.tick()


def _kind(place: Place) -> str:
    return place.device.partition(":")[0]


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
