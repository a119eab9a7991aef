"""Keeps pushing while engines fail and return: failed engines are left out until they answer again."""

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
    """What a training run does if engines fail."""

    CONTINUE = "continue"
    """It continues and pushes to the other engines."""
    STOP = "stop"
    """It ends in order, with a checkpoint if it saves checkpoints."""


class _Change(NamedTuple):
    """What the first rank sends to all ranks before a push.

    Attributes:
        names: names of the engines that take part.
        back: names of those that were left out before.
    """

    names: list[str]
    back: list[str]


class ElasticSession:
    """A session whose engines may fail and come back. Every method is collective over the trainer's ranks.

    Args:
        session: the session. This object gives it its engines.
        engines: on the first rank, the engines; ignored on other ranks.
        on_failure: what to do if engines fail.
        say: called on every rank with messages for users.
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
        self._alone = False  # whether no engine takes part and users have been told

    def prepare(self) -> str:
        """Connects to the engines. Call it before any work that could be lost.

        Returns:
            Digest of the plan.

        Raises:
            PartyFailedError: on every rank, if no engine can be reached, or one that can be reached does not take part.
        """
        (silent, *_) = self._exchange.gather(self._roster.drop_unreachable() if self._exchange.rank == 0 else [])
        if silent:
            self._say(f"refit: {', '.join(silent)} cannot be reached; the run begins without, and waits for no answer")
        digest = self._session.prepare(self._roster.present)
        self._met = True
        return digest

    def push(self, version: int) -> PushReport | None:
        """Sends the current weights to all working engines, which commit in the background unless ``wait`` is set.

        Args:
            version: number of the weights; see :meth:`RefitSession.push`.

        Returns:
            The report; None if no engine received the weights.

        Raises:
            PartyFailedError: on every rank, if an engine failed and the run must stop.
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
                except PartyFailedError as error:  # all other engines serve it
                    self._leave_out(error, change.names, started, f"at version {version}")
            return report

    def _leave_out(self, error: PartyFailedError, present: Sequence[str], started: float, when: str) -> None:
        """Continues without the engines that failed.

        Raises:
            PartyFailedError: ``error``, if the run must stop.
        """
        self._met = False
        if self._on_failure is OnFailure.STOP:
            raise error
        # If the error names no engine, leave all out; they may be tried again later.
        failed = set(present).intersection(error.engines) or set(present)
        self._roster.drop(failed, time.monotonic() - started)
        self._say(
            f"refit: {', '.join(sorted(failed))} is left out until it answers again, and training goes on; "
            f"{when}: {error}"
        )

    def finish(self) -> None:
        """Waits for the last commit and disconnects from the engines.

        Raises:
            PartyFailedError: on every rank, if an engine failed and the run must stop.
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
        """:meth:`finish` for a rank that ends on its own: waits for no other rank.

        Raises:
            PartyFailedError: on the first rank, if an engine failed and the run must stop.
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
