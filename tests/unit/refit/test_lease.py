"""A server that is paused for a trainer goes on by itself when it hears no more of it, however that comes about."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import uvicorn

from megatron_patches.refit.control.credentials import Credentials
from megatron_patches.refit.control.http_calls import HttpCalls
from megatron_patches.refit.control.lease import EMPTY_CACHES, EMPTY_ENCODER_CACHES, RESUME, ROUTE
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer import engines
from megatron_patches.refit.trainer.engine_client import PauseMode
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.vllm import pause_lease
from megatron_patches.refit.vllm.guard import RefitGuard
from tests.support.launch import RanksFailedError, run_distributed

TOKEN, ANOTHER = "1" * 64, "2" * 64
LEASE_S = 1.5
SLEEP = "sleep?level=0&mode=wait"
HELP = ["leave", EMPTY_CACHES, EMPTY_ENCODER_CACHES, RESUME]


class Server:
    """A server with a guard that notes what it is asked, ``refused`` calls and routes of which are errors.

    A cache can be emptied once it was tried ``used`` times.
    """

    def __init__(self, *, guarded: bool = True) -> None:
        self.asked: list[str] = []
        self.refused, self.used = "", 0
        self.pausing = ""  # that takes as long as the server is stopped
        app: Any = RefitGuard(self._serve) if guarded else self._serve
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._server.run, daemon=True)
        thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = "http://{}:{}".format(*self._server.servers[0].sockets[0].getsockname())
        try:
            yield self
        finally:
            self._server.should_exit = True
            thread.join(20)

    def run(self, work: Callable[[], None]) -> None:
        """Has the server's own thread do something; it serves nobody meanwhile."""
        self.pausing = "once"
        self._work = work

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        query = scope["query_string"].decode()
        route = scope["path"].strip("/") + (f"?{query}" if query else "")
        asked = json.loads(body)["init_info"]["call"] if body and "init_info" in json.loads(body) else route
        if route == ROUTE:  # without a guard
            await self._answer(send, 404, b"{}")
            return
        self.asked.append(asked)
        if self.pausing and asked.startswith("sleep"):
            self.pausing = ""
            self._work()
        answer = b"{}"
        if asked == EMPTY_CACHES and self.used:
            self.used -= 1
            answer = b'{"success": false}'
        await self._answer(send, 500 if asked == self.refused else 200, answer)

    @staticmethod
    async def _answer(send: Any, status: int, body: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    async def admit(*_: Any) -> None:
        """Its workers are not asked."""

    monkeypatch.setattr(RefitGuard, "_admit", admit)
    monkeypatch.setattr(pause_lease, "_RETRY_S", 0.05)
    with Server().running() as running:
        yield running


def joined(server: Server, token: str = TOKEN, kind: type[HttpEngine] = HttpEngine) -> HttpEngine:
    """An engine that has joined a session; the server does not remember that it was asked to."""
    engine = kind(server.url, 20.0)
    engine.call({"call": "join", "token": token, "lease_s": LEASE_S})
    return engine


def settled(server: Server, count: int) -> list[str]:
    """What it was asked, but for joining, once that is so much."""
    deadline = time.monotonic() + 30
    while len([what for what in server.asked if what != "join"]) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # for what should not come
    return [what for what in server.asked if what != "join"]


class Killed(HttpEngine):
    """Its process is killed, as by the kernel, in the midst of a commit."""

    def commit(self, version: int, *, reset_cache: bool) -> None:
        super().commit(version, reset_cache=reset_cache)
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(HttpEngine):
    """Its process hangs in the midst of a commit, for as long as others want."""

    def commit(self, version: int, *, reset_cache: bool) -> None:
        super().commit(version, reset_cache=reset_cache)
        os.kill(os.getpid(), signal.SIGSTOP)


def commit_and_die(rank: int, world_size: int, url: str, pause: PauseMode) -> None:
    engine = Killed(url)
    engine.call({"call": "join", "token": TOKEN, "lease_s": LEASE_S})
    engine.pause(pause)
    engine.commit(1, reset_cache=False)


def commit_and_hang(rank: int, world_size: int, url: str, note: str) -> str:
    """What it is told when it goes on and would pause the server again."""
    engine = Stopped(url)
    engine.call({"call": "join", "token": TOKEN, "lease_s": LEASE_S})
    engine.pause(PauseMode.WAIT)
    Path(note).write_text(str(os.getpid()), encoding="utf-8")
    engine.commit(1, reset_cache=False)
    engine.resume(reset_cache=False)
    try:
        engine.pause(PauseMode.WAIT)
    except RefitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("pause", "asked"),
    [
        (PauseMode.WAIT, SLEEP),
        (PauseMode.ABORT, "sleep?level=0&mode=abort"),
        (PauseMode.KEEP, "pause?mode=keep"),
    ],
)
def test_a_trainer_that_dies_leaves_no_server_paused(pause: PauseMode, asked: str, server: Server) -> None:
    with pytest.raises(RanksFailedError):
        run_distributed(commit_and_die, 1, None, args=(server.url, pause), fresh=True)
    assert settled(server, 6) == [asked, "commit", *HELP]


