"""Passes file descriptors to other processes on one host. Clients request them by number and send a token.

Descriptors go through a local socket, whose name is not in the file system and disappears with the process. They go in
small batches, so that neither side has many open at a time. The server runs in its own thread. Clients wait no longer
than their patience.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import msgspec

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.frames import Patience, prepare

BATCH = 64
"""Descriptors per message; Linux allows 253."""

_TOKEN_BYTES = 16
_NUMBER = struct.Struct("<Q")
_DESCRIPTOR = struct.Struct("=i")
_EXTRA_BYTES = socket.CMSG_LEN(BATCH * _DESCRIPTOR.size)
_GIVEN, _REFUSED = b"g", b"r"  # first byte of an answer
_ANSWER_BYTES = 4096
_BACKLOG = 256
_RETRY_S = 0.01  # between tries while the listener's backlog is full, or no more files can be opened
_JOIN_S = 10.0  # for opening one file while the server closes


class Counter(msgspec.Struct, frozen=True):
    """Where descriptors can be requested.

    Attributes:
        address: name of the socket.
        token: secret that requests must contain.
    """

    address: str
    token: bytes


class DescriptorServer:
    """Provides descriptors until it is closed.

    Args:
        give: opens the file of a number and returns its descriptor, which is closed after it was sent. Called in
            another thread. Its errors are sent to the client.

    Attributes:
        counter: what clients need to know.
    """

    def __init__(self, give: Callable[[int], int]) -> None:
        self._give = give
        self.counter = Counter(f"refit-{secrets.token_hex(12)}", secrets.token_bytes(_TOKEN_BYTES))
        # Preserves messages, each with the descriptors that were sent along.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.counter.address}")
        self._listener.listen(_BACKLOG)
        self._bell = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._serve, name="refit-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server. Waiting clients lose their connection. May be called more than once.

        Raises:
            PartyFailedError: if a file is being opened and does not open in time.
        """
        if self._bell < 0:
            return
        os.eventfd_write(self._bell, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise PartyFailedError(f"memory that another process has asked for did not open within {_JOIN_S:.0f} s")
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._bell)
        self._bell = -1

    def _serve(self) -> None:
        """Answers requests. Never waits for a single client, so that none can block the others."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._bell:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._answer(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the client has gone
            return
        except OSError:  # for example too many open files, which may pass; the client is still waiting
            time.sleep(_RETRY_S)
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        try:
            request = connection.recv(_TOKEN_BYTES + BATCH * _NUMBER.size + 1)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        token, numbers = request[:_TOKEN_BYTES], request[_TOKEN_BYTES:]
        # Reveal nothing to an unauthenticated client, not even the reason.
        if not hmac.compare_digest(token, self.counter.token) or not numbers or len(numbers) % _NUMBER.size:
            self._drop(connection)
            return
        try:
            self._hand_over(connection, [number for (number,) in _NUMBER.iter_unpack(numbers)])
        except Exception as error:  # noqa: BLE001 - the client must know
            words = f"{type(error).__name__}: {error}".encode()[: _ANSWER_BYTES - 1]
            with suppress(OSError):
                connection.send(_REFUSED + words)

    def _hand_over(self, connection: socket.socket, numbers: Sequence[int]) -> None:
        opened: list[int] = []
        with ExitStack() as closing:
            for number in numbers:
                opened.append(self._give(number))
                closing.callback(os.close, opened[-1])
            socket.send_fds(connection, [_GIVEN], opened)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()


def take_descriptors(
    counter: Counter, numbers: Sequence[int], use: Callable[[int, int], None], patience: Patience
) -> None:
    """Requests descriptors, and closes each after its use.

    Args:
        counter: the server.
        numbers: numbers of the descriptors.
        use: called with each number and descriptor, in order.
        patience: limits how long all of it may take.

    Raises:
        PartyFailedError: if the server has gone, refuses, or does not answer in time; also whatever ``use`` raises.
    """
    if not numbers:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        prepare(connection)
        _dial(connection, counter, patience)
        for at in range(0, len(numbers), BATCH):
            batch = numbers[at : at + BATCH]
            descriptors = _ask(connection, counter.token, batch, patience)
            try:
                for number, descriptor in zip(batch, descriptors, strict=True):
                    use(number, descriptor)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def _dial(connection: socket.socket, counter: Counter, patience: Patience) -> None:
    while True:
        try:
            connection.connect(f"\0{counter.address}")
        except BlockingIOError:
            time.sleep(_RETRY_S)
            patience.tick()
        except OSError as error:
            raise patience.lost(str(error)) from error
        else:
            return


def _ask(connection: socket.socket, token: bytes, numbers: Sequence[int], patience: Patience) -> list[int]:
    """The descriptors of one batch. The caller closes them."""
    request = token + b"".join(map(_NUMBER.pack, numbers))
    while True:
        try:
            connection.send(request)
            break
        except TimeoutError:
            patience.tick()
        except OSError as error:
            raise patience.lost(str(error)) from error
    while True:
        try:
            # Not recv_fds, which ignores flags (Python 3.12).
            answer, extra, flags, _ = connection.recvmsg(_ANSWER_BYTES, _EXTRA_BYTES, socket.MSG_CMSG_CLOEXEC)
            break
        except TimeoutError:
            patience.tick()
        except OSError as error:
            raise patience.lost(str(error)) from error
    found = [
        descriptor
        for level, kind, content in extra
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(content)
    ]
    if answer == _GIVEN and len(found) == len(numbers) and not flags & socket.MSG_CTRUNC:
        return found
    for descriptor in found:
        os.close(descriptor)
    if not answer:
        raise patience.lost("the peer closed it")
    if answer.startswith(_REFUSED):
        raise PartyFailedError(f"the other side cannot hand out its memory: {answer[1:].decode(errors='replace')}")
    raise PartyFailedError(
        f"{len(found)} of {len(numbers)} descriptors have come; has this process reached its limit of open files "
        "(ulimit -n)?"
    )
