"""What a paused server does when its trainer falls silent; see [Note: leases].

It takes the same steps as the trainer would, through the same routes, so that other middleware sees them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_patches.refit.control.lease import EMPTY_CACHES, EMPTY_ENCODER_CACHES, RESUME
from megatron_patches.refit.control.messages import LONGEST_TIMEOUT_S
from megatron_patches.refit.vllm.asgi import App, Message, Receive, Send, answer, read_body

logger = logging.getLogger(__name__)

_MOST_BYTES = 1024
_REMEMBERED = 64  # sessions whose lease has ended
_LATE_S = 1.0  # if the timer fires later than this, this process was stalled, not the trainer
_EMPTYING_S = 30.0  # for users of the prefix cache to end
_RETRY_S = 1.0
_HELPING_S = 8.0  # for another trainer to wait; less than its call may take


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a request.

    Attributes:
        token: token of the trainer's session.
        seconds: timeout until the next request; 0 to give the lease back.
    """

    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    seconds: Annotated[float, Meta(ge=0, le=LONGEST_TIMEOUT_S)]


class PauseLease:
    """Grants leases, one at a time, and acts when one ends.

    Args:
        app: the wrapped server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._ended: OrderedDict[str, str] = OrderedDict()  # reason by token
        self._token = ""
        self._deadline = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._helping: asyncio.Task[None] | None = None  # what last acted when a lease ended

    async def request(self, scope: Message, receive: Receive, send: Send) -> None:
        """Takes, renews or returns a lease."""
        try:
            asked = msgspec.json.decode(await read_body(receive, _MOST_BYTES), type=_Asked)
        except msgspec.MsgspecError as error:
            await answer(send, 400, str(error))
            return
        if asked.token in self._ended:
            await answer(send, 410, self._ended[asked.token])
            return
        if asked.seconds and not await self._has_helped():
            why = "this server goes on without an earlier trainer just now, and would end your pause; push again"
            await answer(send, 503, why)
            return
        if not asked.seconds:
            self._give_back(asked.token)
        else:
            if asked.token != self._token:
                self._give_back(self._token)
            self._token = asked.token
            self._deadline = asyncio.get_running_loop().time() + asked.seconds
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch(dict(scope), asked.seconds))
        await answer(send, 200, None)

    def why_ended(self, token: str) -> str | None:
        """Why a session's lease has ended, in which case it may not pause the server; None if it has not."""
        return self._ended.get(token)

    def why_not_resumed(self, token: str) -> str | None:
        """Why a session may not end the pause; None if it may, or if the request names no session."""
        if not token or self._watching is None or token == self._token:
            return None
        return "another trainer has paused this server since, and resumes it; let one trainer at a time push to it"

    async def _has_helped(self) -> bool:
        """Waits until the server has acted on the end of the last lease. Returns whether it has."""
        if self._helping is not None:
            await asyncio.wait([self._helping], timeout=_HELPING_S)
        return self._helping is None or self._helping.done()

    def _give_back(self, token: str) -> None:
        if token == self._token and self._watching is not None:
            self._watching.cancel()
            self._token, self._watching = "", None

    async def _watch(self, scope: Message, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        while (left := self._deadline - clock()) > 0:
            await asyncio.sleep(left)
            if self._deadline < clock() - _LATE_S:  # renewals may be waiting to be read
                self._deadline = clock() + seconds / 2
        token, self._token = self._token, ""
        self._helping, self._watching = self._watching, None
        await self._help_itself(scope, token, seconds)

    async def _help_itself(self, scope: Message, token: str, seconds: float) -> None:
        host, port = scope.get("client") or ("an unknown host", 0)
        why = f"the trainer at {host}:{port} was not heard of for {seconds:g} s while it had this server paused"
        self._ended[token] = f"{why}, so the server goes on without it; meet it again"
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        logger.error("refit: %s; its session ends, and the server goes on", why)
        leaving = {"init_info": {"call": "leave", "token": token}}
        if await self._post(scope, "init_weight_transfer_engine", leaving) is None:
            logger.error("refit: this server stays paused: its workers cannot say what they serve; restart it")
            return
        if not await self._emptied(scope):
            logger.error(
                "refit: this server stays paused: its caches may be of older weights, and could not be emptied; "
                "POST /%s and /%s, then /%s",
                EMPTY_CACHES,
                EMPTY_ENCODER_CACHES,
                RESUME,
            )
            return
        if await self._post(scope, RESUME) is None:
            logger.error("refit: this server stays paused: POST /%s", RESUME)
            return
        logger.warning("refit: this server goes on, its caches emptied")

    async def _emptied(self, scope: Message) -> bool:
        clock = asyncio.get_running_loop().time
        deadline = clock() + _EMPTYING_S
        while (found := await self._post(scope, EMPTY_CACHES)) is None or found.get("success") is False:
            if clock() > deadline:
                return False
            await asyncio.sleep(_RETRY_S)
        return await self._post(scope, EMPTY_ENCODER_CACHES) is not None  # only now, as no request uses them any more

    async def _post(self, scope: Message, route: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Sends a request to the server itself. Returns the answer; None if it is an error."""
        path, _, query = route.partition("?")
        content = b"" if body is None else json.dumps(body).encode()
        root = str(scope.get("root_path", ""))
        asking = {
            **scope,
            "path": f"{root}/{path}",
            "raw_path": f"{root}/{path}".encode(),
            "query_string": query.encode(),
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
            ],
        }
        statuses: list[int] = []
        parts: list[bytes] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(int(message["status"]))
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(asking, receive, send)
            found = json.loads(b"".join(parts) or b"{}")
        except Exception:
            logger.exception("refit: /%s failed", path)
            return None
        if statuses != [200]:
            logger.error("refit: /%s answered %s: %s", path, statuses, found)
            return None
        return found if isinstance(found, dict) else {}
