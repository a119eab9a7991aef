"""The trainer's view of an HTTP server: whatever it answers, the error says which server and what it said."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_patches.refit.control.lease import ServerLease
from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.control.secret import VALUE_VARIABLE
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.trainer import engines
from megatron_patches.refit.trainer.engine_client import AdapterEngine, EngineClient, Joined, PassedEngine, PauseMode
from megatron_patches.refit.trainer.engine_control import EngineControl
from megatron_patches.refit.trainer.engines import HttpEngine, LocalEngine, check_given_once, http_engines
from megatron_patches.refit.trainer.roster import Roster
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession


@contextmanager
def answering(raw: bytes) -> Iterator[HttpEngine]:
    """A server that answers everything alike, and a client of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(raw)
            self.close_connection = True

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield HttpEngine(f"http://127.0.0.1:{server.server_port}", 10.0)
        finally:
            server.shutdown()


def prepare(engines: Sequence[EngineClient], timeout_s: float = 10.0) -> None:
    """Prepares a session of a model without weights."""
    session = RefitSession([], engines, vocab_size=1, options=RefitOptions(timeout_s=timeout_s))
    session._describe = lambda: Held({}, {}, Manifest(0, "here", (), ()))  # type: ignore[method-assign]
    session.prepare()


def ok(content: str) -> bytes:
    return f"HTTP/1.0 200 OK\r\n\r\n{content}".encode()


def test_the_size_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked itself, whatever proxy there is for everything else."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(ok('{"world_size": 4}')) as engine:
        assert engine.world_size() == 4


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (ok("<html>hello</html>"), r"http://.*/get_world_size answered no JSON but <html>hello</html>"),
        (ok("[" * 100_000), r"http://.*/get_world_size answered no JSON but \[\[\["),
        (ok('{"size": 4}'), r"http://.*/get_world_size answered \{'size': 4\}, without world_size"),
        (ok("[]"), r"without world_size"),
        (ok(""), r"without world_size"),
        (
            b"HTTP/1.0 404 no\r\n\r\nnothing here",
            r"http://.*/get_world_size answered 404: nothing here; .* VLLM_SERVER_DEV_MODE=1",
        ),
        (b"what?\r\n\r\n", r"lost the connection to http://.*/get_world_size"),
    ],
)
def test_what_is_no_engine_is_refused_by_name(raw: bytes, message: str) -> None:
    with answering(raw) as engine:
        with pytest.raises(RefitError, match=message):
            engine.world_size()
        with pytest.raises(RefitError, match=f"cannot start the refit: .*{message}"):
            prepare([engine])


def test_a_server_of_a_release_without_weight_versions_is_asked_once() -> None:
    with answering(b"HTTP/1.0 404 no\r\n\r\n") as engine:
        engine.set_weight_version(7)
    engine.set_weight_version(8)  # the server has ended


