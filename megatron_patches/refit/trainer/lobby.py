"""Where other trainer ranks hear at once which engine begins to join, so that it need not wait for the next push.

The first rank announces, the others listen, each in a thread of its own. A rank that misses an announcement learns of
the engine in the next push. Only once, in prepare(), does the first rank wait until the others listen.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.z85 import decode as raw_key

from megatron_patches.refit.control.messages import TICK_S, Invitation, decode, endpoint
from megatron_patches.refit.control.rendezvous import bind_free_port
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer.push_orders import Newcomer

logger = logging.getLogger(__name__)

_LISTENS = b"\1"  # what an XPUB socket receives for each new subscriber
_LISTENING_S = 10.0  # for other ranks to listen, and for one connection to be set up
_PING_S = 10.0  # so that no firewall between two machines drops an idle connection
_MOST_BYTES = 1 << 20


class Announcer:
    """The first rank's side. Only ranks that know the invitation's token hear announcements.

    Args:
        host: address of this machine at which other ranks reach it.
        listeners: number of other ranks.

    Attributes:
        invitation: for :class:`Listener`.

    Raises:
        PartyFailedError: if ``host`` is not an address of this machine.
    """

    def __init__(self, host: str, listeners: int) -> None:
        self._host, self._missing = host, listeners
        self._context, self._lock = zmq.Context(), threading.Lock()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.xpub_verbose = True  # reports every subscriber
        self._socket.handshake_ivl = round(_LISTENING_S * 1000)
        self._socket.heartbeat_ivl = round(_PING_S * 1000)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        try:
            port = bind_free_port(self._socket, host)
        except PartyFailedError:
            self._context.destroy(linger=0)
            raise
        self.invitation = Invitation(host, port, raw_key(public).hex(), _LISTENING_S)

    def wait_for_all(self) -> None:
        """At the first call, waits up to 10 seconds until all other ranks listen. Logs if some do not."""
        deadline = time.monotonic() + _LISTENING_S
        with self._lock:
            while self._missing and self._socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                self._missing -= self._socket.recv() == _LISTENS
            if self._missing:
                logger.warning(
                    "refit: %d trainer ranks do not listen at %s after %g s; engines that are attached between two "
                    "pushes begin to join in the second one only. The option host must be an address of this machine",
                    self._missing,
                    self._host,
                    _LISTENING_S,
                )
            self._missing = 0

    def tell(self, newcomer: Newcomer) -> None:
        """Announces an engine. Any thread may call it."""
        with self._lock:
            if not self._context.closed:
                self._socket.send(msgspec.msgpack.encode(newcomer))

    def close(self) -> None:
        """Closes the socket. Listeners hear nothing more."""
        with self._lock:
            self._context.destroy(linger=0)


class Listener:
    """Another rank's side, which listens in a thread of its own.

    Args:
        invitation: from :class:`Announcer`.
        heard: called in a thread with each engine that is announced.
    """

    def __init__(self, invitation: Invitation, heard: Callable[[Newcomer], None]) -> None:
        self._invitation, self._heard, self._is_closed = invitation, heard, threading.Event()
        self._thread = threading.Thread(target=self._listen, name="refit-lobby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._is_closed.set()
        self._thread.join()

    def _listen(self) -> None:
        family, _, _, _, address = socket.getaddrinfo(self._invitation.host, 0, type=socket.SOCK_STREAM)[0]
        context = zmq.Context()
        try:
            subscriber = context.socket(zmq.SUB)
            subscriber.linger = 0
            subscriber.ipv6 = family is socket.AF_INET6
            subscriber.maxmsgsize = _MOST_BYTES
            subscriber.heartbeat_ivl = round(_PING_S * 1000)
            subscriber.curve_serverkey = bytes.fromhex(self._invitation.token)
            subscriber.curve_publickey, subscriber.curve_secretkey = zmq.curve_keypair()
            subscriber.subscribe(b"")
            subscriber.connect(endpoint(str(address[0]), self._invitation.port))
            while not self._is_closed.is_set():
                if subscriber.poll(round(TICK_S * 1000)):
                    self._heard(decode(subscriber.recv(), Newcomer))
        finally:
            context.destroy(linger=0)
