"""Ends the pause of a server whose trainer died before it could.

A small process of its own, which imports nothing of this package, reads from a pipe whether the trainer has the
server paused. The system closes the pipe when the trainer ends, however that happens. If the server is paused then, the
process has its workers give up the version under way, which puts the old weights back where a new version has been
received in their place; empties its prefix cache, as the commit may have gone through; and resumes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

_PAUSED, _PAUSED_KEEPING, _RESUMED = b"p", b"k", b"r"
_PERSISTENCE_S = 120.0  # how long a server is tried that does not answer
_ANSWER_S = 600.0  # it first ends the call that it is in
_RETRY_S = 1.0


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
            self._process = subprocess.Popen(  # noqa: S603 - this file, by this interpreter
                [sys.executable, "-P", __file__, self._url],  # -P: this package's modules hide none of Python's
                stdin=subprocess.PIPE,
                start_new_session=True,  # what ends the trainer, such as torchrun, ends its whole group
            )
        self._tell(_PAUSED_KEEPING if keep_cache else _PAUSED)

    def resumed(self) -> None:
        """The server has been resumed."""
        self._tell(_RESUMED)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait(_PERSISTENCE_S)

    def _tell(self, state: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(state)
                self._process.stdin.flush()


def watch(url: str) -> None:
    """What the process does."""
    state = _RESUMED
    while news := sys.stdin.buffer.read(1):
        state = news
    if state == _RESUMED:
        return
    if not _post(f"{url}/init_weight_transfer_engine", {"init_info": {"call": "abandon"}}):
        sys.stderr.write(f"refit: {url} stays paused: its weights could not be put back; start it anew\n")
        return
    if state == _PAUSED:
        _post(f"{url}/reset_prefix_cache")
    _post(f"{url}/resume")


def _post(url: str, body: dict[str, object] | None = None) -> bool:
    """Posts until there is an answer; whether that was that it is done."""
    deadline = time.monotonic() + _PERSISTENCE_S
    headers = {"Content-Type": "application/json"}
    data = b"" if body is None else json.dumps(body).encode()
    while time.monotonic() < deadline:
        try:
            request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310 - the trainer checked it
            urllib.request.urlopen(request, timeout=_ANSWER_S).close()  # noqa: S310 - as above
        except urllib.error.HTTPError:
            return False
        except OSError:
            time.sleep(_RETRY_S)
        else:
            return True
    return False


if __name__ == "__main__":
    watch(sys.argv[1])
