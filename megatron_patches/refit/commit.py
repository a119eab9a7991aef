"""Pauses engines and lets them serve a version that they have received; or go on with the one before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from megatron_patches.refit.engines import EngineClient, PauseMode
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.exchange import describe_error


class Pauses:
    """Pauses of engines.

    Args:
        mode: what becomes of requests under way.

    Attributes:
        longest_s: of the last push, the longest time from when no request of an engine went on until they did.
    """

    def __init__(self, mode: PauseMode) -> None:
        self._mode = mode
        self._since: dict[int, float] = {}
        self.longest_s = 0.0

    def begin_all(self, engines: Sequence[EngineClient]) -> None:
        """Pauses all at once; none if one of them cannot be.

        Raises:
            RefitError: then.
        """
        failures: list[str] = []

        def begin(engine: EngineClient) -> None:
            try:
                self.begin(engine)
            except Exception as error:  # noqa: BLE001 - raised below, for all
                failures.append(f"{engine.name} cannot be paused: {describe_error(error)}")

        self.longest_s = 0.0
        threads = [threading.Thread(target=begin, args=(engine,), daemon=True) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            for engine in engines:
                try:
                    self.end(engine, reset_cache=False)
                except RefitError as error:
                    failures.append(describe_error(error))
            raise RefitError("; ".join(failures))

    def begin(self, engine: EngineClient) -> None:
        """Pauses one, if it is not.

        Raises:
            RefitError: if that fails.
        """
        if id(engine) not in self._since:
            engine.pause(self._mode)
            self._since[id(engine)] = time.perf_counter()

    def end(self, engine: EngineClient, *, reset_cache: bool) -> None:
        """Resumes one, if it is paused.

        Raises:
            RefitError: if that fails.
        """
        since = self._since.pop(id(engine), None)
        if since is not None:
            try:
                engine.resume(reset_cache=reset_cache and self._mode is not PauseMode.KEEP)
            finally:
                self.longest_s = max(self.longest_s, time.perf_counter() - since)

    def forget(self, engine: EngineClient) -> None:
        """Leaves one paused."""
        self._since.pop(id(engine), None)


class Commit:
    """The engines' commit of one version, in a thread of its own; nothing to do on ranks without engines.

    Args:
        version: its number.
        engines: on the first rank, all; elsewhere none.
        pauses: theirs.
        received: waits until every engine has ended the call in which it receives the version; raises RefitError if one
            could not be reached.
        confirm: waits for the workers' word that they serve it; raises RefitError with the reasons of others.
        in_place: whether the engines are paused already, and workers receive in the memory that serves.
        timeout_s: seconds that one engine may take.
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
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name=f"refit-commit-{version}", daemon=True)

    def start(self) -> None:
        """Begins it."""
        if not self._in_place:
            self._pauses.longest_s = 0.0
        self._thread.start()

    def give_up(self) -> list[str]:
        """Instead of committing: lets paused engines go on with the old weights; which stay paused, and why."""
        if not self._in_place:
            return []
        with suppress(RefitError):  # known already
            self._received()
        stuck = []
        for engine in self._engines:
            try:
                self._settle(engine)
            except RefitError as error:
                stuck.append(describe_error(error))
        return stuck

    def reason(self) -> str | None:
        """Once it has ended: why it failed, or None."""
        self._thread.join(self._timeout_s * (1 + len(self._engines)))
        if self._thread.is_alive():
            return f"the engines did not commit within {self._timeout_s:.0f} s each"
        return "; ".join(self._failures) or None

    def _run(self) -> None:
        """All engines at once: none waits, paused, for another one's commit."""

        def commit(engine: EngineClient) -> None:
            try:
                self._commit(engine)
            except Exception as error:  # noqa: BLE001 - told to all ranks by :meth:`RefitSession.wait`
                reason = describe_error(error)
                if reason not in self._failures:
                    self._failures.append(reason)

        threads = [threading.Thread(target=commit, args=(engine,), daemon=True) for engine in self._engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            if self._engines and not self._failures:
                self._confirm()
        except RefitError as error:
            self._failures.append(describe_error(error))

    def _commit(self, engine: EngineClient) -> None:
        # Workers still put the weights together, in the call in which they have received them, while requests end.
        self._pauses.begin(engine)
        try:
            self._received()
            engine.call({"call": "commit", "version": self.version})
        except BaseException:
            self._settle(engine)
            raise
        self._pauses.end(engine, reset_cache=True)

    def _settle(self, engine: EngineClient) -> None:
        """Resumes an engine that may not have committed.

        Raises:
            RefitError: if it does not answer; it stays paused where it might serve a mixture.
        """
        if self._in_place:
            try:
                engine.call({"call": "abandon"})
            except Exception as error:
                self._pauses.forget(engine)
                raise RefitError(
                    f"{engine.name} stays paused, as it did not say that its old weights are back "
                    f"({describe_error(error)}); start it anew, or resume it if it was too slow to answer"
                ) from error
        self._pauses.end(engine, reset_cache=False)
