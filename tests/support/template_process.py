"""A template's process: it prepares itself, then makes a copy of itself for each order.

Started by :mod:`tests.support.template` as ``template_process.py SOCKET_FD PARENT_PID``. It may have no second thread,
so one loop waits for orders, for the ends of copies, and for the end of the parent.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.protocol import Order

LARGEST_MESSAGE = 1 << 20
MOST_DESCRIPTORS = 8
CUDA_DEVICES = "/dev/nvidia"
LOOK_FOR_PARENT_S = 1.0


def main() -> None:
    """Prepare, then copy until the parent is gone."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this ends
    sys.path[:] = pickle.loads(control.recv(LARGEST_MESSAGE))  # its own, so that imports mean the same here
    from tests.support.protocol import Prepared

    error = ""
    try:
        pickle.loads(control.recv(LARGEST_MESSAGE)).load()()
        error = _obstacle()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
        error = traceback.format_exc()
    # What is there stays: copies need not look for garbage in it, nor write to its pages.
    gc.collect()
    gc.freeze()
    control.send(pickle.dumps(Prepared(error)))
    if not error:
        Copier(control, parent).run()


def _obstacle() -> str:
    """Why this process must not be copied as it is; empty if it may."""
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads != 1:
        return f"it has {threads} threads, and a copy would have one of them"
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            opened.add(str(descriptor.readlink()))
    devices = sorted(path for path in opened if path.startswith(CUDA_DEVICES))
    if devices:
        return f"it has opened {', '.join(devices)}, and what CUDA has made ready for it is not there for a copy"
    return ""


class Copier:
    """Makes copies, and says how they end.

    Args:
        control: where orders come from.
        parent: the process that gives them.
    """

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control, self._parent = control, parent
        self._statuses: dict[int, int] = {}
        self._woken, wake = socket.socketpair()
        for end in (self._woken, wake):
            end.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Return when the parent is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while os.getppid() == self._parent:
                for key, _ in selector.select(LOOK_FOR_PARENT_S):
                    if key.fileobj is self._woken:
                        self._reap()
                    elif not self._take_order():
                        return

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = self._statuses.pop(ended[0])
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(status, str(os.waitstatus_to_exitcode(ended[1])).encode())
                os.close(status)

    def _take_order(self) -> bool:
        """False if there will be no more."""
        message, descriptors, _, _ = socket.recv_fds(self._control, LARGEST_MESSAGE, MOST_DESCRIPTORS)
        if not message:
            return False
        status, *passed = descriptors
        pid = os.fork()
        if not pid:
            self._become_copy([status, *self._statuses.values()])
            _carry_out(pickle.loads(message), passed)
        self._statuses[pid] = status
        for descriptor in passed:
            os.close(descriptor)
        from tests.support.protocol import Copied

        self._control.send(pickle.dumps(Copied(pid)))
        return True

    def _become_copy(self, statuses: list[int]) -> None:
        """Let go of what belongs to the template."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._control, self._woken, self._wake):
            end.close()
        for status in statuses:
            os.close(status)


def _carry_out(order: Order, descriptors: list[int]) -> None:
    """Do what a copy is made for, and end."""
    code = 1
    try:
        if order.leads_session:
            os.setsid()
        if order.output:
            file = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.close(file)
        os.environ.clear()
        os.environ.update(order.variables)
        sys.path[:] = order.path
        order.function.load()(*descriptors, *order.arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - nobody else will print it
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