def test_a_trainer_that_hangs_leaves_no_server_paused_and_cannot_pause_it_when_it_goes_on(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = tmp_path / "process"
    told: list[str] = []

    def run() -> None:
        told.extend(run_distributed(commit_and_hang, 1, None, args=(server.url, str(note)), fresh=True))

    thread = threading.Thread(target=run)
    thread.start()
    assert settled(server, 6) == [SLEEP, "commit", *HELP]
    os.kill(int(note.read_text(encoding="utf-8")), signal.SIGCONT)
    thread.join(60)
    assert "answered 410: " in told[0]
    assert "was not heard of for 1.5 s while it had this server paused" in told[0]
    assert settled(server, 7) == [SLEEP, "commit", *HELP, RESUME]
    assert "not heard of for 1.5 s while it had this server paused; its session ends, and the server g" in caplog.text
    # Once they have met again, there is another session.
    engine = joined(server, ANOTHER)
    engine.pause(PauseMode.KEEP)
    engine.resume(reset_cache=False)
    assert settled(server, 9)[7:] == ["pause?mode=keep", RESUME]


@pytest.mark.slow
def test_a_trainer_that_is_heard_of_may_take_its_time(server: Server) -> None:
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    time.sleep(2 * LEASE_S)
    engine.resume(reset_cache=True)
    time.sleep(2 * LEASE_S)
    assert settled(server, 4) == [SLEEP, EMPTY_CACHES, EMPTY_ENCODER_CACHES, RESUME]
    for _ in range(2):
        engine.pause(PauseMode.ABORT)
        engine.resume(reset_cache=False)
    time.sleep(2 * LEASE_S)
    assert settled(server, 8)[4:] == ["sleep?level=0&mode=abort", RESUME] * 2


def test_a_server_whose_weights_are_not_back_stays_paused(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.refused = "leave"
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    engine.close()
    assert settled(server, 2) == [SLEEP, "leave"]
    assert "stays paused: its workers cannot say what they serve; restart it" in caplog.text


def test_a_cache_that_is_still_used_is_emptied_before_the_server_goes_on(server: Server) -> None:
    server.used = 2
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    engine.close()
    assert settled(server, 7) == [SLEEP, "leave", *[EMPTY_CACHES] * 3, EMPTY_ENCODER_CACHES, RESUME]


def test_a_server_with_a_cache_of_older_weights_stays_paused(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "_EMPTYING_S", 0.2)
    monkeypatch.setattr(pause_lease, "_EMPTYING_S", 0.2)
    server.used = 1000
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    with pytest.raises(RefitError, match="could not empty its prefix cache"):
        engine.resume(reset_cache=True)
    time.sleep(LEASE_S + 1)
    assert "leave" in server.asked
    assert RESUME not in server.asked
    assert "stays paused: its caches may be of older weights" in caplog.text


def test_a_server_that_cannot_be_paused_is_resumed_at_once(server: Server) -> None:
    server.refused = SLEEP
    engine = joined(server)
    with pytest.raises(RefitError, match="answered 500"):
        engine.pause(PauseMode.WAIT)
    time.sleep(2 * LEASE_S)
    assert settled(server, 2) == [SLEEP, RESUME]


@pytest.mark.parametrize("what", [RESUME, "abandon"])
def test_a_server_that_did_not_do_what_it_was_told_helps_itself(what: str, server: Server) -> None:
    server.refused = what
    engine = joined(server)
    engine.pause(PauseMode.KEEP)
    with pytest.raises(RefitError, match="answered 500"):
        engine.resume(reset_cache=False) if what == RESUME else engine.call({"call": "abandon"})
    server.refused = ""
    assert settled(server, 6) == ["pause?mode=keep", what, *HELP]


def test_closing_waits_for_no_server_that_has_died_while_it_was_paused(server: Server) -> None:
    """Nor does it where one hangs."""
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    server._server.force_exit = server._server.should_exit = True
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 15


def test_closing_waits_for_no_server_that_hangs_while_it_is_paused(server: Server) -> None:
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    hangs = threading.Event()

    def hang() -> None:
        hangs.set()
        time.sleep(4.0)

    server.run(hang)
    threading.Thread(target=joined(server, ANOTHER)._http.call, args=("POST", SLEEP), daemon=True).start()
    assert hangs.wait(10)
    time.sleep(LEASE_S)  # until a renewal waits for its answer
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 1


@pytest.mark.slow
def test_a_server_that_did_not_run_itself_blames_no_trainer(server: Server) -> None:
    """Renewals wait to be read then."""
    server.run(lambda: time.sleep(3 * LEASE_S))
    engine = joined(server)
    engine.pause(PauseMode.WAIT)
    time.sleep(1.0)
    engine.resume(reset_cache=False)
    time.sleep(2 * LEASE_S)
    assert settled(server, 2) == [SLEEP, RESUME]


def test_a_second_session_takes_the_lease_over(server: Server) -> None:
    first, second = joined(server), joined(server, ANOTHER)
    first.pause(PauseMode.WAIT)
    second.pause(PauseMode.WAIT)
    second.close()
    first.close()
    assert settled(server, 6) == [SLEEP, SLEEP, *HELP]


def test_a_server_that_helps_itself_ends_no_pause_of_another_trainer(server: Server) -> None:
    first, second = joined(server), joined(server, ANOTHER)
    first.pause(PauseMode.WAIT)
    server.used = 20
    first.close()
    assert "leave" in settled(server, 2)
    second.pause(PauseMode.WAIT)
    assert [what for what in settled(server, 26) if not what.startswith("reset_")] == [*(SLEEP, "leave", RESUME, SLEEP)]
    second.resume(reset_cache=False)


def test_a_trainer_ends_no_pause_of_the_one_that_came_after_it(server: Server) -> None:
    first, second = joined(server), joined(server, ANOTHER)
    first.pause(PauseMode.WAIT)
    second.pause(PauseMode.WAIT)
    with pytest.raises(RefitError, match=r"another trainer has paused this server since, and resumes it"):
        first.resume(reset_cache=False)
    assert settled(server, 2) == [SLEEP, SLEEP]
    second.resume(reset_cache=False)
    assert settled(server, 4) == [SLEEP, SLEEP, RESUME]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token": TOKEN},
        {"token": "x", "seconds": 1.0},
        {"token": TOKEN, "seconds": -1.0},
        {"token": TOKEN, "seconds": 1e9},
        {"token": TOKEN, "seconds": 1.0, "more": 1},
        {"token": TOKEN, "seconds": 1.0, "padding": "x" * 100_000},
    ],
)
def test_what_is_no_lease_is_refused(body: dict[str, object], server: Server) -> None:
    with pytest.raises(RefitError, match="answered 400"):
        HttpCalls(server.url, 20.0, Credentials()).call("POST", ROUTE, body)


def test_a_server_without_a_guard_is_paused_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with Server(guarded=False).running() as server, caplog.at_level(logging.WARNING):
        engine = joined(server)
        engine.pause(PauseMode.WAIT)
        engine.resume(reset_cache=False)
        assert settled(server, 2) == [SLEEP, RESUME]
        assert "stays paused if this process dies now, as it has no guard" in caplog.text


def test_other_middleware_sees_what_the_server_asks_itself() -> None:
    """As the header that tells the version that serves."""
    seen: list[tuple[str, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["query_string"]))
        assert scope["app"] == "the server"
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"success": true}'})

    async def run() -> None:
        lease = pause_lease.PauseLease(app)
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps({"token": TOKEN, "seconds": 0.1}).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/x/refit/lease", "root_path": "/x", "app": "the server"}
        await lease.request(scope, receive, send)
        await asyncio.sleep(0.5)
        assert sent[0]["status"] == 200

    asyncio.run(run())
    assert seen == [
        ("/x/init_weight_transfer_engine", b""),
        ("/x/reset_prefix_cache", b"reset_running_requests=true&reset_external=true"),
        ("/x/reset_encoder_cache", b""),
        ("/x/wake_up", b"tags=scheduling"),
    ]
