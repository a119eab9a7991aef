"""Holds a version that a worker has received, and makes it take effect on all workers of an engine or on none.

A commit has two votes. In the first, each worker reports that it can apply the version, before any worker does. In the
second, it reports that it has, before any worker drops the old weights. Every worker takes part in both votes of every
commit: a worker that stops after the first votes no in the second without waiting. So a late worker learns that the
others have given up, and votes of different commits are never mixed up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work
from vllm.distributed.parallel_state import get_world_group

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import State, StateLog
from megatron_patches.refit.errors import LostWeightsError, PartyFailedError, RefitError, TransferError
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.vllm.reload import Replacement

logger = logging.getLogger(__name__)

VOTE_S = 60.0
"""Seconds for the slowest worker of an engine to reach a vote once it has received a version."""


class Exchanged(Protocol):
    """What one worker exchanges for what serves; a :class:`megatron_patches.refit.vllm.reload.Replacement`."""

    def build(self) -> None:
        """Prepares all that may fail; nothing serves it yet."""

    def apply(self) -> None:
        """Makes it serve."""

    def undo(self) -> None:
        """Restores what served before, after :meth:`apply` or a part of it."""

    def forget(self) -> None:
        """Drops what served before."""


@dataclass(frozen=True)
class AllOrNone:
    """One commit.

    Attributes:
        version: number of the new weights.
        serving: number of the weights that serve now.
        timeout_s: seconds that the slowest worker may take to reach a vote.
    """

    version: int
    serving: int
    timeout_s: float

    def decline(self) -> None:
        """Tells the other workers, which wait for this one, that it cannot commit."""
        self._all_can(False)

    def exchange(self, replacement: Exchanged) -> None:
        """Swaps staged weights with the serving ones.

        Raises:
            TransferError: if a worker cannot; the old weights then serve.
            LostWeightsError: if this worker cannot restore the old weights, or another does not report what it serves.
        """
        failure: Exception | None = None
        try:
            replacement.build()
        except Exception as error:  # noqa: BLE001 - the other workers must learn of it; raised below
            failure = error
        if not self._all_can(failure is None):
            raise self._refusal("cannot put it together") from failure
        try:
            replacement.apply()
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
        have = self._vote(failure is None)
        if not have:
            try:
                replacement.undo()
            except Exception as error:
                raise LostWeightsError(f"the weights that served cannot be put back: {error}") from error
            raise self._not_replaced(have, failure) from failure
        replacement.forget()

    def overwrite(self, replacement: Replacement, device: torch.device) -> None:
        """Completes a version that was received partly in serving memory and partly beside it.

        Args:
            replacement: what was received.
            device: where the model is.

        Raises:
            TransferError: if a worker cannot. The weights may then be a mixture, and the caller restores the old ones.
            LostWeightsError: if a worker does not report what it serves.
        """
        failure: Exception | None = None
        if not self._all_can(True):
            raise self._refusal("has not received it")
        try:
            replacement.replace()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # find errors on the device before the vote
        except Exception as error:  # noqa: BLE001 - the other workers must learn of it; raised below
            failure = error
        have = self._vote(failure is None)
        if not have:
            raise self._not_replaced(have, failure) from failure

    def _refusal(self, why: str) -> TransferError:
        return TransferError(
            f"version {self.version} was not taken: a worker of this engine {why}; version {self.serving} serves on"
        )

    def _not_replaced(self, have: bool | None, failure: Exception | None) -> RefitError:
        """The error after a failed second vote. If the vote itself failed here, it may have succeeded elsewhere."""
        if have is None and failure is None:
            return LostWeightsError(
                f"a worker of this engine did not say within {self.timeout_s:.0f} s whether it serves version "
                f"{self.version}, so others may serve another one than this worker"
            )
        return self._refusal("failed to replace its weights")

    def _all_can(self, able: bool) -> bool:
        """The first vote: whether all workers of this engine can go on. A failed vote counts as no."""
        can = bool(self._vote(able))
        if not can:
            with suppress(RuntimeError):  # logged already
                self._cast(False)
        return can

    def _vote(self, able: bool) -> bool | None:
        """Votes and returns the result; None if some workers did not vote in time."""
        try:
            votes, work = self._cast(able)
            if work is not None:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError:
            logger.exception("refit: the workers of this engine cannot agree on version %d", self.version)
            return None
        return bool(votes.item())

    def _cast(self, able: bool) -> tuple[torch.Tensor, Work | None]:
        """Casts this worker's vote. Returns the tensor that will hold the result and the operation to wait for."""
        group = get_world_group()
        votes = torch.tensor([int(able)], dtype=torch.int32)
        if group.world_size == 1:
            return votes, None
        return votes, dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group.cpu_group, async_op=True)


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
