"""Length-prefixed messages over a stream socket; every wait ends at a deadline, or when a peer fails."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Buffer, Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from megatron_patches.refit.errors import PartyFailedError

_LENGTH = struct.Struct("<Q")
_MOST_STRANGERS = 128  # connections without the secret that may be open at a time
LOOK_AROUND_S = 0.1
"""Interval, in seconds, at which a wait checks whether it should end."""
SECRET_BYTES = 16
"""Length of the secret that a new connection must send first."""

MOST_DESCRIPTORS = 64
"""File descriptors per message. Linux allows 253, and counts those under way against the sender's limit of open files.
"""

_CREDENTIALS = struct.Struct("=iII")  # SO_PEERCRED: process, user, group
_DESCRIPTOR = struct.Struct("=i")
_EXTRA_BYTES = socket.CMSG_LEN(MOST_DESCRIPTORS * _DESCRIPTOR.size)


class Patience:
    """Limits how long one wait may take.

    Args:
        timeout_s: seconds from now.
        what: what is awaited, for the error message; or a function that returns it.
        check: called at intervals while waiting; raises if the wait has become pointless.
    """

    def __init__(
        self, timeout_s: float, what: str | Callable[[], str], check: Callable[[], None] = lambda: None
    ) -> None:
        self._timeout_s, self._what, self._check = timeout_s, what, check
        self._deadline = time.monotonic() + timeout_s

    def tick(self) -> None:
        """Ends the wait at its deadline.

        Raises:
            PartyFailedError: at the deadline, or whatever the check raises.
        """
        self._check()
        if time.monotonic() > self._deadline:
            raise PartyFailedError(f"waited {self._timeout_s:.0f} s for {self._named}; a longer time-out is an option")

    def lost(self, reason: str) -> PartyFailedError:
        """The error for a connection that ended during this wait; raises the peer's own reason if it is known."""
        self._check()
        return PartyFailedError(f"lost the connection while waiting for {self._named}: {reason}")

    @property
    def _named(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()


def listen(host: str, backlog: int = 128) -> socket.socket:
    """Listens on a free port of a local address, IPv4 or IPv6.

    Raises:
        OSError: if the address is not local.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=backlog)


def prepare(connection: socket.socket) -> socket.socket:
    """Gives reads and writes a short timeout, and disables Nagle's algorithm."""
    connection.settimeout(LOOK_AROUND_S)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def refuse_another_user(connection: socket.socket) -> None:
    """Refuses a local socket's peer that runs as another user; sockets that are not local are not checked.

    A local listener's name is free once its process has ended, so that anyone on the host could take it.

    Raises:
        PartyFailedError: if the peer had another effective uid when it connected or began to listen.
    """
    if connection.family != socket.AF_UNIX:
        return
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    if uid != os.geteuid():
        raise PartyFailedError(
            f"the other end of a local socket runs as uid {uid}, this process as uid {os.geteuid()}; run trainer and "
            "engine as one user, or take the transport tcp"
        )


def end(connection: socket.socket) -> None:
    """Closes a connection or listener, and wakes any thread that waits on it."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _patiently[T](call: Callable[..., T], *args: Any, patience: Patience) -> T:
    """What a call of a socket from :func:`prepare` returns, once it does not time out."""
    while True:
        try:
            return call(*args)
        except TimeoutError:
            patience.tick()
        except OSError as error:
            raise patience.lost(str(error)) from error


def send(connection: socket.socket, message: Buffer, patience: Patience) -> None:
    """Sends one message.

    Raises:
        PartyFailedError: at the deadline, or if the peer has closed the connection.
    """
    send_all(connection, _LENGTH.pack(memoryview(message).nbytes), patience)
    send_all(connection, message, patience)


def send_all(connection: socket.socket, content: Buffer, patience: Patience) -> None:
    """Sends bytes without a length prefix; raises as :func:`send`."""
    rest = memoryview(content)
    while rest:
        rest = rest[_patiently(connection.send, rest, patience=patience) :]


def receive(connection: socket.socket, patience: Patience) -> bytearray:
    """The next message of an authenticated peer.

    Args:
        connection: from :func:`prepare`.
        patience: how long to wait.

    Raises:
        PartyFailedError: at the deadline, or if the peer has closed the connection.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, patience))
    return receive_exactly(connection, length, patience)


