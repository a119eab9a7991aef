"""The trainer's calls of one server over HTTP; whatever comes back, an error says which server and what it said.

Servers are called directly, whatever ``http_proxy`` says: weights take no proxy either, and one that gives up early
would hide how a commit went. Redirects are not followed: nobody else must be shown the secret.
"""

from __future__ import annotations

import http.client
import json
import logging
import urllib.parse
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from megatron_patches.refit.credentials import HOW_TO_SHARE, Credentials
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.secret import GUARDED_HEADER

logger = logging.getLogger(__name__)


class NotShownError(RefitError):
    """The server wants to be shown another secret."""


class NotFoundError(RefitError):
    """The server has no such route."""


class GoneError(RefitError):
    """What the call is about has ended."""


class HttpCalls:
    """Calls one server.

    Args:
        url: its base, such as ``http://10.0.0.5:8000``.
        timeout_s: seconds that one call may take.
        credentials: what it is shown.

    Attributes:
        url: the same, without a slash at its end.
        server: which server its guard says it is, whatever it is called; empty before the first answer, or without one.

    Raises:
        ValueError: if it is no HTTP URL of a server.
    """

    def __init__(self, url: str, timeout_s: float, credentials: Credentials) -> None:
        _check_url(url)
        self.url = url.rstrip("/")
        self.server = ""
        self._timeout_s, self._credentials = timeout_s, credentials
        self._parts = urllib.parse.urlsplit(self.url)

    def call(
        self,
        method: str,
        route: str,
        body: dict[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Calls a route.

        Args:
            method: of HTTP.
            route: below the base.
            body: what to send, as JSON; None for nothing.
            headers: to send, beside the credentials.
            timeout_s: seconds that it may take; None for as long as any.

        Returns:
            What it answers, if that is a JSON object; otherwise nothing.

        Raises:
            NotShownError: if it wants to be shown another secret.
            NotFoundError: if it has no such route.
            GoneError: if what the call is about has ended.
            RefitError: if it cannot be reached, answers with an error or something else than JSON, or takes too long.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with closing(self.connect(timeout_s)) as connection:
            return self.ask(connection, method, route, body, headers or {})

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to the server, for several calls, each of which may take ``timeout_s`` seconds.

        Raises:
            RefitError: if it cannot be reached.
        """
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise RefitError(f"cannot reach {self.url}: {error}") from error
        return connection

    def ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        route: str,
        body: dict[str, Any] | None,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        """Calls a route over a connection; arguments, result and errors as of :meth:`call`."""
        content = None if body is None else json.dumps(body).encode()
        own = {"Content-Type": "application/json", **self._credentials.headers(), **headers}
        try:
            connection.request(method, f"{self._parts.path}/{route}", content, own)
            answer = connection.getresponse()
            said = answer.read()
        except TimeoutError as error:
            raise RefitError(
                f"{self.url}/{route} gave no answer within {connection.timeout:g} s; where it waits for requests to "
                "end, a longer time-out, or another pause than 'wait', is an option"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RefitError(f"lost the connection to {self.url}/{route}: {error or type(error).__name__}") from error
        self.server = answer.getheader(GUARDED_HEADER, "")
        is_guarded = bool(self.server)
        if not 200 <= answer.status < 300:
            raise self._refusal(route, answer.status, said, is_guarded=is_guarded)
        try:
            found = json.loads(said) if said else {}
        except ValueError as error:
            raise RefitError(f"{self.url}/{route} answered no JSON but {_shown(said)}") from error
        if not is_guarded and isinstance(found, dict) and "world_size" in found:
            logger.warning(
                "refit: %s obeys whoever reaches it, so its workers join a trainer only if its operator allows that; "
                "start it with --middleware megatron_patches.refit.vllm.guard.RefitGuard",
                self.url,
            )
        return found if isinstance(found, dict) else {}

    def _refusal(self, route: str, status: int, said: bytes, *, is_guarded: bool) -> RefitError:
        """What an answer that is an error means."""
        message = f"{self.url}/{route} answered {status}: {_shown(said)}"
        if status == 401 and is_guarded:
            return NotShownError(f"{message}; {self._credentials.describe()}; {HOW_TO_SHARE}")
        return {404: NotFoundError, 410: GoneError}.get(status, RefitError)(message)


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # such as a port that is no number
        usable = False
    if "@" in url:  # not shown, as what comes before may be a password
        raise ValueError(
            "an engine URL has a user name or a password in it; give them as a header, such as "
            "'Authorization: Basic ...', in the file of --refit-headers-file (--headers-file of 'refit push')"
        )
    if not usable or parts.query or parts.fragment:
        raise ValueError(f"engine URL {url!r} must be like http://10.0.0.5:8000 or https://host/path")


def _shown(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text[:500] or "no reason given"
