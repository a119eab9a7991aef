"""A server that a trainer has paused is resumed, however the trainer ends; with a server that notes what is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megatron_patches.refit import engines, resumer
from megatron_patches.refit.engines import HttpEngine, PauseMode
from megatron_patches.refit.errors import RefitError
from tests.support.launch import RanksFailedError, run_distributed

RESUME, EMPTY = resumer.RESUME, resumer.EMPTY_CACHES


class Server(ThreadingHTTPServer):
    """Answers everything; ``refused`` routes with an error, ``deaf`` ones not, and the first time in ``odd`` words.

    A cache can be emptied once it was tried ``used`` times.
    """

    def __init__(self, refused: str = "", deaf: str = "", odd: str = "", used: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused, self.deaf, self.odd, self.used = refused, deaf, odd, used
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
        if asked == self.server.odd:
            self.server.odd = ""
            self.wfile.write(b"what?\r\n\r\n")
            self.close_connection = True
            return
        self.send_response(500 if asked == self.server.refused else 200)
        self.end_headers()
        if asked == EMPTY and self.server.used:
            self.server.used -= 1
            self.wfile.write(b'{"success": false}')
        else:
            self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


@contextmanager
def serving(refused: str = "", deaf: str = "", odd: str = "", used: int = 0) -> Iterator[Server]:
    with Server(refused, deaf, odd, used) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class Killed(HttpEngine):
    """Its process is killed, as by the kernel, in the midst of a commit."""

    def commit(self, version: int, *, reset_cache: bool) -> None:
        super().commit(version, reset_cache=reset_cache)
        os.kill(os.getpid(), signal.SIGKILL)


def commit_and_die(rank: int, world_size: int, url: str, pause: PauseMode) -> None:
    engine = Killed(url)
    engine.pause(pause)
    engine.commit(1, reset_cache=False)


def fork(engine: HttpEngine) -> int:
    """A process that has the pipe open for a while, as a data loader's worker has; its number."""
    stdin = watcher(engine).stdin
    assert stdin is not None
    pipe = stdin.fileno()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads
        child = os.fork()
    if not child:
        os.setsid()  # whoever ends the trainer's group leaves it
        os.closerange(0, pipe)
        os.closerange(pipe + 1, 1 << 16)
        time.sleep(60)
        os._exit(0)
    return child


def fork_and_die(rank: int, world_size: int, url: str, children: str) -> None:
    engine = Killed(url)
    engine.pause(PauseMode.KEEP)
    Path(children).write_text(str(fork(engine)), encoding="utf-8")
    engine.commit(1, reset_cache=False)


def watcher(engine: HttpEngine) -> subprocess.Popen[bytes]:
    process = engine._resumer._process
    assert process is not None
    return process


def settled(server: Server, count: int) -> list[str]:
    deadline = time.monotonic() + 30
    while len(server.asked) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # for what should not come
    return server.asked