def receive_exactly(connection: socket.socket, length: int, patience: Patience) -> bytearray:
    """The next ``length`` bytes; raises as :func:`receive`."""
    buffer = bytearray(length)
    receive_into(connection, memoryview(buffer), patience)
    return buffer


def receive_into(connection: socket.socket, buffer: memoryview, patience: Patience) -> None:
    """Fills ``buffer`` with the next bytes; raises as :func:`receive`."""
    while buffer:
        count = _patiently(connection.recv_into, buffer, patience=patience)
        if not count:
            raise patience.lost("the peer closed it")
        buffer = buffer[count:]


def send_descriptors(connection: socket.socket, descriptors: Sequence[int], patience: Patience) -> None:
    """Sends file descriptors, at most :data:`MOST_DESCRIPTORS`, over a local socket; raises as :func:`send`."""
    _patiently(socket.send_fds, connection, [b"d"], descriptors, patience=patience)


def receive_descriptors(connection: socket.socket, count: int, patience: Patience) -> list[int]:
    """The next message's file descriptors, which child processes do not inherit, and the caller closes.

    Args:
        connection: from :func:`prepare`.
        count: how many the peer sends with :func:`send_descriptors`.
        patience: how long to wait.

    Raises:
        PartyFailedError: as :func:`receive`, and if fewer arrive.
    """
    # Not recv_fds, which ignores flags (Python 3.12).
    message, extra, flags, _ = _patiently(
        connection.recvmsg, 1, _EXTRA_BYTES, socket.MSG_CMSG_CLOEXEC, patience=patience
    )
    found = [
        descriptor
        for level, kind, content in extra
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(content)
    ]
    if message and len(found) == count and not flags & socket.MSG_CTRUNC:
        return found
    for descriptor in found:
        os.close(descriptor)
    if not message:
        raise patience.lost("the peer closed it")
    raise PartyFailedError(
        f"{len(found)} of {count} descriptors have come; has this process reached its limit of open files (ulimit -n)?"
    )


class Callers:
    """Accepts connections at a listener whose first :data:`SECRET_BYTES` bytes are the secret.

    Connections that send other bytes are closed. Silent ones do not block others, and only a limited number stays open.

    Args:
        listener: the listener, which stays open.
        secret: the secret.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytearray] = {}

    def next(self, patience: Patience) -> socket.socket:
        """The next connection that has sent the secret, set up by :func:`prepare`.

        Raises:
            PartyFailedError: when ``patience`` ends.
        """
        while True:
            for key, _ in self._selector.select(LOOK_AROUND_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif self._is_invited(connection := cast(socket.socket, key.fileobj)):
                    return connection
            patience.tick()

    def close(self) -> None:
        """Closes all connections that have not sent the secret."""
        for connection in list(self._said):
            self._drop(connection)
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection = prepare(self._listener.accept()[0])
        except OSError:  # too many open files, or the peer has gone; both may be over next time
            return
        if len(self._said) == _MOST_STRANGERS:
            self._drop(next(iter(self._said)))
        self._said[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _is_invited(self, connection: socket.socket) -> bool:
        """Reads from a connection. Returns whether it has now sent the secret; it is then no longer tracked."""
        said = self._said.get(connection)
        if said is None:  # it was closed for a newer one a moment ago
            return False
        try:
            more = connection.recv(SECRET_BYTES - len(said))
        except OSError:
            more = b""
        said += more
        if more and len(said) < SECRET_BYTES:
            return False
        if not secrets.compare_digest(said, self._secret):
            self._drop(connection)
            return False
        self._forget(connection)
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._said[connection]
