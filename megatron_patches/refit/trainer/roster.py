"""The engines of a training run, on its first rank: those to push to, and those that failed and are polled.

[Note: returning] An engine that failed is taken back when it says that it is up. That may be wrong, for example if a
worker hangs. So it is not polled until ten times the duration of its failure has passed: a run spends at most a tenth
of its time on engines that are not well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engine_client import EngineClient, why_not_up
from megatron_patches.refit.trainer.engines import HttpEngine, check_given_once, engine_of

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
        is_asked: whether it is being asked.
    """

    engine: EngineClient
    not_before: float
    answers: bool = False
    is_asked: bool = False


class Roster:
    """The engines that are to be served. Its methods may be called from any thread.

    Args:
        came: called with each engine that answers again after it failed.
    """

    def __init__(self, came: Callable[[EngineClient], None] = lambda _: None) -> None:
        self._came = came
        self._engines: list[EngineClient] = []
        self._lost: list[_Lost] = []
        self._servers: dict[str, EngineClient] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def attached(self) -> list[EngineClient]:
        """All engines, in order, those that failed included."""
        with self._lock:
            return list(self._engines)

    @property
    def present(self) -> list[EngineClient]:
        """The engines that take part, in order."""
        with self._lock:
            lost = {id(one.engine) for one in self._lost}
            return [engine for engine in self._engines if id(engine) not in lost]

    def add(self, engines: Sequence[EngineClient]) -> None:
        """Adds engines.

        Raises:
            ValueError: if one is given twice, or two have one name.
        """
        with self._lock:
            check_given_once([*self._engines, *engines])
            self._engines += engines

    def remove(self, name: str) -> None:
        """Removes an engine.

        Raises:
            ValueError: if there is no engine of this name.
        """
        with self._lock:
            left = [engine for engine in self._engines if engine.name != name]
            if len(left) == len(self._engines):
                known = ", ".join(engine.name for engine in self._engines)
                raise ValueError(f"there is no engine {name}; attached are {known or 'none'}")
            self._engines = left
            self._lost = [lost for lost in self._lost if lost.engine.name != name]

    def set(self, engines: Sequence[EngineClient]) -> None:
        """Replaces all engines.

        Raises:
            ValueError: if one is given twice, or two have one name.
        """
        check_given_once(engines)
        with self._lock:
            self._engines, self._lost, self._servers = list(engines), [], {}

    def check_other(self, engine: EngineClient) -> None:
        """Refuses a server that is attached under another name. Call it once the server has answered.

        Raises:
            RefitError: with both names.
        """
        asked = engine_of(engine)
        server = asked.server if isinstance(asked, HttpEngine) else ""
        with self._lock:
            known = self._servers.get(server)
            if known is not None and known.name != engine.name and known in self._engines:
                raise RefitError(f"{known.name} and {engine.name} are one server; give it once")
            if server:
                self._servers[server] = engine

    def drop(self, engine: EngineClient, cost_s: float) -> None:
        """Leaves an engine out until it answers, unless it was removed meanwhile.

        Args:
            engine: the engine.
            cost_s: seconds lost by its failure.
        """
        not_before = time.monotonic() + max(_AGAIN_S, _COST_FACTOR * cost_s)
        with self._lock:
            if all(engine is not one for one in self._engines):
                return
            self._lost.append(_Lost(engine, not_before))
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="refit-roster", daemon=True)
                self._thread.start()

    def take_back(self) -> list[EngineClient]:
        """Takes back engines that answer. Returns them."""
        with self._lock:
            back = [lost.engine for lost in self._lost if lost.answers]
            self._lost = [lost for lost in self._lost if not lost.answers]
        return back

    def close(self) -> None:
        """Stops polling."""
        self._closed.set()

    def _poll(self) -> None:
        while not self._closed.wait(_AGAIN_S):
            now = time.monotonic()
            with self._lock:
                due = [lost for lost in self._lost if not (lost.answers or lost.is_asked) and lost.not_before <= now]
            for lost in due:  # each in a thread of its own, because one that hangs must not delay the others
                lost.is_asked = True
                name = f"refit-asks-{lost.engine.name}"
                threading.Thread(target=self._ask, args=(lost,), name=name, daemon=True).start()

    def _ask(self, lost: _Lost) -> None:
        is_up = why_not_up(lost.engine) is None
        with self._lock:  # it may have been removed since
            lost.answers, lost.is_asked = is_up and any(lost is one for one in self._lost), False
        if lost.answers:
            logger.info("refit: %s answers again", lost.engine.name)
            self._came(lost.engine)
