"""The header that says which version of the weights has answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_patches.refit.vllm.version_header import HEADER, WeightsVersionHeader


class Server:
    """A server whose workers serve ``versions``; a request for ``/slow`` waits until it is let go."""

    def __init__(self) -> None:
        self.versions = [0, 0]
        self.go = asyncio.Event()
        self.state = SimpleNamespace(engine_client=self, args=SimpleNamespace(api_server_count=None))
        self.guarded = WeightsVersionHeader(self._serve)

    async def collective_rpc(self, method: str, timeout: float) -> list[int]:
        assert method == "weights_version"
        assert timeout > 0
        if not self.versions:
            raise AttributeError(method)
        return self.versions

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        del receive
        if scope["path"] == "/slow":
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    async def request(self, path: str, query: str = "", method: str = "POST") -> str | None:
        """The header's value; None if there is none."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "app": self}
        await self.guarded(scope, None, send)
        headers = dict(sent[0]["headers"])
        assert headers[b"a"] == b"b"
        assert len(sent) == 2
        return headers[HEADER].decode() if HEADER in headers else None

    async def commit(self, version: int) -> None:
        self.versions = [version] * len(self.versions)
        await self.request("/init_weight_transfer_engine")


PAUSES = [("/pause", "mode=wait", "/resume"), ("/sleep", "level=0&mode=wait", "/wake_up")]


@pytest.mark.parametrize(("pause", "query", "resume"), PAUSES)
def test_answers_have_the_version_that_serves(pause: str, query: str, resume: str) -> None:
    async def run() -> None:
        server = Server()
        assert await server.request("/v1/completions") == "0"
        for version in (7, 8):
            await server.request(pause, query)
            await server.commit(version)
            await server.request(resume)
            assert await server.request("/v1/completions") == str(version)
            assert await server.request("/health", method="GET") == str(version)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "mode", "expected"), [("/sleep", "wait", "7"), ("/sleep", "abort", "7"), ("/pause", "keep", "7, 8")]
)
def test_a_request_from_before_the_pause_was_answered_by_the_version_of_then(
    route: str, mode: str, expected: str
) -> None:
    async def run() -> None:
        server = Server()
        await server.commit(7)
        early = asyncio.create_task(server.request("/slow"))
        await asyncio.sleep(0)
        await server.request(route, f"level=0&mode={mode}")
        await server.commit(8)
        # Its answer was ready before the commit, and is sent only now.
        server.go.set()
        assert await early == expected

    asyncio.run(run())


@pytest.mark.parametrize(("pause", "query", "resume"), PAUSES)
def test_a_request_that_came_in_the_pause_is_answered_by_the_new_version(pause: str, query: str, resume: str) -> None:
    async def run() -> None:
        server = Server()
        await server.request(pause, query)
        held = asyncio.create_task(server.request("/slow"))
        await asyncio.sleep(0)
        await server.commit(9)
        await server.request(resume)
        server.go.set()
        assert await held == "9"

    asyncio.run(run())


def test_a_failed_commit_leaves_the_version() -> None:
    async def run() -> None:
        server = Server()
        await server.commit(7)
        await server.request("/pause", "mode=wait")
        await server.request("/init_weight_transfer_engine")
        await server.request("/resume")
        assert await server.request("/v1/completions") == "7"

    asyncio.run(run())


@pytest.mark.parametrize("versions", [[], [7, 8]])
def test_no_header_where_the_version_is_not_known(versions: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = Server()
        server.versions = versions
        await server.request("/init_weight_transfer_engine")
        assert await server.request("/v1/completions") is None

    asyncio.run(run())
    assert "worker" in caplog.text


def test_no_header_where_another_process_may_hear_of_a_commit(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = Server()
        server.state.args.api_server_count = 2
        await server.commit(7)
        assert await server.request("/v1/completions") is None

    asyncio.run(run())
    assert "--api-server-count 1" in caplog.text


def test_what_is_not_http_passes() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        seen.append(scope["type"])

    asyncio.run(WeightsVersionHeader(app)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
