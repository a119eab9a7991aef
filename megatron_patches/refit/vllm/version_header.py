"""ASGI middleware that reports, in a response header, which version of the weights answered.

::

    python -m vllm.entrypoints.openai.api_server ... \
        --middleware megatron_patches.refit.vllm.version_header.WeightsVersionHeader \
        --worker-extension-cls megatron_patches.refit.vllm.worker.RefitWorker

Every answer then has a header ``x-weights-version``. A commit happens between ``/sleep`` at level 0, or ``/pause``, and
``/wake_up``, which pass through here. A request that came before the pause has been answered by the version of its
arrival: with the pause modes ``wait`` and ``abort`` it ended before the commit. One that came during the pause waits
for the resumption, and is answered by the version of that time. With ``keep`` a request goes on through the commit, and
its header has both versions, the older one first; one whose answer is streamed had its header before. A server with
several API processes (``--api-server-count``) gives no header after a commit.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

HEADER = b"x-weights-version"
RPC_TIMEOUT_S = 60.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)


class WeightsVersionHeader:
    """See the module's docstring.

    Args:
        app: the server that this is put around.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._version: int | None = 0
        self._paused = False
        self._keeps = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass one request on, and add the header to its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"].rpartition("/")[2] if scope["method"] == "POST" else ""
        if route in ("pause", "sleep"):
            mode = parse_qs(scope.get("query_string", b"").decode()).get("mode", [""])[0]
            self._paused, self._keeps = True, mode == "keep"
        arrived, came_in_pause = self._version, self._paused

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                if route == "init_weight_transfer_engine":
                    # Before the trainer hears of it: it resumes the server next.
                    self._version = await self._ask(scope)
                elif route in ("resume", "wake_up"):
                    self._paused = False
                value = self._shown(arrived, came_in_pause=came_in_pause)
                if value:
                    message["headers"] = [*message.get("headers", ()), (HEADER, value.encode())]
            await send(message)

        await self._app(scope, receive, answer)

    def _shown(self, arrived: int | None, *, came_in_pause: bool) -> str:
        now = self._version
        versions = [now if came_in_pause else arrived]
        if self._keeps and versions != [now]:
            versions.append(now)
        return ", ".join(str(version) for version in versions) if None not in versions else ""

    async def _ask(self, scope: Message) -> int | None:
        """The version that all workers serve; None, and no header, if they cannot say or do not agree."""
        try:
            state = scope["app"].state
            if (getattr(state.args, "api_server_count", None) or 1) > 1:
                logger.error("with several API servers only one hears of a commit: use --api-server-count 1")
                return None
            client = state.engine_client
            versions = set(await client.collective_rpc("weights_version", timeout=RPC_TIMEOUT_S))
        except Exception:
            logger.exception(
                "the workers do not say which weights they serve; was the server started with --worker-extension-cls "
                "megatron_patches.refit.vllm.worker.RefitWorker?"
            )
            return None
        if len(versions) != 1:
            logger.error("workers serve different versions of the weights: %s", sorted(versions))
            return None
        return int(versions.pop())
