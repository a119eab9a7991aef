"""The header that says which version of the weights has answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_patches.refit.vllm.version_header import VERSION_HEADER, WeightsVersionHeader


class Server:
    """A server whose workers serve ``versions``; a request for ``/slow`` waits until it is let go."""

    def __init__(self) -> None:
        self.versions, self.pause = [0, 0], "works"
        self.go, self.paused, self.path_that_waits = asyncio.Event(), asyncio.Event(), ""
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
        elif scope["path"] == self.path_that_waits:
            await self.paused.wait()
        pause = self.pause if scope["path"] in ("/pause", "/sleep") else "works"
        if pause == "raises":
            raise RuntimeError("no sleep mode")
        status = 200 if pause == "works" else 400
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        if scope["path"] == "/stream":
            await self.go.wait()
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
        return headers[VERSION_HEADER].decode() if VERSION_HEADER in headers else None

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


@pytest.mark.parametrize(("route", "mode"), [("/sleep", "wait"), ("/sleep", "abort"), ("/pause", "keep")])
def test_a_request_from_before_the_pause_may_have_reached_the_engine_after_it(route: str, mode: str) -> None:
    """Or goes on after it; while the engine has not committed, there is one version."""

    async def run() -> None:
        server = Server()
        await server.commit(7)
        early = asyncio.create_task(server.request("/slow"))
        await asyncio.sleep(0)
        await server.request(route, f"level=0&mode={mode}")
        assert await server.request("/health", method="GET") == "7"
        await server.commit(8)
        server.go.set()
        assert await early == "7, 8"

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "expected"), [("wait", "8"), ("keep", "7, 8")])
def test_a_request_that_came_while_the_server_was_about_to_pause(mode: str, expected: str) -> None:
    """With ``keep`` it may have begun, and go on after the commit."""

    async def run() -> None:
        server = Server()
        await server.commit(7)
        server.path_that_waits = "/pause"
        pausing = asyncio.create_task(server.request("/pause", f"mode={mode}"))
        await asyncio.sleep(0)
        asked = asyncio.create_task(server.request("/slow"))
        await asyncio.sleep(0)
        server.paused.set()
        await pausing
        await server.commit(8)
        server.go.set()
        assert await asked == expected

    asyncio.run(run())


@pytest.mark.parametrize("pause", ["is refused", "raises"])
@pytest.mark.parametrize("route", ["/pause", "/sleep"])
def test_a_pause_that_fails_holds_no_request(route: str, pause: str) -> None:
    """Neither one that comes after it, nor one that came before the server said so."""

    async def run() -> None:
        server = Server()
        server.pause, server.path_that_waits = pause, route
        pausing = asyncio.create_task(server.request(route, "mode=weight"))
        await asyncio.sleep(0)
        early = asyncio.create_task(server.request("/slow"))
        await asyncio.sleep(0)
        server.paused.set()
        await asyncio.wait([pausing])
        assert (pausing.exception() is None) is (pause == "is refused")
        late = asyncio.create_task(server.request("/slow"))
        await asyncio.sleep(0)
        server.pause = "works"
        await server.request("/pause", "mode=keep")
        await server.commit(7)
        server.go.set()
        assert await early == await late == "0, 7"

    asyncio.run(run())


def test_a_request_that_was_held_in_one_pause_may_go_on_through_the_next() -> None:
    async def run() -> None:
        server = Server()
        for version in (7, 8):
            await server.request("/pause", "mode=keep")
            if version == 7:
                held = asyncio.create_task(server.request("/slow"))
                await asyncio.sleep(0)
            await server.commit(version)
            await server.request("/resume")
        server.go.set()
        assert await held == "7, 8"

    asyncio.run(run())


def test_a_header_goes_with_the_first_part_of_an_answer() -> None:
    """A server begins a stream before it knows anything of the answer."""

    async def run() -> None:
        server = Server()
        await server.request("/sleep", "mode=wait")
        held = asyncio.create_task(server.request("/stream"))
        await asyncio.sleep(0)
        await server.commit(9)
        server.go.set()
        assert await held == "9"

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
        # This process may never hear of one: version 0 would be wrong for ever.
        assert await server.request("/v1/completions") is None
        await server.commit(7)
        assert await server.request("/v1/completions") is None

    asyncio.run(run())
    assert caplog.text.count("--api-server-count 1") == 1


def test_what_is_not_http_passes() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        seen.append(scope["type"])

    asyncio.run(WeightsVersionHeader(app)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
