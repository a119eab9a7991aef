"""ASGI types and JSON answers, for middleware."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_patches.refit.control.secret import GUARDED_HEADER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

GUARDED = (GUARDED_HEADER.encode(), secrets.token_hex(16).encode())
"""Header that shows a trainer that a server has a guard, and which of its URLs lead to the same server."""


async def read_body(receive: Receive, most: int) -> bytes:
    """The body of a request, up to slightly more than ``most`` bytes; a longer body fails to decode."""
    parts: list[bytes] = []
    while sum(map(len, parts)) <= most:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)


async def answer(send: Send, status: int, error: str | None, scheme: str = "refit", **found: Any) -> None:
    """Sends a complete answer.

    Args:
        send: ASGI callable to send with.
        status: HTTP status.
        error: what was wrong; None on success.
        scheme: how to authenticate, if the status is 401.
        found: what was asked for, on success.
    """
    content = json.dumps(found if error is None else {"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), GUARDED]
    headers += [(b"www-authenticate", scheme.encode())] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
