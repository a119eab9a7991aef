"""Nobody changes a server who does not show its secret, whatever vLLM's development mode opens."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_patches.refit.control.credentials import API_KEY_VARIABLE
from megatron_patches.refit.control.secret import FILE_VARIABLE, GUARDED_HEADER, SECRET_HEADER, VALUE_VARIABLE
from megatron_patches.refit.vllm import guard
from megatron_patches.refit.vllm.guard import RefitGuard

SECRET = "a-secret-of-tests"  # noqa: S105 - of tests
SHOWN = {SECRET_HEADER: SECRET}
JSON = {"content-type": "application/json"}
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VALUE_VARIABLE, SECRET)


class Server:
    """A server that notes what reaches it, and what reaches its workers."""

    def __init__(self, backend: str = "etp") -> None:
        self.reached: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.state = SimpleNamespace(engine_client=self)
        self.guard = RefitGuard(self._serve)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request.init_info)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.reached.append(scope.get("path", scope["type"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def request(
        self,
        path: str,
        headers: dict[str, str] | Sequence[tuple[str, str]] = (),
        root: str = "",
        method: str = "POST",
        *,
        reads: bool = False,
    ) -> int:
        """The status of the answer; -1 if the connection was closed instead.

        A refused request's body is not read, unless ``reads``.
        """
        sent: list[Any] = []
        read: list[bool] = []

        async def receive() -> Any:
            read.append(True)
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = headers.items() if isinstance(headers, dict) else headers
        encoded = [(name.encode(), value.encode()) for name, value in pairs]
        kind = "websocket" if method == "WEBSOCKET" else "http"
        scope = {"type": kind, "method": method, "path": path, "root_path": root, "headers": encoded, "app": self}
        asyncio.run(self.guard(scope, receive, send))
        if sent[0]["type"] == "websocket.close":
            assert not read
            return -1
        status = int(sent[0]["status"])
        assert bool(read) == (reads or status == 200)
        return status


def test_public_routes_are_as_vllm_has_them() -> None:
    server = Server()
    for path in ("/health", "/metrics", "/version", "/v1/completions", "/v1/models", "/v2/rerank", "/tokenize"):
        assert server.request(path, {"content-type": "text/plain"}) == 200
    assert server.request("/serving/v1/chat/completions", root="/serving") == 200
    assert len(server.reached) == 8


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {SECRET_HEADER: ""},
        {SECRET_HEADER: SECRET[:-1]},
        {SECRET_HEADER: SECRET + " "},
        {"authorization": f"Bearer {SECRET}"},
        [(SECRET_HEADER, SECRET), (SECRET_HEADER, SECRET)],
        [(SECRET_HEADER, "another"), (SECRET_HEADER, SECRET)],
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        pytest.param("/init_weight_transfer_engine", marks=NEEDS_VLLM),
        "/sleep",
        "/wake_up",
        "/pause",
        "/server_info",
        "/v1",
        "/v1x/y",
        "//v1/completions",
        "/health/../collective_rpc",
        "/collective_rpc/",
        "/Health",
        "/v1/load_lora_adapter",
        "/of_a_later_vllm",
        "",
    ],
)
def test_everything_else_needs_the_secret(path: str, headers: Any) -> None:
    server = Server()
    assert server.request(path, headers) == 401
    assert server.request(path, headers, method="OPTIONS") == 401
    assert server.request(path, headers, method="WEBSOCKET") == -1
    assert server.reached == []
    assert server.request(path, SHOWN) == 200


def test_a_prefix_of_the_server_opens_nothing() -> None:
    """``--root-path /v1`` must not make every route look like one of inference."""
    server = Server()
    assert server.request("/v1/collective_rpc", root="/v1") == 401
    assert server.request("/v1/v1/completions", root="/v1") == 200
    assert server.request("/v1/completions", root="/v1/completions") == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": "2", "content-type": "text/plain"}, 415),
        ({"content-length": "2"}, 415),
        ({"transfer-encoding": "chunked", "content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-length": "0", "content-type": "text/plain"}, 200),
        ({"content-length": "2", **JSON}, 200),
        ({"content-length": "2", "content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
def test_a_body_is_json(headers: dict[str, str], status: int) -> None:
    assert Server().request("/collective_rpc", {**SHOWN, **headers}) == status


@pytest.mark.parametrize(
    ("keys", "variable", "authorization", "status"),
    [
        (["one-key", "other-key"], None, None, 401),
        (["one-key", "other-key"], None, "Bearer ", 401),
        (["one-key", "other-key"], None, "Bearer one-ke", 401),
        (["one-key", "other-key"], None, "Basic one-key", 401),
        (["one-key", "other-key"], None, "bearer other-key", 400),
        (["one-key"], "another", "Bearer another", 401),
        (None, "one-key", None, 401),
        (None, "one-key", "Bearer one-key", 400),
        (None, "", None, 400),
        (None, None, None, 400),
    ],
)
@pytest.mark.parametrize("path", ["/refit/lease", "/refit/adapters"])
def test_what_this_package_adds_demands_the_api_key_as_inference_does(
    path: str,
    keys: list[str] | None,
    variable: str | None,
    authorization: str | None,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It answers 400 to who may ask, because the body asks for nothing. No key is logged."""
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(API_KEY_VARIABLE, variable)
    server = Server()
    server.state.args = SimpleNamespace(api_key=keys)
    shown = {} if authorization is None else {"authorization": authorization}
    assert server.request(path, {**SHOWN, **shown, **JSON}, reads=status == 400) == status
    assert server.request(path, {**shown, **JSON}) == 401
    assert server.request("/sleep", SHOWN) == 200
    assert ("who did not show the API key" in caplog.text) == (status == 401)
    assert not {key for key in ("one-key", "other-key", "another") if key in caplog.text}


