"""Runs one task at a time in a thread, while the engine answers requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from megatron_patches.refit.errors import RefitError

logger = logging.getLogger(__name__)


class Aside:
    """Runs one task at a time.

    Args:
        device: the device that tasks use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Starts a task. Exceptions are logged.

        Args:
            name: for the log.
            work: the task.

        Raises:
            RefitError: if an earlier task has not ended.
            RuntimeError: if the system has no more threads.
        """
        self.finish(0.0)

        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                with torch.no_grad():
                    work()
                if self._device.type == "cuda":
                    # The result is used in another thread, on another stream.
                    torch.cuda.current_stream(self._device).synchronize()
            except Exception:
                logger.exception("refit: %s failed; the weights that served serve on", name)

        thread = threading.Thread(target=run, name=f"refit-{name}", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def idle(self) -> bool:
        """Whether no task is running."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        """Waits until no task is running.

        Raises:
            RefitError: if a task does not end in time.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RefitError(f"{self._thread.name} did not end within {timeout_s:.0f} s")
            self._thread = None
