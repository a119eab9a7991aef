"""Leases of a pause, the trainer's side: a paused server waits for its trainer only while the trainer renews a lease.

[Note: leases] Before a trainer pauses a server, it takes a lease, which it must renew every few seconds. If it does
not, because it has died or hangs, or its machine or network is lost, the server resumes by itself
(:mod:`megatron_patches.refit.vllm.pause_lease`): its workers leave the trainer's session, with the old weights, or
the new ones if they have been committed. Its prefix cache is emptied, and requests continue. A trainer that returns
later is refused: it can neither pause the server nor commit to it until it has joined it again.
"""

from __future__ import annotations

import logging
import threading
from http.client import HTTPConnection

from megatron_patches.refit.control.http_calls import GoneError, HttpCalls, NotFoundError
from megatron_patches.refit.errors import RefitError

logger = logging.getLogger(__name__)

ROUTE = "refit/lease"
"""Route of a server at which leases are taken, renewed and returned."""
LEASE_HEADER = "x-refit-lease"
"""Header of a request to pause: token of the session, which must have a lease."""
RESUMES = "x-refit-resumes"
"""Header of a request to resume: token of the session that ends its pause, not that of another one."""
EMPTY_CACHES = "reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""Route that empties all prefix caches of a paused server, even those in use."""
EMPTY_ENCODER_CACHES = "reset_encoder_cache"
"""Route that empties the caches of what encoders of images or sounds have computed, which no request may use."""
RESUME = "wake_up?tags=scheduling"
"""Route that ends a pause, whichever route began it."""

DEFAULT_LEASE_S = 30.0
LEAST_LEASE_S = 1.0
"""How long a paused server waits for its trainer to renew the lease: default and minimum, in seconds."""

_PER_LEASE = 4.0  # renewals per lease
_MOST_S = 2.0  # longest time between renewals; vLLM closes connections that are idle for 5 seconds
_ANSWER_S = 10.0
_TRIES = 3


class ServerLease:
    """Leases of one server.

    Args:
        http: calls to the server.
    """

    def __init__(self, http: HttpCalls) -> None:
        self._http = http
        self._asking = threading.Lock()  # one request at a time, so that requests stay in order
        self._token = ""
        self._connection: HTTPConnection | None = None
        self._state = threading.Lock()  # guards the next attribute; never held while waiting for the server
        self._held: threading.Event | None = None  # set when the current lease is no longer renewed

    def take(self, token: str, seconds: float) -> None:
        """Takes a lease, and renews it until :meth:`give_back` or :meth:`drop`.

        Args:
            token: token of the session.
            seconds: how long the server waits for a renewal.

        Raises:
            RefitError: if the server does not grant the lease.
        """
        self.drop()
        with self._asking:
            self._disconnect()
            self._token = token
            held = threading.Event()
            with self._state:
                self._held = held
            try:
                self._ask(seconds)
            except NotFoundError:  # no guard
                self.drop()
                logger.warning("refit: %s stays paused if this process dies now, as it has no guard", self._http.url)
                return
            except BaseException:
                self.drop()
                raise
        name = f"refit-lease-{self._http.url}"
        threading.Thread(target=self._renew, args=(held, seconds), name=name, daemon=True).start()

    def give_back(self) -> None:
        """Returns the lease after the server has resumed."""
        if not self.drop():
            return
        with self._asking:
            for _ in range(_TRIES):
                try:
                    self._ask(0.0)
                    break
                except RefitError as error:
                    logger.debug("refit: cannot give the lease back: %s", error)
            self._disconnect()

    def drop(self) -> bool:
        """Stops renewing the lease: if the server is still paused, it resumes by itself. Does not block.

        Returns:
            Whether a lease was held.
        """
        with self._state:
            held, self._held = self._held, None
        if held is not None:
            held.set()
        return held is not None

    def _renew(self, held: threading.Event, seconds: float) -> None:
        while not held.wait(min(seconds / _PER_LEASE, _MOST_S)):
            with self._asking:
                if held.is_set():
                    break
                try:
                    self._ask(seconds)
                except GoneError as error:
                    logger.warning("refit: %s", error)
                    return
                except RefitError as error:  # for example a busy server; the next renewal may succeed
                    logger.debug("refit: cannot renew the lease: %s", error)
        with self._asking:
            if self._held is None:  # no other lease was taken since
                self._disconnect()

    def _ask(self, seconds: float) -> None:
        """Sends a lease request, always over one connection, so that it reaches the same one of several API servers."""
        if self._connection is None:
            self._connection = self._http.connect(_ANSWER_S)
        try:
            self._http.ask(self._connection, "POST", ROUTE, {"token": self._token, "seconds": seconds}, {})
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
