"""TCP, which works everywhere. Each link has a second connection for payloads, served by a thread on each side.

Sockets transfer the bytes straight from the source's slot to the destination's. It needs no torch.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing

import msgspec
import numpy as np

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Load, Reach
from megatron_patches.refit.memory.ports import Memory, Payload, Pending, bytes_in_place, host_bytes
from megatron_patches.refit.memory.staging import SLOTS
from megatron_patches.refit.transports import frames
from megatron_patches.refit.transports.base import IncomingWire, LinkEnd, OutgoingWire, Place, Transport
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.transports.worker import Worker


class _Address(msgspec.Struct):
    """Where a destination accepts a link's payload connection, and the secret that its source must send first."""

    host: str
    port: int
    secret: bytes


_decode_address = msgspec.msgpack.Decoder(_Address).decode


class TcpTransport(Transport):
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party runs.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        if place.device == "cpu":  # sockets read and write any memory of the host
            self.reach = Reach.CONTIGUOUS

    def outgoing(self, end: LinkEnd) -> TcpOutgoing:
        """Makes the payload connection."""
        address = _decode_address(frames.receive(end.connection, end.patience))
        try:
            connection = frames.prepare(socket.create_connection((address.host, address.port), timeout=30.0))
        except OSError as error:
            raise PartyFailedError(f"cannot reach {address.host}:{address.port}: {error}") from error
        frames.send_all(connection, address.secret, end.patience)
        return TcpOutgoing(connection, end, self._place)

    def incoming(self, end: LinkEnd) -> TcpIncoming:
        """Waits for the payload connection."""
        with frames.listen(self._place.host) as listener:
            frames.prepare(listener)
            secret = secrets.token_bytes(frames.SECRET_BYTES)
            address = _Address(self._place.host, listener.getsockname()[1], secret)
            frames.send(end.connection, msgspec.msgpack.encode(address), end.patience)
            with closing(frames.Callers(listener, secret)) as callers:
                return TcpIncoming(callers.next(end.patience), end, self._place)


class _Wire:
    """What both sides of a link have: the payload connection, slots, and a thread.

    Args:
        connection: the payload connection.
        end: the link.
        place: where this party runs.
        thread: name of the thread.
    """

    def __init__(self, connection: socket.socket, end: LinkEnd, place: Place, thread: str) -> None:
        self._connection, self._timeout_s, size = connection, place.timeout_s, end.slot_bytes
        self._lease = place.pool.lease(SLOTS * size, lambda nbytes: np.empty(nbytes, dtype=np.uint8))
        self.slots: Sequence[Payload] = [self._lease.buffer[at * size : (at + 1) * size] for at in range(SLOTS)]
        self._worker, self._is_closed = Worker(thread), False

    def close(self) -> None:
        """Closes the wire."""
        self._is_closed = True
        self._worker.close()
        self._connection.close()
        self._lease.release()

    def _patience(self, what: str) -> Patience:
        """Limits a wait of the thread, which ends when the wire is closed."""
        return Patience(self._timeout_s, what, self._check_open)

    def _check_open(self) -> None:
        if self._is_closed:
            raise PartyFailedError("the link was closed")


class TcpOutgoing(_Wire, OutgoingWire):
    """A source's side of a link.

    Args:
        connection: the payload connection.
        end: the link.
        place: where this party runs.
    """

    def __init__(self, connection: socket.socket, end: LinkEnd, place: Place) -> None:
        self._peer = end.peer - place.sources
        super().__init__(connection, end, place, f"refit-to-{self._peer}")
        self._under_way: list[Future[None]] = []

    def start(self, slot: int, payload: Payload) -> None:  # noqa: ARG002 - the slot does not matter
        """Queues the payload for sending."""
        self._send([payload])

    def start_direct(self, load: Load, memory: Memory) -> None:
        """Queues the boxes for sending, one after another."""
        self._send([bytes_in_place(item.read, memory) for item in load.items])

    def _send(self, payloads: Sequence[Payload]) -> None:
        what = f"destination rank {self._peer} to take a packet"

        def send() -> None:
            patience = self._patience(what)
            for payload in payloads:
                frames.send_all(self._connection, memoryview(host_bytes(payload)), patience)

        self._under_way.append(self._worker.submit(send))

    def check(self) -> None:
        """See :class:`OutgoingWire`."""
        for ended in [future for future in self._under_way if future.done()]:
            self._under_way.remove(ended)
            ended.result()


class TcpIncoming(_Wire, IncomingWire):
    """A destination's side of a link.

    Args:
        connection: the payload connection.
        end: the link.
        place: where this party runs.
    """

    def __init__(self, connection: socket.socket, end: LinkEnd, place: Place) -> None:
        self._peer = end.peer
        super().__init__(connection, end, place, f"refit-from-{end.peer}")

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Receives into this side's slot of the same number, which is free if the source's is."""
        payload = self.slots[slot][:nbytes]

        def receive() -> Payload:
            self._receive([payload])
            return payload

        return self._worker.submit(receive)

    def fetch_direct(self, load: Load, memory: Memory) -> Pending[object]:
        """Receives the boxes one after another."""
        payloads = [bytes_in_place(item.write, memory) for item in load.items]
        return self._worker.submit(lambda: self._receive(payloads))

    def _receive(self, payloads: Sequence[Payload]) -> None:
        patience = self._patience(f"a packet from source rank {self._peer}")
        for payload in payloads:
            frames.receive_into(self._connection, memoryview(host_bytes(payload)), patience)
