"""Length-prefixed messages over a stream socket; every wait ends at a deadline, or when a peer fails."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Buffer, Callable
from contextlib import suppress

from megatron_patches.refit.errors import PartyFailedError

_LENGTH = struct.Struct("<Q")
_LOOK_AROUND_S = 0.1  # how often a wait looks whether it should end
_INTRODUCTION_S = 10.0  # from a connection to the first message on it


class Patience:
    """How long one wait may take.

    Args:
        timeout_s: seconds from now.
        what: what is waited for, for the message; or what gives it once it is needed.
        check: called now and then while waiting; raises if the wait has become pointless.
    """

    def __init__(
        self, timeout_s: float, what: str | Callable[[], str], check: Callable[[], None] = lambda: None
    ) -> None:
        self._timeout_s, self._what, self._check = timeout_s, what, check
        self._deadline = time.monotonic() + timeout_s

    def tick(self) -> None:
        """Ends the wait if it is time.

        Raises:
            PartyFailedError: at the deadline, or whatever the check raises.
        """
        self._check()
        if time.monotonic() > self._deadline:
            raise PartyFailedError(f"waited {self._timeout_s:.0f} s for {self._named}; a longer time-out is an option")

    def lost(self, reason: str) -> PartyFailedError:
        """The error for a connection that ended during this wait; the peer's own reason if it is known."""
        self._check()
        return PartyFailedError(f"lost the connection while waiting for {self._named}: {reason}")

    @property
    def _named(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()


def listen(host: str, backlog: int = 128) -> socket.socket:
    """Listens on a free port of an address of this machine, of whichever IP version.

    Raises:
        OSError: if it is none.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=backlog)


def prepare(connection: socket.socket) -> socket.socket:
    """Makes reads and writes return now and then, and small messages leave at once."""
    connection.settimeout(_LOOK_AROUND_S)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def end(connection: socket.socket) -> None:
    """Closes a connection, or what listens for some, whichever thread waits at it: that one is woken at once."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def send(connection: socket.socket, message: Buffer, patience: Patience) -> None:
    """Sends one message.

    Raises:
        PartyFailedError: at the deadline, or if the peer has closed the connection.
    """
    send_length(connection, memoryview(message).nbytes, patience)
    send_all(connection, message, patience)


def send_length(connection: socket.socket, nbytes: int, patience: Patience) -> None:
    """Begins a message of so many bytes, which are to be sent next; raises as :func:`send` does."""
    send_all(connection, _LENGTH.pack(nbytes), patience)


def send_all(connection: socket.socket, content: Buffer, patience: Patience) -> None:
    """Sends bytes without their length; raises as :func:`send` does."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except TimeoutError:
            patience.tick()
        except OSError as error:
            raise patience.lost(str(error)) from error


def receive(connection: socket.socket, patience: Patience, *, most_bytes: int | None = None) -> bytearray:
    """The next message.

    Args:
        connection: from :func:`prepare`.
        patience: how long to wait.
        most_bytes: the longest message to take, from whoever is not known yet; None for any.

    Raises:
        PartyFailedError: at the deadline, if the peer has closed the connection, or if the message is longer.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, patience))
    if most_bytes is not None and length > most_bytes:
        raise patience.lost(f"the peer announces a message of {length} bytes")
    return receive_exactly(connection, length, patience)


def receive_first(connection: socket.socket, patience: Patience, most_bytes: int) -> bytearray | None:
    """The first message on a connection that anybody may have made, or None for a stranger's.

    Args:
        connection: from :func:`prepare`.
        patience: of the wait for whoever is expected, of which a stranger takes a little.
        most_bytes: the longest message of whoever is expected.

    Raises:
        PartyFailedError: when ``patience`` ends.
    """
    try:
        return receive(connection, Patience(_INTRODUCTION_S, "an introduction", patience.tick), most_bytes=most_bytes)
    except PartyFailedError:
        patience.tick()
        return None


def receive_exactly(connection: socket.socket, length: int, patience: Patience) -> bytearray:
    """The next ``length`` bytes; raises as :func:`receive` does."""
    buffer = bytearray(length)
    receive_into(connection, memoryview(buffer), patience)
    return buffer


def receive_into(connection: socket.socket, buffer: memoryview, patience: Patience) -> None:
    """Fills ``buffer`` with the next bytes; raises as :func:`receive` does."""
    while buffer:
        try:
            count = connection.recv_into(buffer)
        except TimeoutError:
            patience.tick()
            continue
        except OSError as error:
            raise patience.lost(str(error)) from error
        if not count:
            raise patience.lost("the peer closed it")
        buffer = buffer[count:]
