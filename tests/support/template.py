"""New processes that have already imported what takes long: copies of a process that does nothing else.

::

    template = Template(prepare_megatron, {"OMP_NUM_THREADS": "1"})     # imports for seconds
    child = template.start(body, (1, 2))                                # runs body(1, 2) after milliseconds

Importing torch, Megatron and vLLM costs up to fifteen seconds of a processor, and the tests start well over a hundred
processes that need one of them. A template imports once. It never runs what its copies run, so one copy knows nothing
of another, and it refuses to be copied unless it has a single thread, as no other would exist in a copy. What is made
ready for CUDA cannot be copied either: importing torch is not that, importing what is built on it may be.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.support.protocol import BodyReference, Copied, Order, Prepared

PREPARE_TIMEOUT_S = 240.0
"""How long a template may import; generous, for a machine that is busy with other things."""

COPY_TIMEOUT_S = 60.0
LARGEST_MESSAGE = 1 << 20
_ROOT = Path(__file__).resolve().parents[2]
_PROCESS = Path(__file__).with_name("template_process.py")


class Process(Protocol):
    """What a copy has in common with a :class:`subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class Copy:
    """A process that a template has made.

    Attributes:
        pid: its number.
        returncode: as of :class:`subprocess.Popen`; 255 if the template ended before it could say.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its return code once it has ended."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired if it does not come."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(said) if said else 255
        return self.returncode


class Template:
    """A process that ``prepare`` has run in, and that nothing else runs in.

    Args:
        prepare: a function at module level; what it imports, its copies have.
        variables: environment variables of its own, on top of this process's.
        python: its interpreter; that of another environment imports from there, and this project from here.

    Attributes:
        pid: number of the process.
    """

    def __init__(self, prepare: Callable[[], None], variables: Mapping[str, str], python: str = sys.executable) -> None:
        self._other = [] if python == sys.executable else _path_of(python)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(COPY_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [python, str(_PROCESS), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | variables,
            )
        self._control.send(pickle.dumps(self._path()))
        self._control.send(pickle.dumps(BodyReference.of(prepare)))
        self.pid = self._process.pid
        self._obstacle: str | None = None

    def obstacle(self) -> str:
        """Why it cannot be copied, once it has prepared itself; empty if it can.

        Raises:
            TimeoutError: if it does not say so in time.
        """
        if self._obstacle is None:
            deadline = time.monotonic() + PREPARE_TIMEOUT_S
            while not select.select([self._control], [], [], 1.0)[0]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a template was not ready after {PREPARE_TIMEOUT_S:.0f} s")
            said = self._control.recv(LARGEST_MESSAGE)
            answer = pickle.loads(said) if said else Prepared("it ended before it was ready")
            self._obstacle = answer.error
        return self._obstacle

    def start(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        variables: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        output: Path | None = None,
        leads_session: bool = False,
    ) -> Copy:
        """Run a function in a copy.

        Args:
            function: one at module level; called with ``descriptors`` as numbered in the copy, then ``arguments``.
            arguments: must be picklable, small, and known without the function's module.
            variables: environment variables, on top of this process's at this moment.
            descriptors: open files to pass on.
            output: where what it prints goes; with this process's if None.
            leads_session: whether it is the first process of a session.

        Raises:
            RuntimeError: if the template could not prepare itself, or has ended.
        """
        obstacle = self.obstacle()
        if obstacle:
            raise RuntimeError(f"a template cannot be copied: {obstacle}")
        ours, theirs = os.pipe()
        order = Order(
            BodyReference.of(function),
            arguments,
            os.environ | dict(variables or {}),
            self._path(),
            str(output) if output is not None else "",
            leads_session,
        )
        said = b""
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._control, [pickle.dumps(order)], [theirs, *descriptors])
                said = self._control.recv(LARGEST_MESSAGE)
        finally:
            os.close(theirs)
            if not said:
                os.close(ours)
        if not said:
            raise RuntimeError(f"the template, process {self.pid}, has ended")
        copied: Copied = pickle.loads(said)
        return Copy(copied.pid, ours)

    def close(self) -> None:
        """End the process. Its copies live on, unless they look whether their parent does."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _path(self) -> list[str]:
        """Where it imports from: what this process does, or another environment and this project."""
        return self._other or [entry or str(Path.cwd()) for entry in sys.path]


def _path_of(python: str) -> list[str]:
    """Where another interpreter imports from, behind this project."""
    code = "import json, sys; print(json.dumps(sys.path))"
    said = subprocess.run([python, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return [str(_ROOT), *json.loads(said.stdout)]
