"""Pauses engines and makes them serve a received version, or continue with the previous one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from megatron_patches.refit.engines import EngineClient, PauseMode
from megatron_patches.refit.errors import PartyFailedError, RefitError
from megatron_patches.refit.exchange import describe_error


class Pauses:
    """Tracks which engines are paused and for how long.

    Args:
        mode: what happens to requests in flight.
    """

    def __init__(self, mode: PauseMode) -> None:
        self._mode = mode
        # By engine. Each entry is written only by the thread that works on that engine.
        self._since: dict[int, float] = {}
        self._lasted: dict[int, float] = {}

    @property
    def empties_caches(self) -> bool:
        """Whether cache entries computed with the old weights must be dropped."""
        return self._mode is not PauseMode.KEEP

    @property
    def longest_s(self) -> float:
        """The longest pause of an engine in the last push, in seconds."""
        return max(self._lasted.values(), default=0.0)

    def begin_push(self) -> None:
        """Resets the recorded pauses at the start of a push."""
        self._lasted.clear()

    def begin_all(self, engines: Sequence[EngineClient]) -> None:
        """Pauses all engines in parallel; if one cannot be paused, resumes the others.

        Raises:
            PartyFailedError: if an engine cannot be paused.
        """

        def begin(engine: EngineClient) -> None:
            try:
                self.begin(engine)
            except Exception as error:
                raise RefitError(f"{engine.name} cannot be paused: {describe_error(error)}") from error

        failures = on_each(engines, begin)
        if failures:
            stuck = on_each(engines, lambda engine: self.end(engine, reset_cache=False))
            raise of_engines([*failures, *stuck])

    def begin(self, engine: EngineClient) -> None:
        """Pauses an engine unless it is paused already.

        Raises:
            RefitError: if pausing fails.
        """
        if id(engine) not in self._since:
            since = time.perf_counter()
            engine.pause(self._mode)
            self._since[id(engine)] = since

    def end(self, engine: EngineClient, *, reset_cache: bool) -> None:
        """Resumes an engine if it is paused.

        Raises:
            RefitError: if resuming fails.
        """
        since = self._since.pop(id(engine), None)
        if since is not None:
            try:
                engine.resume(reset_cache=reset_cache and self.empties_caches)
            finally:
                self._lasted[id(engine)] = time.perf_counter() - since

    def forget(self, engine: EngineClient) -> None:
        """Leaves an engine paused."""
        self._since.pop(id(engine), None)


def on_each[E: EngineClient](engines: Sequence[E], work: Callable[[E], None]) -> list[tuple[str, Exception]]:
    """Runs ``work`` on all engines in parallel, so that none stays paused for another.

    Terminates because every call of an engine has a timeout; see :class:`EngineClient`.

    Returns:
        For each engine that failed: its name, which need not be unique, and the error.
    """
    failures: list[tuple[str, Exception]] = []

    def run(engine: E) -> None:
        try:
            work(engine)
        except Exception as error:  # noqa: BLE001 - the caller raises one error for all engines
            failures.append((engine.name, error))

    threads = [
        threading.Thread(target=run, args=(engine,), name=f"refit-of-{engine.name}", daemon=True) for engine in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def of_engines(failures: Iterable[tuple[str, Exception]]) -> PartyFailedError:
    """One error for the failures of several engines. A failure that names other engines as culprits blames those."""
    culprits: set[str] = set()
    reasons: list[str] = []
    for name, error in failures:
        culprits |= set(error.engines) if isinstance(error, PartyFailedError) else {name}
        reasons.append(describe_error(error))
    return PartyFailedError("; ".join(dict.fromkeys(reasons)), culprits)


class Commit:
    """The engines' commit of one version, in its own thread. Does nothing on ranks without engines.

    Args:
        version: number of the version.
        engines: all engines on the first rank; none on other ranks.
        pauses: the engines' pauses.
        received: waits until every engine has ended the call in which it receives the version; raises RefitError if one
            could not be reached.
        confirm: waits until the workers report that they serve it; raises PartyFailedError with others' reasons.
        in_place: whether engines are already paused and workers receive into serving memory.
        timeout_s: timeout of one engine, in seconds.
    """

    def __init__(
        self,
        version: int,
        engines: Sequence[EngineClient],
        pauses: Pauses,
        *,
        received: Callable[[], None],
        confirm: Callable[[], None],
        in_place: bool,
        timeout_s: float,
    ) -> None:
        self.version = version
        self._engines, self._pauses = engines, pauses
        self._received, self._confirm = received, confirm
        self._in_place, self._timeout_s = in_place, timeout_s
        self._failure: PartyFailedError | None = None
        self._done: set[int] = set()
        self._thread = threading.Thread(target=self._run, name=f"refit-commit-{version}", daemon=True)

    def start(self) -> None:
        """Starts the commit."""
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether the commit is running: it may still pause and resume engines."""
        return self._thread.is_alive()

    def give_up(self) -> list[tuple[str, Exception]]:
        """Resumes paused engines with the old weights instead of committing.

        Returns:
            For each engine that stays paused: its name and the error.
        """
        if not self._in_place:
            return []
        with suppress(RefitError):  # reported already
            self._received()
        return on_each(self._engines, lambda engine: self._settle(engine, asked=False))

    def check(self) -> None:
        """Waits until the commit has ended.

        Raises:
            PartyFailedError: if it failed or did not end in time.
        """
        self._thread.join(self._timeout_s * (1 + len(self._engines)))
        if self.under_way:
            late = [engine.name for engine in self._engines if id(engine) not in self._done]
            raise PartyFailedError(
                f"committing version {self.version} failed: {', '.join(late) or 'the engines'} did not say within "
                f"{self._timeout_s:.0f} s each that it serves",
                late,
            )
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        failures = on_each(self._engines, self._commit)
        try:
            if failures:
                raise of_engines(failures)
            if self._engines:
                self._confirm()
        except Exception as error:  # noqa: BLE001 - raised by :meth:`check`
            engines = error.engines if isinstance(error, PartyFailedError) else ()
            message = f"committing version {self.version} failed: {describe_error(error)}"
            self._failure = PartyFailedError(message, engines)

    def _commit(self, engine: EngineClient) -> None:
        # Pausing runs in parallel with the call in which workers receive and assemble the weights.
        self._pauses.begin(engine)
        asked = False
        try:
            self._received()
            asked = True
            engine.commit(self.version, reset_cache=self._pauses.empties_caches)
        except BaseException:
            self._settle(engine, asked=asked)
            raise
        self._pauses.end(engine, reset_cache=False)
        self._done.add(id(engine))

    def _settle(self, engine: EngineClient, *, asked: bool) -> None:
        """Resumes an engine that may not have committed.

        Args:
            engine: the engine.
            asked: whether it was asked to commit. If only its answer was lost, it serves the new weights, and cache
                entries of the old ones must go. If it could not restore the old weights, it serves none.

        Raises:
            RefitError: if it does not answer; it then stays paused, because it might serve a mixture.
        """
        if self._in_place or asked:
            try:
                engine.call({"call": "abandon"})
            except Exception as error:
                self._pauses.forget(engine)
                raise RefitError(
                    f"{engine.name} stays paused, as it did not say that its old weights are back "
                    f"({describe_error(error)}); start it anew, or resume it if it was too slow to answer"
                ) from error
        self._pauses.end(engine, reset_cache=asked)
