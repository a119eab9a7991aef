"""Makes a version take effect on all workers of an engine or on none.

Each worker tells the others that it can before any does, and that it has before any forgets the old weights. These are
two votes, and every worker has a part in both of every commit: one that does not go on after the first says no to the
second, without waiting. So one that comes late, when the others have given up, learns that they have, and no vote is
ever taken for an answer to another one.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Work
from vllm.distributed.parallel_state import get_world_group

from megatron_patches.refit.errors import LostWeightsError, RefitError, TransferError
from megatron_patches.refit.vllm.reload import Replacement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllOrNone:
    """One commit.

    Attributes:
        version: number of the weights that are to serve.
        serving: number of those that serve.
        timeout_s: seconds that the slowest worker may take to come to a vote.
    """

    version: int
    serving: int
    timeout_s: float

    def decline(self) -> None:
        """Tells the others, who wait for this worker, that it cannot."""
        self._all_can(False)

    def exchange(self, replacement: Replacement) -> None:
        """Lets staged weights and those that serve change places.

        Raises:
            TransferError: if a worker cannot; then the old ones serve.
            LostWeightsError: if they cannot be put back here, or a worker does not say what it serves.
        """
        failure: Exception | None = None
        try:
            replacement.build()
        except Exception as error:  # noqa: BLE001 - the other workers must hear of it; raised below
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
        """Makes the weights that serve of what has been received in their place, and of what has been beside.

        Args:
            replacement: what has been received.
            device: where the model is.

        Raises:
            TransferError: if a worker cannot; then the weights may be of no version, and the caller puts the old back.
            LostWeightsError: if a worker does not say what it serves.
        """
        failure: Exception | None = None
        if not self._all_can(True):
            raise self._refusal("has not received it")
        try:
            replacement.replace()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # what failed there must be known before the vote
        except Exception as error:  # noqa: BLE001 - the other workers must hear of it; raised below
            failure = error
        have = self._vote(failure is None)
        if not have:
            raise self._not_replaced(have, failure) from failure

    def _refusal(self, why: str) -> TransferError:
        return TransferError(
            f"version {self.version} was not taken: a worker of this engine {why}; version {self.serving} serves on"
        )

    def _not_replaced(self, have: bool | None, failure: Exception | None) -> RefitError:
        """Why not, given what the second vote came to; where it failed here it may have gone well for others."""
        if have is None and failure is None:
            return LostWeightsError(
                f"a worker of this engine did not say within {self.timeout_s:.0f} s whether it serves version "
                f"{self.version}, so others may serve another one than this worker"
            )
        return self._refusal("failed to replace its weights")

    def _all_can(self, able: bool) -> bool:
        """The first vote: whether all workers of this engine are able to go on; one that fails counts as no."""
        can = bool(self._vote(able))
        if not can:
            with suppress(RuntimeError):  # logged already
                self._cast(False)
        return can

    def _vote(self, able: bool) -> bool | None:
        """What all workers say; None if some do not in time."""
        try:
            votes, work = self._cast(able)
            if work is not None:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError:
            logger.exception("refit: the workers of this engine cannot agree on version %d", self.version)
            return None
        return bool(votes.item())

    def _cast(self, able: bool) -> tuple[torch.Tensor, Work | None]:
        """Says what this worker has to say: where all are heard in the end, and what to wait for until then."""
        group = get_world_group()
        votes = torch.tensor([int(able)], dtype=torch.int32)
        if group.world_size == 1:
            return votes, None
        return votes, dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group.cpu_group, async_op=True)