@NEEDS_VLLM
def test_workers_are_told_once_that_there_is_a_guard() -> None:
    server, other = Server(), Server("nccl")
    for _ in range(2):
        assert server.request("/init_weight_transfer_engine", SHOWN) == 200
        assert other.request("/init_weight_transfer_engine", SHOWN) == 200
    assert server.request("/init_weight_transfer_engine") == 401
    assert server.calls == [{"call": "admit"}]
    assert other.calls == []


def test_an_update_of_a_draft_model_is_refused_before_workers_hear_of_it() -> None:
    server, other = Server(), Server("nccl")
    assert server.request("/start_draft_weight_update", SHOWN) == 501
    assert other.request("/start_draft_weight_update", SHOWN) == 200
    assert (server.reached, other.reached) == ([], ["/start_draft_weight_update"])


def test_an_answer_tells_the_trainer_of_the_guard() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/get_world_size",
        "headers": [(SECRET_HEADER.encode(), SECRET.encode())],
    }
    asyncio.run(RefitGuard(app)(scope, None, send))
    first, (name, server) = sent[0]["headers"]
    assert (first, name) == ((b"a", b"b"), GUARDED_HEADER.encode())
    assert len(server) == 32  # always the same: by it a trainer knows a server that has two names
    asyncio.run(RefitGuard(app)(scope, None, send))
    assert sent[1]["headers"][1] == (name, server)


def test_a_server_that_can_have_no_secret_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VALUE_VARIABLE)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "file" / "secret"))
    server = Server()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(server.guard({"type": "lifespan"}, receive, send))
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "cannot write a secret for refit" in sent[0]["message"]
    assert server.request("/sleep", SHOWN) == 401
    assert server.reached == []


@NEEDS_VLLM
def test_every_route_of_the_development_mode_needs_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's own list of its routes, with and without the development mode."""
    opened = routes(monkeypatch, "1") - routes(monkeypatch, "0")
    assert {"/collective_rpc", "/init_weight_transfer_engine", "/sleep", "/wake_up", "/server_info"} <= opened
    assert {"/pause", "/resume", "/reset_prefix_cache", "/update_weights"} <= opened
    assert not [path for path in opened if guard.is_public({"path": path})]


@NEEDS_VLLM
def test_what_changes_a_server_without_the_development_mode_needs_the_secret_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = {path for path in routes(monkeypatch, "0") if not guard.is_public({"path": path})}
    interface = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    assert closed - interface == {"/scale_elastic_ep", "/is_scaling_elastic_ep"}


def routes(monkeypatch: pytest.MonkeyPatch, development: str) -> set[str]:
    # vLLM's application makes them quiet for the whole process.
    quieted: list[Any] = [logging.root, *logging.root.handlers]
    for quiet in quieted:
        monkeypatch.setattr(quiet, "level", quiet.level)
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", development)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    return {path for route in build_app(args, ("generate",)).routes for path in paths_of(route)}


def paths_of(route: Any) -> list[str]:
    """Of one route, or of a router that was included."""
    if hasattr(route, "path"):
        return [route.path]
    return [path for inner in route.routes for path in paths_of(inner)]
