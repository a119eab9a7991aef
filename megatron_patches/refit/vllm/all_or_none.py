"""Makes a version take effect on all workers of an engine or on none.

A commit has two votes. In the first, each worker reports that it can apply the version, before any worker does. In the
second, it reports that it has, before any worker drops the old weights. Every worker takes part in both votes of every
commit: a worker that stops after the first votes no in the second without waiting. So a late worker learns that the
others have given up, and votes of different commits are never mixed up.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work
from vllm.distributed.parallel_state import get_world_group

from megatron_patches.refit.errors import LostWeightsError, RefitError, TransferError
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
