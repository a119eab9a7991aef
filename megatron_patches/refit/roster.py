"""Which engines a training run pushes to: those that take part, and those that failed and are asked until they answer.

[Note: returning] An engine that failed is taken back when its server says that it is well. That may be wrong, as of an
engine whose worker hangs, and then costs all others another failed push. So it is not asked before ten times as long
has passed as its failure took: a run spends at most a tenth of its time on engines that are not well.
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

_AGAIN_S = 5.0  # from one question to the next
_COST_FACTOR = 10.0  # see [Note: returning]


@dataclass
class _Lost:
    """An engine that failed.

    Attributes:
        engine: the engine.
        not_before: when it may be asked, as ``time.monotonic()`` tells.
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
        """Those that take part, in their order."""
        return [engine for engine in self._engines if engine.name not in self._lost]

    def drop_unreachable(self) -> list[str]:
        """Drops those that do not answer now, unless none does. Returns their names."""
        silent = {name for name, _ in on_each(self._engines, lambda engine: engine.check_up())}
        if len(silent) == len(self._engines):
            return []
        self.drop(silent, 0.0)
        return sorted(silent)

    def drop(self, names: Collection[str], cost_s: float) -> None:
        """Leaves engines out until they answer.

        Args:
            names: of them.
            cost_s: seconds that were lost by their failure.
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
        """Lets those take part again that answer. Returns their names."""
        with self._lock:
            back = [name for name, lost in self._lost.items() if lost.answers]
            for name in back:
                del self._lost[name]
        return back

    def close(self) -> None:
        """Asks none any more."""
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.wait(_AGAIN_S):
            now = time.monotonic()
            with self._lock:
                due = [lost for lost in self._lost.values() if not lost.answers and lost.not_before <= now]
            silent = {name for name, _ in on_each([lost.engine for lost in due], lambda engine: engine.check_up())}
            for lost in due:
                lost.answers = lost.engine.name not in silent
