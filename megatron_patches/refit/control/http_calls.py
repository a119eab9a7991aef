"""The trainer's HTTP calls to one server. Errors name the server and quote its answer.

Calls ignore ``http_proxy``: weights bypass proxies too, and a proxy that times out would hide the result of a commit.
Redirects are not followed, so that no other server sees the secret.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.parse
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from megatron_patches.refit.control.credentials import HOW_TO_SHARE, Credentials
from megatron_patches.refit.control.secret import GUARDED_HEADER
from megatron_patches.refit.errors import RefitError

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20


class NotShownError(RefitError):
    """The server requires another secret."""


class NotFoundError(RefitError):
    """The server has no such route."""


class GoneError(RefitError):
    """What the call refers to has ended."""


class HttpCalls:
    """Calls one server.

    Args:
        url: its base URL, such as ``http://10.0.0.5:8000``.
        timeout_s: timeout of one call, in seconds.
        credentials: credentials to send.

    Attributes:
        url: the base URL without a trailing slash.
        server: identity of the server as reported by its guard; empty before the first answer, or without a guard.

    Raises:
        ValueError: if ``url`` is not an HTTP URL of a server.
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
            method: HTTP method.
            route: route below the base URL.
            body: JSON content to send; None for none.
            headers: headers in addition to the credentials.
            timeout_s: timeout in seconds; None for the default.

        Returns:
            The answer if it is a JSON object; otherwise an empty dict.

        Raises:
            NotShownError: if the server requires another secret.
            NotFoundError: if the server has no such route.
            GoneError: if what the call refers to has ended.
            RefitError: if the server cannot be reached, is too slow, or answers with an error or anything but JSON.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with closing(self.connect(timeout_s)) as connection:
            return self.ask(connection, method, route, body, headers or {})

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to the server, for several calls with a timeout of ``timeout_s`` seconds each.

        Raises:
            RefitError: if the server cannot be reached.
        """
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # the latter if the host cannot be a name, as in http://a..b
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
        """Calls a route over a connection; arguments, result and errors as in :meth:`call`."""
        content = None if body is None else json.dumps(body).encode()
        own = {"Content-Type": "application/json", **self._credentials.headers(), **headers}
        try:
            connection.request(method, f"{self._parts.path}/{route}", content, own)
            answer = connection.getresponse()
            said = _content(answer, float(connection.timeout or 0))
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
            lacks_secret = is_guarded and answer.getheader("www-authenticate") != "Bearer"  # otherwise the API key
            raise self._refusal(route, answer.status, said, lacks_secret=lacks_secret)
        try:
            found = json.loads(said) if said else {}
        except (ValueError, RecursionError) as error:  # the latter if it is nested too deeply
            raise RefitError(f"{self.url}/{route} answered no JSON but {_shown(said)}") from error
        if not is_guarded and isinstance(found, dict) and "world_size" in found:
            logger.warning(
                "refit: %s obeys whoever reaches it, so its workers join a trainer only if its operator allows that; "
                "start it with --middleware megatron_patches.refit.vllm.guard.RefitGuard",
                self.url,
            )
        return found if isinstance(found, dict) else {}

    def _refusal(self, route: str, status: int, said: bytes, *, lacks_secret: bool) -> RefitError:
        """The error for an answer with an error status. A 401 is about the secret if ``lacks_secret``."""
        message = f"{self.url}/{route} answered {status}: {_shown(said)}"
        if status == 401 and lacks_secret:
            return NotShownError(f"{message}; {self._credentials.describe()}; {HOW_TO_SHARE}")
        return {404: NotFoundError, 410: GoneError}.get(status, RefitError)(message)


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.path.isascii()
    except ValueError:  # for example a port that is not a number
        usable = False
    if "@" in url:  # not shown, because it may contain a password
        raise ValueError(
            "an engine URL has a user name or a password in it; give them as a header, such as "
            "'Authorization: Basic ...', in the file of --refit-headers-file (--headers-file of 'refit push')"
        )
    if not usable or parts.query or parts.fragment:
        raise ValueError(f"engine URL {url!r} must be like http://10.0.0.5:8000 or https://host/path")


def _content(answer: http.client.HTTPResponse, timeout_s: float) -> bytes:
    """The content of an answer. A socket's own time-out is that of each piece, and a stream has no last one.

    Raises:
        TimeoutError: if it has not ended in time.
        http.client.IncompleteRead: if it is cut off.
    """
    deadline = time.monotonic() + timeout_s
    content = bytearray()
    while piece := answer.read1(_PIECE_BYTES):
        content += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    if answer.length:
        raise http.client.IncompleteRead(bytes(content), answer.length)
    answer.close()  # so that its connection takes another request
    return bytes(content)


def _shown(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text[:500] or "no reason given"
