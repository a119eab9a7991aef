"""A paused server's word that it waits for its trainer, as long as it hears of it; the trainer's side.

[Note: leases] Before a trainer pauses a server, it takes a lease of it: from then on it must be heard of every few
seconds. If it is not, because it has died, hangs, or its machine or network is lost, the server helps itself
(:mod:`megatron_patches.refit.vllm.pause_lease`): its workers leave the trainer's session, with the weights that served
before, or the new ones where they have committed them; its prefix cache is emptied; it goes on. A trainer that comes
back later is told, and can neither pause the server nor commit to it before they have met again.
"""

from __future__ import annotations

import logging
import threading
from http.client import HTTPConnection

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.http_calls import GoneError, HttpCalls, NotFoundError

logger = logging.getLogger(__name__)

ROUTE = "refit/lease"
"""Route of a server by which leases are taken, renewed and given back."""
HEADER = "x-refit-lease"
"""Header of a request to pause: token of the session, for which there must be a lease."""
EMPTY_CACHES = "reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""Route that empties the prefix caches of a server that is paused, whatever holds them."""
RESUME = "wake_up?tags=scheduling"
"""Route that ends a pause, whichever route began it."""

DEFAULT_LEASE_S = 30.0
LEAST_LEASE_S = 1.0
"""How long a paused server waits for a sign of life of its trainer: by default, and at least."""

_PER_LEASE = 4.0  # renewals
_MOST_S = 2.0  # between renewals; vLLM closes a connection that is silent for 5 seconds
_ANSWER_S = 10.0
_TRIES = 3


class Lease:
    """Leases of one server.

    Args:
        http: of the server.
    """

    def __init__(self, http: HttpCalls) -> None:
        self._http = http
        self._asking = threading.Lock()  # one request at a time, in the order of what they mean
        self._token = ""
        self._connection: HTTPConnection | None = None
        self._state = threading.Lock()  # of what follows; nobody waits for the server while he has it
        self._held: threading.Event | None = None  # set when the lease that is held is to be renewed no more

    def take(self, token: str, seconds: float) -> None:
        """Takes a lease, and renews it until :meth:`give_back` or :meth:`drop`.

        Args:
            token: of the session.
            seconds: how long the server waits for a sign of life.

        Raises:
            RefitError: if the server does not grant it.
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
        """The server goes on, and needs to hear no more."""
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
        """Renews it no more: if the server is still paused, it helps itself. Waits for nothing.

        Returns:
            Whether there was a lease.
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
                except RefitError as error:  # such as a server that is busy; the next one may reach it
                    logger.debug("refit: cannot renew the lease: %s", error)
        with self._asking:
            if self._held is None:  # nobody has taken another one since
                self._disconnect()

    def _ask(self, seconds: float) -> None:
        """Asks for a lease, always over the same connection, which leads to the same one of several API servers."""
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
