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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_PORTS = range(10000, 32768)
_TRIES = 3
_POLL_S = 0.5
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


class ServerProcess(Protocol):
    """The first process of a server, the leader of its own session; a ``subprocess.Popen`` is one."""

    pid: int

    def poll(self) -> int | None:
        """See ``subprocess.Popen``."""

    def wait(self, timeout: float | None = None) -> int:
        """See ``subprocess.Popen``."""

    def send_signal(self, sig: int) -> None:
        """See ``subprocess.Popen``."""


def new_process(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, python: str = sys.executable
) -> ServerProcess:
    """Run ``python -m`` with the arguments.

    Args:
        arguments: a module and its arguments.
        environment: all environment variables.
        log: file for its output.
        python: the interpreter of vLLM's environment.
    """
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(  # noqa: S603
            [python, "-m", *arguments], env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


class RunningServer:
    """A server whose process has been started; :meth:`is_up` says whether it answers yet.

    Attributes:
        url: its base URL.
        process: its first process.
    """

    def __init__(self, start: Callable[[], ServerProcess], log: Path, url: str) -> None:
        self.url = url
        self._start_process, self._log = start, log
        self._tries_left = _TRIES
        self._answered = False
        self._deadline = time.monotonic() + START_TIMEOUT_S
        self._start()

    def _start(self) -> None:
        self._tries_left -= 1
        self.process = self._start_process()

    def is_up(self) -> bool:
        """Whether it has answered. One that ended because another process had bound its port is started again.

        Raises:
            ServerError: with the end of its log and the first error in it, if it does not start.
        """
        if self._answered:
            return True
        running = self.process.poll() is None
        self._answered = running and _is_up(self.url)
        late = time.monotonic() > self._deadline
        if self._answered or (running and not late):
            return self._answered
        self.end()
        said = self._log.read_text()
        # Its processes look for free ports and bind them later: on a busy machine, another process may bind them first.
        if late or not self._tries_left or "address already in use" not in said.lower():
            why = f"it did not answer within {START_TIMEOUT_S:g} s" if late else _first_error(said)
            raise ServerError(f"the end of {self._log}:\n{said[-4000:]}\nvLLM did not start: {why}")
        self._start()
        return False

    def wait(self) -> None:
        """Wait until it answers; raises ServerError as :meth:`is_up` does."""
        while not self.is_up():
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Let the process exit by itself, then kill what is left of its session."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(KILL_TIMEOUT_S)


@contextmanager
def starting_server(
    model: Path,
    name: str,
    backend: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    launch: Callable[[Sequence[str], Mapping[str, str], Path], ServerProcess] = new_process,
    *,
    port: int = 0,
) -> Iterator[RunningServer]:
    """Start a server whose weights are random until weights are pushed; it ends with the context.

    It takes a while until the server answers: call :meth:`RunningServer.wait` before the first request.

    Args:
        model: folder with a configuration and a tokenizer.
        name: the model's name in requests.
        backend: vLLM's name of the weight transfer backend.
        arguments: additional command-line arguments.
        variables: environment variables, on top of this process's and of :data:`OF_A_SERVER`.
        log: file for its output.
        launch: what starts the process; see :func:`new_process`.
        port: port to listen on; 0 for any free port.

    Raises:
        ServerError: if no port is free.
    """
    port = port or _free_port()
    command = [
        *("vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", name, "--load-format", "dummy"),
        *("--weight-transfer-config", json.dumps({"backend": backend}), *arguments),
        *("--middleware", "megatron_patches.refit.vllm.guard.RefitGuard"),
    ]
    environment = {**os.environ, **OF_A_SERVER, **variables}
    server = RunningServer(lambda: launch(command, environment, log), log, f"http://127.0.0.1:{port}")
    try:
        yield server
    finally:
        server.end()


def visible_gpus() -> list[str]:
    """This machine's GPUs, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    number = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:number] if named else list(map(str, range(number)))


def _first_error(said: str) -> str:
    """The first exception in a server's output; later ones come from other processes that end as a consequence."""
    # vLLM warns of exceptions that may come.
    errors = (line for line in said.splitlines() if _AN_ERROR.search(line) and " WARNING " not in line)
    return next(errors, "it has ended").strip()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0):  # noqa: S310 - this machine's own server
            return True
    except OSError:
        return False
