"""Resumes a paused server whose trainer has died.

A small process of its own, which imports nothing of this package, reads from a pipe whether the trainer has the
server paused. When the trainer ends, however that happens, the system closes the pipe, or, where a process that it has
forked still has it open, gives this one another parent. If the server is paused then, the process has its workers give
up the version under way, which puts the old weights back where a new version has been received in their place; empties
its prefix cache, as the commit may have gone through; and resumes it. What cannot be brought to answer from one version
stays paused.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

logger = logging.getLogger(__name__)

EMPTY_CACHES = "reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""Route that empties the prefix caches of a server that is paused, whatever holds them."""
RESUME = "wake_up?tags=scheduling"
"""Route that ends a pause, whichever route began it."""

_PAUSED, _PAUSED_KEEPING, _RESUMED = b"p", b"k", b"r"
_END = b"e"  # of the trainer's interest, in whatever state
_LOOK_AROUND_S = 1.0  # how often it looks whether the trainer is still there
_PERSISTENCE_S = 120.0  # how long a server is tried that does not answer
_ANSWER_S = 600.0  # it first ends the call that it is in
_EMPTYING_S = 30.0  # for what still uses a prefix cache to end
_RETRY_S = 1.0
# As the trainer does, whatever http_proxy says.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Resumer:
    """Watches over the pauses of one server.

    Args:
        url: base of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: subprocess.Popen[bytes] | None = None

    def pausing(self, *, keep_cache: bool) -> None:
        """The server is about to be paused.

        Args:
            keep_cache: whether its prefix cache is to stay as it is.

        Raises:
            OSError: if the process cannot be started.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603 - this file, by this interpreter
                # -P: this package's modules hide none of Python's
                [sys.executable, "-P", __file__, self._url, str(os.getpid())],
                stdin=subprocess.PIPE,
                bufsize=0,  # what could not be told is not told again
                start_new_session=True,  # what ends the trainer, such as torchrun, ends its whole group
            )
        self._tell(_PAUSED_KEEPING if keep_cache else _PAUSED)

    def resumed(self) -> None:
        """The server has been resumed."""
        self._tell(_RESUMED)

    def close(self) -> None:
        """Ends the process; if the server is paused still, once that has resumed it."""
        process = self._process
        if process is None or process.stdin is None:
            return
        self._tell(_END)
        self._process = None
        process.stdin.close()
        try:
            process.wait(_PERSISTENCE_S)
        except subprocess.TimeoutExpired:
            logger.warning("refit: process %d still tries to resume %s, and goes on", process.pid, self._url)

    def _tell(self, state: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it was killed; the next pause starts another one
                self._process.stdin.write(state)


def watch(url: str, trainer: int) -> None:
    """What the process does.

    Args:
        url: base of the server.
        trainer: number of the process that it watches over, its parent.
    """
    state = _last_state(trainer)
    if state == _RESUMED:
        return
    if _post(f"{url}/init_weight_transfer_engine", {"init_info": {"call": "abandon"}}) is None:
        _say(f"{url} stays paused: it did not say that its weights are back; start it anew")
        return
    if state == _PAUSED and not _emptied(url):
        _say(
            f"{url} stays paused: its prefix cache may be of older weights, and could not be emptied; "
            f"POST {url}/{EMPTY_CACHES}, then {url}/{RESUME}"
        )
        return
    if _post(f"{url}/{RESUME}") is None:
        _say(f"{url} stays paused: it did not answer; POST {url}/{RESUME}")


def _last_state(trainer: int) -> bytes:
    """What the trainer has said last, once it says no more."""
    state = _RESUMED
    while True:
        there = os.getppid() == trainer  # looked at first, so that its last words are read after it has gone
        if select.select([sys.stdin.fileno()], [], [], _LOOK_AROUND_S)[0]:
            news = os.read(sys.stdin.fileno(), 1)
            if news in (b"", _END):
                return state
            state = news
        elif not there:
            return state


def _say(text: str) -> None:
    sys.stderr.write(f"refit: {text}\n")


def _emptied(url: str) -> bool:
    """Empties the prefix caches, which something may still use."""
    deadline = time.monotonic() + _EMPTYING_S
    while (answer := _post(f"{url}/{EMPTY_CACHES}")) is None or answer.get("success") is False:
        if time.monotonic() > deadline:
            return False
        time.sleep(_RETRY_S)
    return True


def _post(url: str, body: dict[str, object] | None = None) -> dict[str, object] | None:
    """Posts until there is an answer, and gives it; None if it is an error, or none comes."""
    deadline = time.monotonic() + _PERSISTENCE_S
    headers = {"Content-Type": "application/json"}
    data = b"" if body is None else json.dumps(body).encode()
    while time.monotonic() < deadline:
        try:
            request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310 - the trainer checked it
            with _open(request, timeout=_ANSWER_S) as answer:
                return _fields(answer.read())
        except urllib.error.HTTPError:
            return None
        except (OSError, http.client.HTTPException):  # such as half an answer
            time.sleep(_RETRY_S)
    return None


def _fields(content: bytes) -> dict[str, object]:
    """Of an answer; none where it is something else."""
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
