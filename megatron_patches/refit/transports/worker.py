"""A thread that executes tasks in order, for transports whose payloads need one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.transports.frames import LOOK_AROUND_S, Patience


class Worker:
    """Executes tasks in order, in a daemon thread; ThreadPoolExecutor's threads are not daemons.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, work: Callable[[], T]) -> Future[T]:
        """Schedules ``work`` after the tasks submitted before. After :meth:`close`, it fails instead."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised by the future's result()
                future.set_exception(error)

        with self._lock:
            if self._is_closed:  # nobody would ever take the task
                future.set_exception(PartyFailedError(f"{self._thread.name} has ended"))
            else:
                self._tasks.put(task)
        return future

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends the thread after the submitted tasks. Waits up to ``timeout_s`` seconds for that."""
        with self._lock:
            self._is_closed = True
            self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def wait_for[T](future: Future[T], patience: Patience) -> T:
    """The result of a :class:`Worker`'s task.

    Raises:
        PartyFailedError: at the deadline; also whatever the work or the check of ``patience`` raises.
    """
    while not future.done():
        with suppress(TimeoutError):
            return future.result(LOOK_AROUND_S)
        patience.tick()
    return future.result()
