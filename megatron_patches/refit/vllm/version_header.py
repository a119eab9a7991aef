r"""ASGI middleware that reports, in a response header, which version of the weights answered.

::

    python -m vllm.entrypoints.openai.api_server ... \
        --middleware megatron_patches.refit.vllm.version_header.WeightsVersionHeader \
        --worker-extension-cls megatron_patches.refit.vllm.worker.RefitWorker

Every answer then has a header ``x-weights-version``: the version that answered, or all versions that may have taken
part, oldest first. A commit happens between ``/sleep`` at level 0, or ``/pause``, and ``/wake_up``, which all pass
through this middleware. A request that arrives during the pause waits for its end. A request that arrived earlier and
is unanswered when the engine has committed may have reached the engine after the pause, or may continue after it (with
``keep``, or after vLLM took it off the batch), so its answer gets both versions. The header of a streamed answer is
sent with its first part and does not reflect later commits. A server with several API processes
(``--api-server-count``) gives no header, because only one of them sees a commit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from urllib.parse import parse_qs

from megatron_patches.refit.vllm.asgi import App, Message, Receive, Send

VERSION_HEADER = b"x-weights-version"
RPC_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Request:
    """A request that is not answered yet.

    Attributes:
        versions: versions that may take part in its answer; None for an unknown one.
        is_held: whether no part of the answer is made before the pause ends.
    """

    versions: list[int | None]
    is_held: bool


class WeightsVersionHeader:
    """See the module's docstring.

    Args:
        app: the wrapped server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._version: int | None = 0
        self._open: list[_Request] = []
        self._holds = False  # whether new requests are answered only after the pause
        self._warned = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request on, and adds the header to its answer."""
        if scope["type"] != "http" or self._is_one_of_several(scope):
            await self._app(scope, receive, send)
            return
        route = scope["path"].rpartition("/")[2] if scope["method"] == "POST" else ""
        request = _Request([self._version], self._holds)
        self._open.append(request)
        mode = parse_qs(scope.get("query_string", b"").decode()).get("mode", [""])[0]
        pauses, paused = route in ("pause", "sleep"), False
        if pauses and mode != "keep":
            self._holds = True  # requests that arrive before the engine pauses end before the commit
        started: list[Message] = []

        async def answer(message: Message) -> None:
            nonlocal paused
            if message["type"] == "http.response.start":
                started.append(message)
                if route == "init_weight_transfer_engine":
                    # Ask before the trainer gets its answer, as it resumes the server next.
                    self._serves(await self._ask(scope))
                elif pauses and message["status"] == 200:
                    self._holds = paused = True
                elif route in ("resume", "wake_up"):
                    self._resumed()
                return
            if started:
                await send(self._with_header(started.pop(), request))
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            self._open.remove(request)
            if pauses and not paused:  # the engine may be running
                self._resumed()

    def _is_one_of_several(self, scope: Message) -> bool:
        arguments = getattr(scope["app"].state, "args", None)
        several = (getattr(arguments, "api_server_count", None) or 1) > 1
        if several and not self._warned:
            self._warned = True
            logger.error("no x-weights-version: of several API servers one hears of a commit; use --api-server-count 1")
        return several

    def _with_header(self, start: Message, request: _Request) -> Message:
        """The start of an answer with the header. Called when the first part of the body is there."""
        if None in request.versions:
            return start
        value = ", ".join(map(str, request.versions))
        return {**start, "headers": [*start.get("headers", ()), (VERSION_HEADER, value.encode())]}

    def _serves(self, version: int | None) -> None:
        """Adds the version to all open requests, which it may answer."""
        self._version = version
        for request in self._open:
            kept = [] if request.is_held else [known for known in request.versions if known != version]
            request.versions = [*kept, version]

    def _resumed(self) -> None:
        self._holds = False
        for request in self._open:
            request.is_held = False

    async def _ask(self, scope: Message) -> int | None:
        """The version that all workers serve; None, and no header, if they do not report it or disagree."""
        try:
            client = scope["app"].state.engine_client
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
