"""A server that a trainer has paused is resumed, however the trainer ends; with a server that notes what is asked."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from megatron_patches.refit.engines import HttpEngine, PauseMode
from megatron_patches.refit.errors import RefitError
from tests.support.launch import RanksFailedError, run_distributed

COMMIT = {"call": "commit", "version": 1}


class Server(ThreadingHTTPServer):
    """Answers everything; ``refused`` routes with an error, ``deaf`` ones only once the client has gone."""

    def __init__(self, refused: str = "", deaf: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused, self.deaf = refused, deaf
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        route = self.path.strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = json.loads(body)["init_info"]["call"] if body else route
        self.server.asked.append(asked)
        if route == self.server.deaf:
            return  # closes the connection
        self.send_response(500 if asked == self.server.refused else 200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


@contextmanager
def serving(refused: str = "", deaf: str = "") -> Iterator[Server]:
    with Server(refused, deaf) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class Killed(HttpEngine):
    """Its process is killed, as by the kernel, in the midst of a commit."""

    def call(self, call: dict[str, object]) -> None:
        super().call(call)
        os.kill(os.getpid(), signal.SIGKILL)


def commit_and_die(rank: int, world_size: int, url: str, pause: PauseMode) -> None:
    engine = Killed(url)
    engine.pause(pause)
    engine.call(COMMIT)


def settled(server: Server, count: int) -> list[str]:
    deadline = time.monotonic() + 30
    while len(server.asked) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # for what should not come
    return server.asked


@pytest.mark.parametrize(
    ("pause", "after"), [(PauseMode.WAIT, ["reset_prefix_cache", "resume"]), (PauseMode.KEEP, ["resume"])]
)
def test_a_trainer_that_dies_leaves_no_server_paused(pause: PauseMode, after: list[str]) -> None:
    expected = [f"pause?mode={pause.value}", "commit", "abandon", *after]
    with serving() as server:
        with pytest.raises(RanksFailedError):
            run_distributed(commit_and_die, 1, None, args=(server.url, pause), fresh=True)
        assert settled(server, len(expected)) == expected


def test_a_server_whose_weights_are_not_back_is_left_paused() -> None:
    expected = ["pause?mode=wait", "commit", "abandon"]
    with serving(refused="abandon") as server:
        with pytest.raises(RanksFailedError):
            run_distributed(commit_and_die, 1, None, args=(server.url, PauseMode.WAIT), fresh=True)
        assert settled(server, len(expected)) == expected


def test_after_a_pause_has_ended_nothing_is_asked_when_the_trainer_ends() -> None:
    with serving() as server:
        engine = HttpEngine(server.url)
        for _ in range(2):
            engine.pause(PauseMode.ABORT)
            engine.resume(reset_cache=True)
        engine.close()
        assert settled(server, 6) == ["pause?mode=abort", "reset_prefix_cache", "resume"] * 2


def test_a_server_that_cannot_be_paused_is_resumed_at_once() -> None:
    with serving(refused="pause?mode=wait") as server:
        engine = HttpEngine(server.url)
        with pytest.raises(RefitError, match="answered 500"):
            engine.pause(PauseMode.WAIT)
        engine.close()
        assert settled(server, 2) == ["pause?mode=wait", "resume"]


def test_a_server_that_could_not_be_resumed_is_tried_again_at_the_end() -> None:
    with serving(deaf="resume") as server:
        engine = HttpEngine(server.url)
        engine.pause(PauseMode.KEEP)
        with pytest.raises(RefitError, match="cannot reach"):
            engine.resume(reset_cache=False)
        server.deaf = ""
        engine.close()
        assert settled(server, 4) == ["pause?mode=keep", "resume", "abandon", "resume"]
