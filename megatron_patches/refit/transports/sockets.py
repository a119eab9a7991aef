"""Links between processes: TCP, which reaches everywhere, and shared memory on one host.

Both send a packet's description over a stream socket. With ``tcp`` the payload follows on the same socket. With
``shm`` it lies in one of two slots of an anonymous memory file whose descriptor was passed when the link was made, so
one packet can be filled while the other is read; nothing is left behind in the file system, however the processes
end. Neither needs torch, so the two sides may run different versions of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError, PlanMismatchError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.packets import Packet
from megatron_patches.refit.plan import Plan
from megatron_patches.refit.transports.base import Check, TransportName

_SLOTS = 2
_NO_CHECK: Check = lambda: None  # noqa: E731 - a constant with a type


class _Hello(msgspec.Struct):
    """The first message on a link."""

    source: int
    plan_digest: str
    slot_bytes: int


class _Head(msgspec.Struct):
    """What precedes a payload."""

    packet: Packet
    nbytes: int
    slot: int


_decode_hello = msgspec.msgpack.Decoder(_Hello).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


def packet_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """The most bytes that one packet of each (source, destination) carries."""
    sizes: dict[tuple[int, int, int], int] = {}
    for item in plan.transfers:
        key = item.round, item.source, item.destination
        sizes[key] = sizes.get(key, 0) + item.nbytes
    most: dict[tuple[int, int], int] = {}
    for (_, source, destination), size in sizes.items():
        most[source, destination] = max(most.get((source, destination), 0), size)
    return most


class SocketReceiver:
    """The receiving end of one destination rank.

    Args:
        transport: how payloads travel.
        host: address to listen on, for TCP.
        timeout_s: seconds that one wait may take.
    """

    def __init__(self, transport: TransportName, host: str, timeout_s: float) -> None:
        self._shared = transport is TransportName.SHM
        self._timeout_s = timeout_s
        self._links: dict[int, _IncomingLink] = {}
        if self._shared:
            self.address = f"refit-{secrets.token_hex(12)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # A leading zero byte: a name that is no file and goes with the process.
            self._listener.bind(f"\0{self.address}")
            self._listener.listen()
        else:
            self._listener = socket.create_server((host, 0))
            self.address = f"{host}:{self._listener.getsockname()[1]}"
        frames.prepare(self._listener)

    def accept(self, sources: list[int], plan_digest: str, check: Check) -> None:
        """Waits until every one of ``sources`` has made its link.

        Raises:
            PlanMismatchError: if one follows another plan.
            PartyFailedError: if one does not come in time.
        """
        waiting = set(sources)
        while waiting:
            patience = Patience(self._timeout_s, f"links from source ranks {sorted(waiting)[:8]}", check)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                patience.tick()
                continue
            frames.prepare(connection)
            hello = _decode_hello(frames.receive(connection, patience))
            if hello.plan_digest != plan_digest or hello.source not in waiting:
                connection.close()
                raise PlanMismatchError(
                    f"source rank {hello.source} follows plan {hello.plan_digest[:12]}, not {plan_digest[:12]}, or has "
                    "a link already"
                )
            memory = _receive_memory(connection, hello.slot_bytes, patience) if self._shared else None
            self._links[hello.source] = _IncomingLink(connection, memory, hello.slot_bytes)
            waiting.remove(hello.source)

    @contextmanager
    def receive(self, source: int, check: Check) -> Iterator[Packet]:
        """See :class:`megatron_patches.refit.transports.base.ReceivingEnd`."""
        patience = Patience(self._timeout_s, f"a packet from source rank {source}", check)
        with self._links[source].receive(patience) as packet:
            yield packet

    def close(self) -> None:
        """Ends all links."""
        self._listener.close()
        for link in self._links.values():
            link.close()


class _IncomingLink:
    def __init__(self, connection: socket.socket, memory: mmap.mmap | None, slot_bytes: int) -> None:
        self._connection, self._memory, self._slot_bytes = connection, memory, slot_bytes

    @contextmanager
    def receive(self, patience: Patience) -> Iterator[Packet]:
        head = _decode_head(frames.receive(self._connection, patience))
        if self._memory is None:
            yield replace(head.packet, payload=bytes(frames.receive_exactly(self._connection, head.nbytes, patience)))
        else:
            start = head.slot * self._slot_bytes
            with memoryview(self._memory) as whole, whole[start : start + head.nbytes] as payload:
                # A copy, so that nothing refers to the mapping after the context.
                yield replace(head.packet, payload=bytes(payload))
        frames.send(self._connection, bytes([head.slot]), patience)

    def close(self) -> None:
        self._connection.close()
        if self._memory is not None:
            self._memory.close()


class SocketSender:
    """The sending end of one source rank.

    Args:
        transport: how payloads travel.
        rank: this rank, as a source.
        plan: the plan.
        addresses: of all destinations, by rank.
        timeout_s: seconds that one wait may take.
        check: raises if another party has failed.

    Raises:
        PartyFailedError: if a destination cannot be reached in time.
    """

    def __init__(
        self,
        transport: TransportName,
        rank: int,
        plan: Plan,
        addresses: dict[int, str],
        timeout_s: float,
        check: Check = _NO_CHECK,
    ) -> None:
        self._timeout_s = timeout_s
        self._links: dict[int, _OutgoingLink] = {}
        for (source, destination), nbytes in sorted(packet_bytes(plan).items()):
            if source == rank:
                patience = Patience(timeout_s, f"a link to destination rank {destination}", check)
                hello = _Hello(rank, plan.digest, nbytes if transport is TransportName.SHM else 0)
                self._links[destination] = _OutgoingLink(transport, addresses[destination], hello, patience)

    def send(self, packet: Packet, check: Check) -> None:
        """See :class:`megatron_patches.refit.transports.base.SendingEnd`."""
        patience = Patience(self._timeout_s, f"room for a packet to destination rank {packet.destination}", check)
        self._links[packet.destination].send(packet, patience)

    def close(self) -> None:
        """Ends all links."""
        for link in self._links.values():
            link.close()


class _OutgoingLink:
    def __init__(self, transport: TransportName, address: str, hello: _Hello, patience: Patience) -> None:
        self._slot_bytes = hello.slot_bytes
        self._memory: mmap.mmap | None = None
        self._free = list(range(_SLOTS))
        if transport is TransportName.SHM:
            self._connection = frames.prepare(_dial_local(address, patience))
        else:
            host, _, port = address.rpartition(":")
            self._connection = frames.prepare(_dial_tcp(host, int(port), patience))
        frames.send(self._connection, msgspec.msgpack.encode(hello), patience)
        if transport is TransportName.SHM:
            self._memory = _send_memory(self._connection, hello.slot_bytes)

    def send(self, packet: Packet, patience: Patience) -> None:
        if not self._free:
            self._free.append(frames.receive(self._connection, patience)[0])
        slot = self._free.pop(0)
        nbytes = len(packet.payload)
        if self._memory is not None:
            start = slot * self._slot_bytes
            self._memory[start : start + nbytes] = packet.payload
        head = _Head(replace(packet, payload=b""), nbytes, slot)
        frames.send(self._connection, msgspec.msgpack.encode(head), patience)
        if self._memory is None:
            frames.send_all(self._connection, packet.payload, patience)

    def close(self) -> None:
        self._connection.close()
        if self._memory is not None:
            self._memory.close()


def _dial_local(address: str, patience: Patience) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address}")
    except OSError as error:
        connection.close()
        raise PartyFailedError(
            f"cannot reach {address} on this machine ({error}); shared memory needs all parties on one host, "
            "use the tcp transport otherwise"
        ) from error
    patience.tick()
    return connection


def _dial_tcp(host: str, port: int, patience: Patience) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), timeout=30.0)
    except OSError as error:
        raise PartyFailedError(f"cannot reach {host}:{port}: {error}") from error
    patience.tick()
    return connection


def _send_memory(connection: socket.socket, slot_bytes: int) -> mmap.mmap:
    """Makes the slots and passes them to the peer."""
    handle = os.memfd_create("refit")
    try:
        os.ftruncate(handle, max(1, _SLOTS * slot_bytes))
        memory = mmap.mmap(handle, max(1, _SLOTS * slot_bytes))
        socket.send_fds(connection, [b"m"], [handle])
    finally:
        os.close(handle)
    return memory


def _receive_memory(connection: socket.socket, slot_bytes: int, patience: Patience) -> mmap.mmap:
    """The slots that the peer made."""
    handles: list[int] = []
    while not handles:
        with suppress(TimeoutError):
            message, handles, _, _ = socket.recv_fds(connection, 1, 1)
            if not message:
                raise patience.lost("the peer closed it")
        patience.tick()
    try:
        return mmap.mmap(handles[0], max(1, _SLOTS * slot_bytes), access=mmap.ACCESS_READ)
    finally:
        os.close(handles[0])
