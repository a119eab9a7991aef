"""The version that a worker has received and verified, until its commit; or why there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import State, StateLog
from megatron_patches.refit.errors import PartyFailedError, RefitError, TransferError
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.vllm.all_or_none import AllOrNone

logger = logging.getLogger(__name__)


class ReceivedVersion[T]:
    """Holds one version at most. It may come in one thread while another one gives up waiting for it.

    Args:
        log: the state of the session.
        undo: removes what was prepared of a version that is dropped.

    Attributes:
        instead: why it holds none.
    """

    def __init__(self, log: StateLog, undo: Callable[[T], None] = lambda _: None) -> None:
        self._log, self._undo = log, undo
        self._held: tuple[int, T] | None = None
        self._given_up = -1  # version whose commit failed while it was still arriving
        self._lock = threading.Lock()  # for these two
        self.instead = "nothing has been received"

    def clear(self, instead: str = "nothing has been received") -> None:
        """Drops what it holds, while no version is arriving. ``instead`` is why it holds none from now on."""
        self.drop()
        self._given_up, self.instead = -1, instead

    def drop(self) -> None:
        """Drops what it holds, for a reason that is known."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            self._undo(held[1])

    def put(self, version: int, content: T) -> None:
        """Takes a complete version, which is then to be committed.

        Raises:
            TransferError: if its commit has failed already.
        """
        with self._lock:
            late = version == self._given_up
            if not late:
                self._held = version, content
                self._log.enter(State.COMMITTING, version)
        if late:
            self._undo(content)
            raise TransferError(f"version {version} was ready only after its commit had failed")

    def lose(self, version: int, error: Exception) -> None:
        """Notes why a version did not come."""
        self._log.enter(State.READY, version, describe_error(error))
        self.instead = f"what came of version {version} was given up ({type(error).__name__}: {describe_error(error)})"

    def take(self, version: int, workers: AllOrNone, wait: Callable[[], None]) -> T:
        """Takes a version out, to commit it. If that cannot be, the other workers learn of it.

        Args:
            version: number of the version.
            workers: the commit.
            wait: waits until the version has come; raises RefitError if it cannot be committed.

        Raises:
            TransferError: if the version is not here.
        """
        late: RefitError | None = None
        try:
            wait()
        except RefitError as error:
            late = error
        with self._lock:
            held, self._held = self._held, None
            self._given_up = version if late is not None else -1
        if held is not None and held[0] == version and late is None:
            self.instead = f"version {version} has been taken"
            return held[1]
        found = late or (self.instead if held is None else f"version {held[0]} has been received")
        if held is not None:
            self.instead = f"version {held[0]} was given up for version {version}"
            self._undo(held[1])
        workers.decline()
        raise TransferError(f"asked to commit version {version}, but {found}") from late


def report_commit(party: DestinationParty, version: int, reason: str | None) -> None:
    """Tells the trainer how a commit went, if it is still connected. ``reason`` is why it failed, or None."""
    try:
        party.post_commit(version, reason)
    except PartyFailedError as error:
        logger.warning("refit: nobody hears how the commit of version %d went: %s", version, error)