@pytest.mark.parametrize("url", ["http://", "10.0.0.5:8000", "http://[::1", "http://a:b", "http://a?x=1", "http://a/é"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"engine URL .* must be like http://"):
        HttpEngine(url)


@pytest.mark.parametrize("url", ["http://a..b:8000", f"http://{'a' * 64}:8000"])
def test_a_host_that_can_have_no_address_is_named(url: str) -> None:
    with pytest.raises(RefitError, match=f"cannot reach {url}: .*label"):
        HttpEngine(url).world_size()


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@a", "http://hunter2@a:8000", "http://me:hunter2@[::1", "me:hunter2@a"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="give them as a header") as raised:
        HttpEngine(url)
    assert "hunter2" not in str(raised.value)


def test_a_server_with_another_secret_says_where_to_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = b'HTTP/1.0 401 no\r\nx-refit-guarded: 1\r\n\r\n{"error": "x-refit-secret: show it"}'
    message = r"get_world_size answered 401: .*; this process shows the secret of the variable ETP_REFIT_SECRET; the se"
    with answering(refusal) as engine, pytest.raises(RefitError, match=message) as raised:
        engine.world_size()
    assert os.environ[VALUE_VARIABLE] not in str(raised.value)
    assert "VLLM_SERVER_DEV_MODE" not in str(raised.value)
    monkeypatch.delenv(VALUE_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    message = f"this process has no secret: there is no {tmp_path}/megatron-etp/refit-secret; the server's log says"
    with answering(refusal) as engine, pytest.raises(RefitError, match=message):
        engine.world_size()


def test_a_server_that_demands_an_api_key_is_not_said_to_have_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-tests")
    refusal = (
        b"HTTP/1.0 401 no\r\nx-refit-guarded: 1\r\nwww-authenticate: Bearer\r\n\r\n"
        b'{"error": "authorization: show this server\'s API key"}'
    )
    with (
        answering(refusal) as engine,
        pytest.raises(RefitError, match=r"answered 401: .*show this server's API") as raised,
    ):
        engine.check_up()
    assert "secret" not in str(raised.value)
    assert "a-key-of-tests" not in str(raised.value)


def test_a_redirect_is_not_followed() -> None:
    """The secret is for nobody else."""
    with answering(ok('{"world_size": 4}')) as elsewhere:
        moved = f"HTTP/1.0 307 moved\r\nLocation: {elsewhere.name}/get_world_size\r\n\r\n".encode()
        with answering(moved) as engine, pytest.raises(RefitError, match="answered 307"):
            engine.world_size()


def test_a_server_without_a_guard_is_complained_about(caplog: pytest.LogCaptureFixture) -> None:
    with answering(ok('{"world_size": 4}')) as engine:
        engine.world_size()
    assert "obeys whoever reaches it" in caplog.text
    caplog.clear()
    with answering(b'HTTP/1.0 200 OK\r\nx-refit-guarded: 1\r\n\r\n{"world_size": 4}') as engine:
        engine.world_size()
    assert caplog.text == ""


def test_an_answer_that_does_not_end_is_given_up() -> None:
    """A stream, each of whose pieces comes in time."""

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            with suppress(OSError):  # once the client has left
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.01)

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            engine = HttpEngine(f"http://127.0.0.1:{server.server_port}", 0.3)
            with pytest.raises(RefitError, match=r"/get_world_size gave no answer within 0\.3 s"):
                engine.world_size()
        finally:
            server.shutdown()


@pytest.mark.parametrize("head", ["Content-Length: 30", "Transfer-Encoding: chunked"])
def test_an_answer_that_is_cut_off_is_an_error(head: str) -> None:
    body = "14\r\n" if "chunked" in head else ""
    said = f'HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}{{"world_size": 4}}'.encode()
    with answering(said) as engine, pytest.raises(RefitError, match=r"lost the connection to .*: IncompleteRead"):
        engine.world_size()


def test_a_server_that_does_not_answer_in_time_is_not_said_to_be_out_of_reach() -> None:
    """With ``wait`` it may be busy with a long request."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = HttpEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        with pytest.raises(RefitError, match=r"/get_world_size gave no answer within 0\.3 s; .* a longer time-out"):
            engine.world_size()


def test_a_server_that_is_named_twice_is_refused() -> None:
    urls = ["http://a:8000", "http://[::1]:8000", "https://a/vllm"]
    assert [engine.name for engine in http_engines(urls, 1.0)] == urls
    with pytest.raises(ValueError, match="engine URL http://a:8000 is given 2 times"):
        http_engines([*urls, "http://a:8000/"], 1.0)


def test_an_engine_that_a_program_gives_twice_is_refused_before_its_workers_wait_for_each_other() -> None:
    servers = [HttpEngine("http://a:8000"), HttpEngine("http://a:8000/")]
    with pytest.raises(RefitError, match="engine URL http://a:8000 is given 2 times; give each server once"):
        prepare(servers)
    llm = object()
    with pytest.raises(RefitError, match="the engine in this process is given 2 times"):
        prepare([LocalEngine(llm), LocalEngine(llm)])
    two = [LocalEngine(llm), LocalEngine(object())]
    with pytest.raises(RefitError, match=r"2 engines are named 'the engine in this process', .* name of its own"):
        prepare(two)
    two[1].name = "the other one"
    check_given_once([*two, HttpEngine("http://a"), HttpEngine("http://b")])


def test_a_server_with_two_names_is_refused_at_once() -> None:
    size = '{"world_size": 1}'
    with (
        answering(f"HTTP/1.0 200 OK\r\nx-refit-guarded: one\r\n\r\n{size}".encode()) as engine,
        answering(f"HTTP/1.0 200 OK\r\nx-refit-guarded: other\r\n\r\n{size}".encode()) as other,
        answering(ok(size)) as unguarded,
        answering(ok(size)) as unguarded_too,
    ):
        alias = HttpEngine(engine.name.replace("127.0.0.1", "localhost"), 10.0)
        names = f"({engine.name} and {alias.name}|{alias.name} and {engine.name})"
        message = f"cannot start the refit: .*{names} are one server; give it once"
        with pytest.raises(RefitError, match=message):
            prepare([engine, other, alias], timeout_s=2.0)  # no worker of the other two joins
        roster = Roster()
        roster.set([engine, other, unguarded, unguarded_too])
        for each in roster.present:
            assert each.world_size() == 1
            roster.check_other(each)
        roster.set([AdapterEngine(server, "math", 1, "folder") for server in (engine, alias)])
        assert alias.world_size() == 1
        first, second = roster.present
        roster.check_other(first)
        with pytest.raises(RefitError, match=f"{names} are one server; give it once"):
            roster.check_other(second)


class _Own:
    """A client of a program's own. What it calls ``engine`` is its business."""

    name, engine = "own", object()


def test_a_client_of_another_kind_may_have_an_engine() -> None:
    own: Any = _Own()
    with pytest.raises(ValueError, match="own is given 2 times"):
        check_given_once([own, own])


@pytest.mark.parametrize("size", [0, -1])
def test_an_engine_without_workers_does_not_count_as_one_that_serves(size: int) -> None:
    with answering(ok(f'{{"world_size": {size}}}')) as engine:
        message = f"{engine.name} has {size} workers by its own account; it must have at least one"
        with pytest.raises(RefitError, match=f"cannot start the refit: .*{message}"):
            prepare([engine])


class Broken:
    """A client that fails as nobody thought of."""

    name = "broken"

    def world_size(self) -> int:
        raise KeyError("size")


def test_other_ranks_do_not_wait_for_a_first_one_that_cannot_ask() -> None:
    with pytest.raises(RefitError, match="cannot start the refit: broken: 'size'"):
        prepare([Broken()])  # type: ignore[list-item]


@pytest.mark.parametrize("answer", ['{"success": true}', ""])
def test_a_commit_that_empties_caches(answer: str) -> None:
    with answering(ok(answer)) as engine:
        engine.commit(1, reset_cache=True)


def test_a_cache_that_could_not_be_emptied_is_an_error_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_EMPTYING_S", 0.5)
    with answering(ok('{"success": false}')) as engine:
        engine.commit(1, reset_cache=False)
        with pytest.raises(RefitError, match=r"could not empty its prefix cache, .*something uses it.*POST http"):
            engine.commit(1, reset_cache=True)


def test_why_a_commit_failed_comes_before_what_became_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_EMPTYING_S", 0.5)
    with answering(b"HTTP/1.0 500 no\r\n\r\nnothing here") as engine, pytest.raises(RefitError, match="init_weight_"):
        engine.commit(1, reset_cache=True)


class _Llm:
    """What a LocalEngine calls of vLLM's ``LLM``, in order."""

    def __init__(self, *, cache_is_used: bool = False) -> None:
        self.calls: list[str] = []
        self.llm_engine: Any = SimpleNamespace(reset_encoder_cache=lambda: self.calls.append("empty encoders'"))
        self.cache_is_used = cache_is_used

    def init_weight_transfer_engine(self, request: dict[str, dict[str, object]]) -> None:
        self.calls.append(str(request["init_info"]["call"]))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {', '.join(tags)}")

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        assert reset_connector
        self.calls.append("empty")
        return not self.cache_is_used


def test_the_size_of_an_engine_of_this_process() -> None:
    llm, parallel = _Llm(), SimpleNamespace(world_size_across_dp=4, distributed_executor_backend="mp")
    llm.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    assert LocalEngine(llm).world_size() == 4
    parallel.distributed_executor_backend = "external_launcher"
    with pytest.raises(RefitError, match=r"reach its own worker alone.*external_launcher"):
        LocalEngine(llm).world_size()


def test_an_engine_of_this_process_sleeps_and_wakes_in_parts() -> None:
    llm = _Llm()
    llm.llm_engine = SimpleNamespace(is_sleeping=lambda: not llm.calls)
    engine = LocalEngine(llm)
    assert engine.is_sleeping()
    engine.wake_up("weights")
    assert not engine.is_sleeping()
    engine.sleep()
    assert llm.calls == ["wake weights", "sleep 1 keep"]


def test_whoever_has_an_engine_in_his_process_is_admitted() -> None:
    llm = _Llm()
    engine = LocalEngine(llm)
    for call in ("join", "receive", "join"):
        engine.call({"call": call, "token": ""})
    assert llm.calls == ["admit", "join", "receive", "admit", "join"]


def test_what_is_asked_of_an_engine_is_of_the_session_that_it_was_made_to_join() -> None:
    joined = Joined()
    first, second = {"token": "first"}, {"token": "second"}
    assert joined.told({"call": "join", **first}) == {"call": "join", **first}
    assert joined.told({"call": "receive", "version": 1}) == {"call": "receive", "version": 1, **first}
    joined.told({"call": "join", **second})
    assert joined.told({"call": "commit"}) == {"call": "commit", **second}


def test_a_late_call_about_an_adapter_does_not_change_the_session_of_the_weights() -> None:
    """Of one engine, which both kinds of sessions call: as if the adapter's had failed while the weights' began."""
    told: list[dict[str, Any]] = []

    class Server(PassedEngine):
        def add_adapter(self, adapter: str, version: int, folder: Path, keep: int) -> list[int]:
            raise NotImplementedError

        def _tell(self, call: dict[str, Any]) -> None:
            told.append(call)

    server = Server("server", 1, admits=False)
    adapter = AdapterEngine(server, "math", 1, "folder")
    adapter.call({"call": "join", "token": "a" * 64})
    server.call({"call": "join", "token": "b" * 64})
    adapter.call({"call": "record"})
    server.call({"call": "record"})
    adapter.call({"call": "join", "token": "c" * 64})
    server.call({"call": "commit", "version": 1})
    assert [(call["call"], call.get("adapter"), call["token"][0]) for call in told] == [
        ("join", "math", "a"),
        ("join", None, "b"),
        ("record", "math", "a"),
        ("record", None, "b"),
        ("join", "math", "c"),
        ("commit", None, "b"),
    ]


def test_a_session_about_an_adapter_does_not_change_how_long_weights_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, float]] = []
    monkeypatch.setattr(ServerLease, "take", lambda _, *lease: taken.append(lease))
    with answering(ok("{}")) as engine:
        engine.call({"call": "join", "token": "b" * 64, "lease_s": 7.0})
        AdapterEngine(engine, "math", 1, "folder").call({"call": "join", "token": "a" * 64, "lease_s": 1.0})
        engine.pause(PauseMode.WAIT)
    assert taken == [("b" * 64, 7.0)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (PauseMode.WAIT, ["commit", "empty", "empty encoders'"]),
        (PauseMode.KEEP, ["empty", "empty encoders'", "commit"]),
    ],
)
def test_nothing_in_a_cache_of_this_process_outlives_its_weights(mode: PauseMode, expected: list[str]) -> None:
    llm = _Llm()
    engine = LocalEngine(llm)
    control = EngineControl(engine, 1, RefitOptions(pause=mode))
    control.commit(3, lambda: None)
    control.close()
    assert llm.calls == expected


def test_a_cache_of_this_process_that_could_not_be_emptied_is_an_error() -> None:
    engine = LocalEngine(_Llm(cache_is_used=True))
    with pytest.raises(RefitError, match="could not empty its prefix cache"):
        engine.commit(3, reset_cache=True)
