"""Ends the process when a peer does not answer; a stream that waits for a value in memory would wait forever."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.5
_KEEP_AT_MOST = 4096


class Watchdog:
    """Watches device work that depends on peers. Its thread lives as long as this object.

    A host thread that waits for the device cannot be interrupted, so a timeout ends the process, as NCCL's does.

    Args:
        timeout_s: seconds from enqueueing the work until it must be done.
        who: names rank and peers in the message.
        prepare_thread: called once by the watching thread, before it queries events.
        device: where the streams of :meth:`expect_stream` are; None: the current CUDA device.
    """

    def __init__(
        self,
        timeout_s: float,
        who: str,
        prepare_thread: Callable[[], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._who = who
        self._device = device
        self._expected: deque[tuple[Any, str, float]] = deque()
        self._lock = threading.Lock()
        arguments = (weakref.ref(self), prepare_thread)
        threading.Thread(target=_watch, args=arguments, name="etp-watchdog", daemon=True).start()

    def expect(self, event: Any, what: str) -> None:
        """Watch that ``event``, which has a method ``query``, happens in time; ``what`` names it in the message."""
        with self._lock:
            if len(self._expected) == _KEEP_AT_MOST:
                # Drop the newest: stuck work is among the oldest.
                self._expected.pop()
            self._expected.append((event, what, time.monotonic()))

    def expect_stream(self, what: str) -> None:
        """Watch all work enqueued so far on the current stream; does nothing inside a capture, where nothing runs."""
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self.expect(event, what)

    def overdue(self) -> str | None:
        """Forget the events that have happened, and return what the first overdue one was for; None if none is."""
        with self._lock:
            while self._expected and self._expected[0][0].query():
                self._expected.popleft()
            if not self._expected or time.monotonic() - self._expected[0][2] < self.timeout_s:
                return None
            return f"{self._expected[0][1]} {self._who}"


def _watch(reference: weakref.ref[Watchdog], prepare: Callable[[], None] | None) -> None:
    if prepare is not None:
        prepare()
    del prepare
    while True:
        time.sleep(_CHECK_EVERY_S)
        watchdog = reference()
        if watchdog is None:
            return
        what = watchdog.overdue()
        if what is not None:
            logger.critical(
                "%s did not finish within %.0f s: a peer has most likely ended, left the common order of layers, or no "
                "more batches (all ranks need equally many, also in an evaluation); its own output has the cause. "
                "Ending this process",
                what,
                watchdog.timeout_s,
            )
            os.kill(os.getpid(), signal.SIGABRT)
            return
        del watchdog
