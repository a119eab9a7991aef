"""A destination's end of links: fetches announced packets, and returns slots once they have been unpacked.

The wires transfer the payload; see :mod:`megatron_patches.refit.transports.base`.
"""

from __future__ import annotations

import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing

import msgspec

from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError, TransferError
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.memory.packets import NO_SLOT, Packet, payload_bytes
from megatron_patches.refit.memory.ports import Done, Memory, Payload, Pending, Then
from megatron_patches.refit.transports import frames, messages
from megatron_patches.refit.transports.base import Check, IncomingWire, LinkEnd, Offer, Place, Transport
from megatron_patches.refit.transports.frames import Patience

LoadOf = Callable[[Packet], Load]
MemoryOf = Callable[[Load], Memory]


class ReceivingEnd:
    """The links of one destination rank.

    Args:
        place: where the rank runs.
        transport: makes the wires.
    """

    def __init__(self, place: Place, transport: Transport) -> None:
        self._place, self._transport = place, transport
        self._links: dict[int, tuple[socket.socket, IncomingWire]] = {}
        self._selector = selectors.DefaultSelector()
        self._secret = secrets.token_bytes(frames.SECRET_BYTES)
        self._stopped = False
        self._arriving: deque[tuple[Packet, Pending[Payload]]] = deque()  # announced packets, and what is on its way
        if transport.one_host:
            self._address = f"refit-{secrets.token_hex(12)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # A leading zero byte makes an abstract name: no file, and gone with the process.
            self._listener.bind(f"\0{self._address}")
            self._listener.listen(256)
        else:
            self._listener = frames.listen(place.host, 256)
            self._address = f"{place.host}:{self._listener.getsockname()[1]}"
        frames.prepare(self._listener)

    def offer(self, slot_bytes: int) -> Offer:
        """What other parties must know of this end; arguments as for ``sending.SendingEnd``, without the memory."""
        return Offer(
            address=self._address,
            slot_bytes=slot_bytes,
            memory=self._place.memory,
            reach=self._transport.reach,
            details=self._transport.details(),
            secret=self._secret,
            to_all=self._transport.together,
        )

    def connect(
        self, offers: Mapping[int, Offer], slots: Mapping[int, int], digests: Mapping[int, str], check: Check
    ) -> None:
        """Waits until every source that sends something has made its link; arguments as for ``sending.SendingEnd``.

        Raises:
            PlanMismatchError: if a source follows another plan.
            PartyFailedError: if a source does not connect in time, sends no hello, or is on a local socket and runs as
                another user.
        """
        self._transport.connect(offers, check)
        waiting = set(slots)
        with closing(frames.Callers(self._listener, self._secret)) as callers:
            while waiting:
                patience = Patience(self._place.timeout_s, f"links from source ranks {sorted(waiting)[:8]}", check)
                connection = callers.next(patience)
                try:
                    source, wire = self._link(connection, waiting, slots, digests, patience)
                except BaseException:
                    connection.close()
                    raise
                self._links[source] = connection, wire
                self._selector.register(connection, selectors.EVENT_READ, source)
                waiting.remove(source)

    def _link(
        self,
        connection: socket.socket,
        waiting: Collection[int],
        slots: Mapping[int, int],
        digests: Mapping[int, str],
        patience: Patience,
    ) -> tuple[int, IncomingWire]:
        """The source that has connected, and its wire."""
        frames.refuse_another_user(connection)
        try:
            hello = messages.decode_hello(frames.receive(connection, patience))
        except msgspec.MsgspecError as error:
            raise PartyFailedError(
                f"a source says {error} instead of hello; do all run the same version of this package?"
            ) from error
        agreed = digests.get(hello.source, "")
        if hello.plan_digest != agreed or hello.source not in waiting:
            raise PlanMismatchError(
                f"source rank {hello.source} follows plan {hello.plan_digest[:12]}, not {agreed[:12]}, or has a link "
                "already"
            )
        size = slots[hello.source]
        if hello.slot_bytes != size:
            raise PlanMismatchError(
                f"source rank {hello.source} has slots of {hello.slot_bytes} bytes for this link, not {size}"
            )
        end = LinkEnd(connection=connection, peer=hello.source, slot_bytes=size, patience=patience)
        return hello.source, self._transport.incoming(end)

    def receive(
        self, load_of: LoadOf, memory_of: MemoryOf, check: Check, *, wait_s: float
    ) -> tuple[Packet, Payload] | None:
        """The next packet that has arrived from any source, and its payload; None if there is none.

        The payload, empty for a direct load, is valid until the packet is released.

        Args:
            load_of: returns the planned load of an announced packet.
            memory_of: returns the storages that the boxes of a direct load belong to.
            check: raises if another party has failed.
            wait_s: how long to wait for an announcement if none is pending.

        Raises:
            PartyFailedError: if a source has gone, or ``check`` raises.
            TransferError: if a packet was announced that is not planned.
        """
        self._begin_fetching(0.0 if self._arriving else wait_s, load_of, memory_of, check)
        for place, (packet, payload) in enumerate(self._arriving):
            if payload.done():
                del self._arriving[place]
                return packet, payload.result()
        return None

    @property
    def awaited(self) -> str:
        """What the end is waiting for, for messages. Any thread may ask."""
        announced = sorted({packet.source for packet, _ in list(self._arriving)})
        if announced:
            return f"what source ranks {announced[:8]} have announced and not delivered"
        return f"a packet from any of source ranks {sorted(self._links)[:8]}"

    @property
    def on_their_way(self) -> int:
        """Number of packets that were announced and have not arrived."""
        return len(self._arriving)

    def release(self, packet: Packet, check: Check) -> None:
        """Returns the packet's slot to its source.

        Raises:
            PartyFailedError: if the source has gone.
        """
        patience = Patience(self._place.timeout_s, f"source rank {packet.source} to take a slot back", check)
        frames.send_all(self._links[packet.source][0], messages.SLOT.pack(packet.slot), patience)

    def stop(self) -> None:
        """Ends all transfers under way. Call :meth:`close` next."""
        if not self._stopped:
            self._stopped = True
            self._transport.stop()

    def close(self) -> None:
        """Closes all links, even if closing one fails."""
        self._listener.close()
        self._selector.close()
        with ExitStack() as stack:
            stack.callback(self._transport.close)
            for connection, wire in self._links.values():
                stack.callback(connection.close)
                stack.callback(wire.close)
            self._links.clear()
            self._arriving.clear()
            self.stop()

    def _begin_fetching(self, wait_s: float, load_of: LoadOf, memory_of: MemoryOf, check: Check) -> None:
        """Starts to fetch every announced packet. Waits up to ``wait_s`` for the first announcement."""
        for key, _ in self._selector.select(wait_s):
            connection, wire = self._links[key.data]
            patience = Patience(self._place.timeout_s, f"source rank {key.data} to tell what it sends", check)
            message = messages.decode_message(frames.receive(connection, patience))
            if isinstance(message, messages.Told):
                wire.begin(message.content, patience)
                frames.send_all(connection, messages.SLOT.pack(messages.TAKEN), patience)
                continue
            self._arriving.append(self._fetch(key.data, wire, message, load_of, memory_of))

    def _fetch(
        self, source: int, wire: IncomingWire, packet: Packet, load_of: LoadOf, memory_of: MemoryOf
    ) -> tuple[Packet, Pending[Payload]]:
        """Starts to fetch one packet. Returns it, and its payload, which is empty for a direct load."""
        if packet.source != source:
            raise TransferError(f"source rank {source} announces a packet of source rank {packet.source}")
        load, delta = load_of(packet), packet.delta
        if delta is not None and (load.direct or not 0 <= delta.changed <= load.nbytes // load.width):
            raise TransferError(
                f"source rank {source} announces {delta.changed} changed elements in packet {packet.number}, of "
                f"{load.nbytes // load.width}, direct: {load.direct}"
            )
        planned = len(load.items), payload_bytes(load, delta), load.direct
        announced = len(packet.digests), packet.nbytes, packet.slot == NO_SLOT
        if planned != announced:
            raise TransferError(
                f"source rank {source} announces {announced[0]} boxes, {announced[1]} bytes, direct: {announced[2]}, "
                f"in packet {packet.number}; the plan says {planned[0]}, {planned[1]}, {planned[2]}"
            )
        if load.direct:
            return packet, Then(wire.fetch_direct(load, memory_of(load)), lambda _: b"")
        return packet, wire.fetch(packet.slot, packet.nbytes) if packet.nbytes else Done(b"")
