"""Messages to one party, sent by a thread of its own: a party that reads slowly delays nobody but itself."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time

from megatron_patches.refit import frames
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.frames import Patience

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20


class Outbox:
    """What is to be sent to a party, in order.

    A party that takes nothing of a message within the limit ends its connection: part of it may have been sent, after
    which the party could read nothing more. Whoever receives from the connection notices the end and reports it. One
    that goes on reading may take its time: to hundreds of parties one machine sends gigabytes.

    Args:
        connection: to the party; sends go on beside receives.
        name: of the party.
        limit_s: seconds that the party may take for a mebibyte.
    """

    def __init__(self, connection: socket.socket, name: str, limit_s: float) -> None:
        self._connection, self._name, self._limit_s = connection, name, limit_s
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="refit-outbox", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Send ``message`` after all that was put before; returns at once."""
        self._messages.put(message)

    def finish(self) -> None:
        """Send what was put so far and nothing more; returns at once."""
        self._messages.put(None)

    def close(self, deadline: float) -> None:
        """End the connection once all is sent, at ``deadline`` (of ``time.monotonic()``) at the latest."""
        self.finish()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        frames.end(self._connection)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                frames.send_length(self._connection, len(message), Patience(self._limit_s, self._name))
                for start in range(0, len(message), _PIECE_BYTES):
                    piece = memoryview(message)[start : start + _PIECE_BYTES]
                    frames.send_all(self._connection, piece, Patience(self._limit_s, self._name))
            except PartyFailedError as error:
                logger.debug("refit: cannot reach %s: %s", self._name, error)
                frames.end(self._connection)
                return
