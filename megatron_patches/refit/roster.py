"""Which engines a training run pushes to: those that take part, and those that failed and are polled until they answer.

[Note: returning] An engine that failed is taken back when its server reports that it is healthy. The report may be
wrong, for example if a worker hangs, and the next push then fails for all engines. So the engine is not polled until
ten times the duration of its failure has passed: a run spends at most a tenth of its time on unhealthy engines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_patches.refit.commit import on_each
from megatron_patches.refit.engines import HttpEngine

logger = logging.getLogger(__name__)

_AGAIN_S = 5.0  # between polls
_COST_FACTOR = 10.0  # see [Note: returning]


@dataclass
class _Lost:
    """An engine that failed.

    Attributes:
        engine: the engine.
        not_before: time of ``time.monotonic()`` before which it is not polled.
        answers: whether it has answered since.
    """

    engine: HttpEngine
    not_before: float
    answers: bool = False


class Roster:
    """The engines of one training run, on its first rank.

    Args:
        engines: all of them.
    """

    def __init__(self, engines: Sequence[HttpEngine]) -> None:
        self._engines = list(engines)
        self._lost: dict[str, _Lost] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def present(self) -> list[HttpEngine]:
        """The engines that take part, in order."""
        return [engine for engine in self._engines if engine.name not in self._lost]

    def drop_unreachable(self) -> list[str]:
        """Drops engines that do not answer now, unless none answers. Returns their names."""
        silent = {name for name, _ in on_each(self._engines, lambda engine: engine.check_up())}
        if len(silent) == len(self._engines):
            return []
        self.drop(silent, 0.0)
        return sorted(silent)

    def drop(self, names: Collection[str], cost_s: float) -> None:
        """Leaves engines out until they answer.

        Args:
            names: names of the engines.
            cost_s: seconds lost by their failure.
        """
        not_before = time.monotonic() + max(_AGAIN_S, _COST_FACTOR * cost_s)
        with self._lock:
            for engine in self._engines:
                if engine.name in names:
                    self._lost[engine.name] = _Lost(engine, not_before)
        if self._thread is None and self._lost:
            self._thread = threading.Thread(target=self._ask, name="refit-roster", daemon=True)
            self._thread.start()

    def take_back(self) -> list[str]:
        """Takes back engines that answer. Returns their names."""
        with self._lock:
            back = [name for name, lost in self._lost.items() if lost.answers]
            for name in back:
                del self._lost[name]
        return back

    def close(self) -> None:
        """Stops polling."""
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.wait(_AGAIN_S):
            now = time.monotonic()
            with self._lock:
                due = [lost for lost in self._lost.values() if not lost.answers and lost.not_before <= now]
            silent = {name for name, _ in on_each([lost.engine for lost in due], lambda engine: engine.check_up())}
            for lost in due:
                lost.answers = lost.engine.name not in silent
