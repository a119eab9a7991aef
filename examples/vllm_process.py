"""Runs a vLLM server as a local process: starts it, waits for it, and ends it with all of its child processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PORTS = range(10000, 32768)
_AN_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception)\b: ")
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 180.0
"""Seconds for a killed server to release its memory, which took more than half a minute on a busy machine."""

OF_A_SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that replace weights
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Environment variables: ``OF_A_SERVER`` for every server, these for a build of vLLM for CPUs."""


class ServerError(Exception):
    """The server did not start, or did not answer."""


def _free_port() -> int:
    """A free port outside the ephemeral range, because it must stay free until vLLM binds it, which takes a while.

    Raises:
        ServerError: if none is found.
    """
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ServerError(f"no free port among 100 of {_PORTS.start} to {_PORTS.stop - 1}")


@dataclass(frozen=True)
class RunningServer:
    """A running server.

    Attributes:
        url: its base URL.
        process: its first process, the leader of its own session.
    """

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def running_server(
    model: Path,
    name: str,
    backend: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    python: str = sys.executable,
    *,
    port: int = 0,
) -> Iterator[RunningServer]:
    """Start a server whose weights are random until weights are pushed; it ends with the context.

    Args:
        model: folder with a configuration and a tokenizer.
        name: the model's name in requests.
        backend: vLLM's name of the weight transfer backend.
        arguments: additional command-line arguments.
        variables: environment variables, on top of this process's and of :data:`OF_A_SERVER`.
        log: file for its output.
        python: the interpreter of vLLM's environment.
        port: port to listen on; 0 for any free port.

    Raises:
        ServerError: with the end of its log and the first error in it, if it does not start.
    """
    port = port or _free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", name, "--load-format", "dummy"),
        *("--weight-transfer-config", json.dumps({"backend": backend}), *arguments),
        *("--middleware", "megatron_patches.refit.vllm.guard.RefitGuard"),
    ]
    url = f"http://127.0.0.1:{port}"
    process = _started(command, {**os.environ, **OF_A_SERVER, **variables}, log, url)
    try:
        yield RunningServer(url, process)
    finally:
        _end(process)


def _started(command: Sequence[str], environment: Mapping[str, str], log: Path, url: str) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers; raises ServerError as :func:`running_server` does."""
    deadline = time.monotonic() + START_TIMEOUT_S
    tries_left = 3
    while True:
        tries_left -= 1
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(  # noqa: S603
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if _is_up(url):
                    return process
                time.sleep(0.5)
        except BaseException:
            _end(process)
            raise
        late = process.poll() is None
        _end(process)
        said = log.read_text()
        # Its processes look for free ports and bind them later: on a busy machine, another process may bind them first.
        if late or not tries_left or "address already in use" not in said.lower():
            why = f"it did not answer within {START_TIMEOUT_S:g} s" if late else _first_error(said)
            raise ServerError(f"the end of {log}:\n{said[-4000:]}\nvLLM did not start: {why}")


def _first_error(said: str) -> str:
    """The first exception in a server's output; later ones come from other processes that end as a consequence."""
    errors = (line for line in said.splitlines() if _AN_ERROR.search(line))
    return next(errors, "it has ended").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the process exit by itself, then kill what is left of its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_TIMEOUT_S)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0):  # noqa: S310 - this machine's own server
            return True
    except OSError:
        return False