@pytest.mark.parametrize(
    ("pause", "asked", "after"),
    [
        (PauseMode.WAIT, "sleep?level=0&mode=wait", [EMPTY, RESUME]),
        (PauseMode.ABORT, "sleep?level=0&mode=abort", [EMPTY, RESUME]),
        (PauseMode.KEEP, "pause?mode=keep", [RESUME]),
    ],
)
def test_a_trainer_that_dies_leaves_no_server_paused(
    pause: PauseMode, asked: str, after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # of no concern
    monkeypatch.delenv("no_proxy", raising=False)
    expected = [asked, "commit", "abandon", *after]
    with serving() as server:
        with pytest.raises(RanksFailedError):
            run_distributed(commit_and_die, 1, None, args=(server.url, pause), fresh=True)
        assert settled(server, len(expected)) == expected


def test_a_server_whose_weights_are_not_back_is_left_paused() -> None:
    expected = ["sleep?level=0&mode=wait", "commit", "abandon"]
    with serving(refused="abandon") as server:
        with pytest.raises(RanksFailedError):
            run_distributed(commit_and_die, 1, None, args=(server.url, PauseMode.WAIT), fresh=True)
        assert settled(server, len(expected)) == expected


def test_a_cache_that_is_still_used_is_emptied_before_anything_is_resumed() -> None:
    expected = ["sleep?level=0&mode=wait", "commit", "abandon", EMPTY, EMPTY, EMPTY, RESUME]
    with serving(used=2) as server:
        with pytest.raises(RanksFailedError):
            run_distributed(commit_and_die, 1, None, args=(server.url, PauseMode.WAIT), fresh=True)
        assert settled(server, len(expected)) == expected


def test_a_server_with_a_cache_of_older_weights_stays_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_EMPTYING_S", 0.5)
    with serving(used=1000) as server:
        engine = HttpEngine(server.url)
        engine.pause(PauseMode.WAIT)
        with pytest.raises(RefitError, match="could not empty its prefix cache"):
            engine.resume(reset_cache=True)
        assert RESUME not in server.asked
        server.used = 0
        engine.close()
        assert settled(server, len(server.asked) + 3)[-3:] == ["abandon", EMPTY, RESUME]


def test_after_a_pause_has_ended_nothing_is_asked_when_the_trainer_ends() -> None:
    with serving() as server:
        engine = HttpEngine(server.url)
        for _ in range(2):
            engine.pause(PauseMode.ABORT)
            engine.resume(reset_cache=True)
        engine.close()
        assert settled(server, 6) == ["sleep?level=0&mode=abort", EMPTY, RESUME] * 2


def test_a_server_that_cannot_be_paused_is_resumed_at_once() -> None:
    with serving(refused="sleep?level=0&mode=wait") as server:
        engine = HttpEngine(server.url)
        with pytest.raises(RefitError, match="answered 500"):
            engine.pause(PauseMode.WAIT)
        engine.close()
        assert settled(server, 2) == ["sleep?level=0&mode=wait", RESUME]


def test_a_server_that_could_not_be_resumed_is_tried_again_at_the_end() -> None:
    with serving(deaf=RESUME) as server:
        engine = HttpEngine(server.url)
        engine.pause(PauseMode.KEEP)
        with pytest.raises(RefitError, match="cannot reach"):
            engine.resume(reset_cache=False)
        server.deaf = ""
        engine.close()
        assert settled(server, 4) == ["pause?mode=keep", RESUME, "abandon", RESUME]


def test_processes_that_the_trainer_has_forked_hide_its_end_from_nobody(tmp_path: Path) -> None:
    """They have the pipe open as well."""
    expected = ["pause?mode=keep", "commit", "abandon", RESUME]
    children = tmp_path / "child"
    try:
        with serving() as server:
            with pytest.raises(RanksFailedError):
                run_distributed(fork_and_die, 1, None, args=(server.url, str(children)), fresh=True)
            assert settled(server, len(expected)) == expected
    finally:
        os.kill(int(children.read_text(encoding="utf-8")), signal.SIGKILL)


def test_closing_waits_for_no_process_that_was_forked() -> None:
    with serving() as server:
        engine = HttpEngine(server.url)
        engine.pause(PauseMode.KEEP)
        child = fork(engine)
        try:
            engine.resume(reset_cache=False)
            started = time.monotonic()
            engine.close()
            assert time.monotonic() - started < 20
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert settled(server, 2) == ["pause?mode=keep", RESUME]


def test_a_watcher_that_was_killed_disturbs_nothing_and_is_replaced() -> None:
    with serving() as server:
        engine = HttpEngine(server.url)
        for _ in range(2):
            engine.pause(PauseMode.KEEP)
            watcher(engine).kill()
            watcher(engine).wait(30)
            engine.resume(reset_cache=False)
        engine.pause(PauseMode.KEEP)
        first = watcher(engine)
        engine.close()
        assert first.returncode == 0
        assert settled(server, 7) == ["pause?mode=keep", RESUME] * 2 + ["pause?mode=keep", "abandon", RESUME]
        engine.close()


def test_half_an_answer_is_none() -> None:
    with serving(odd="abandon") as server:
        engine = HttpEngine(server.url)
        engine.pause(PauseMode.KEEP)
        engine.close()
        assert settled(server, 4) == ["pause?mode=keep", "abandon", "abandon", RESUME]


def test_a_server_that_keeps_silent_keeps_nobody_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(odd="abandon") as server:
        engine = HttpEngine(server.url)
        engine.pause(PauseMode.KEEP)
        process = watcher(engine)
        monkeypatch.setattr(resumer, "_PERSISTENCE_S", 0.1)
        engine.close()
        assert process.wait(30) == 0
        assert settled(server, 4)[-1] == RESUME
