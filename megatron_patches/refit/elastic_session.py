"""Pushes on, whatever becomes of engines: those that fail are left out, and taken back when they answer again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from megatron_patches.refit.engines import HttpEngine
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.push_options import PushReport
from megatron_patches.refit.roster import Roster
from megatron_patches.refit.session import RefitSession

logger = logging.getLogger(__name__)


class OnFailure(StrEnum):
    """What becomes of a training run if engines fail."""

    CONTINUE = "continue"
    """It goes on, and pushes to the others."""
    STOP = "stop"
    """It ends in order, with a checkpoint if it saves any."""


class _Change(NamedTuple):
    """What the first rank tells all before a push.

    Attributes:
        names: of the engines that take part.
        back: names of those that were left out before.
    """

    names: list[str]
    back: list[str]


class ElasticSession:
    """A session whose engines may fail and come back. Every method is collective over the trainer's ranks.

    Args:
        session: the session; it is given its engines by this object.
        engines: on the first rank, the engines; elsewhere anything.
        on_failure: what to do about engines that fail.
        say: is told what users should know, on every rank.
        wait: whether a push waits until all engines serve the version.
    """

    def __init__(
        self,
        session: RefitSession,
        engines: Sequence[HttpEngine],
        *,
        on_failure: OnFailure,
        say: Callable[[str], None],
        wait: bool = False,
    ) -> None:
        self._session, self._exchange = session, session.exchange
        self._roster = Roster(engines if self._exchange.rank == 0 else ())
        self._on_failure, self._say, self._waits = on_failure, say, wait
        self._met = False
        self._alone = False  # whether no engine takes part, and that was said

    def prepare(self) -> str:
        """Meets the engines, before any work that could be lost.

        Returns:
            Digest of the plan.

        Raises:
            PartyFailedError: on every rank, if none can be reached, or one that can be reached does not take part.
        """
        (silent, *_) = self._exchange.gather(self._roster.drop_unreachable() if self._exchange.rank == 0 else [])
        if silent:
            self._say(f"refit: {', '.join(silent)} cannot be reached; the run begins without, and waits for no answer")
        digest = self._session.prepare(self._roster.present)
        self._met = True
        return digest

    def push(self, version: int) -> PushReport | None:
        """Sends the weights as they are now to all engines that are well, which commit them meanwhile, or before.

        Args:
            version: number of the weights; see :meth:`RefitSession.push`.

        Returns:
            How it went; None where no engine got them.

        Raises:
            PartyFailedError: on every rank, if an engine failed and the run is to stop.
        """
        while True:
            change = self._agreed_change()
            if not change.names:
                if not self._alone:
                    self._say(f"refit: no engine answers; weights are sent to nobody from version {version} on")
                self._alone = True
                return None
            self._alone = False
            if change.back:
                self._say(f"refit: {', '.join(change.back)} answers again, and takes part from version {version} on")
                self._met = False
            started = time.monotonic()
            try:
                if not self._met:
                    self._session.prepare(self._roster.present)
                    self._met = True
                report = self._session.push(version, wait=False)
            except PartyFailedError as error:
                self._leave_out(error, change.names, started, f"before version {version}")
                continue
            if self._waits:
                try:
                    self._session.wait()
                except PartyFailedError as error:  # all others serve it
                    self._leave_out(error, change.names, started, f"at version {version}")
            return report

    def _leave_out(self, error: PartyFailedError, present: Sequence[str], started: float, when: str) -> None:
        """Goes on without the engines that failed.

        Raises:
            PartyFailedError: the same, if the run is to stop.
        """
        self._met = False
        if self._on_failure is OnFailure.STOP:
            raise error
        # If it is nobody's in particular, all may be tried again later.
        failed = set(present).intersection(error.engines) or set(present)
        self._roster.drop(failed, time.monotonic() - started)
        self._say(
            f"refit: {', '.join(sorted(failed))} is left out until it answers again, and training goes on; "
            f"{when}: {error}"
        )

    def finish(self) -> None:
        """Waits for the last commit, and leaves the engines.

        Raises:
            PartyFailedError: on every rank, if an engine failed and the run is to stop.
        """
        try:
            self._session.wait()
        except PartyFailedError as error:
            if self._on_failure is OnFailure.STOP:
                raise
            self._say(f"refit: {error}")
        finally:
            self._close()

    def end(self) -> None:
        """The same for a rank that ends by itself: waits for no other rank.

        Raises:
            PartyFailedError: on the first rank, likewise.
        """
        try:
            self._session.end()
        except PartyFailedError as error:
            if self._on_failure is OnFailure.STOP:
                raise
            logger.warning("refit: %s", error)
        finally:
            self._close()

    def _close(self) -> None:
        self._roster.close()
        self._session.close()

    def _agreed_change(self) -> _Change:
        if self._exchange.rank == 0:
            back = self._roster.take_back()
            change = _Change([engine.name for engine in self._roster.present], back)
        else:
            change = _Change([], [])
        return self._exchange.gather(change)[0]
