"""The terms of ASGI, and answers in JSON, for middleware."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_patches.refit.secret import GUARDED_HEADER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

GUARDED = (GUARDED_HEADER.encode(), secrets.token_hex(16).encode())
"""The header by which a trainer sees that a server has a guard, and which of its names are of one server."""


async def answer(send: Send, status: int, error: str | None) -> None:
    """Sends a whole answer.

    Args:
        send: to whoever asked.
        status: of HTTP.
        error: what was wrong; None if nothing.
    """
    content = json.dumps({} if error is None else {"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), GUARDED]
    headers += [(b"www-authenticate", b"refit")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
