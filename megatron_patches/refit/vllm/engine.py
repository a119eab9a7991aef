"""vLLM's side of a refit: a ``WeightTransferEngine`` in every worker.

[Note: calls] Everything comes through ``init_weight_transfer_engine``, with a ``call``: ``join`` once, then for each
version ``receive`` and ``commit``, or ``abandon``. vLLM's other calls are not used, for two reasons. Its worker notes
that an update was started and refuses the next one until it was finished, which a trainer that was killed never does.
And where an engine has several workers, an exception in one call leaves the answers of the others unread
(``MultiprocExecutor.collective_rpc`` of 0.26.0), so that every later call gets an answer to an earlier one. For the
same reason no call raises: how it went is told at the trainer's rendezvous, and in the log. One thing does raise, as
the engine must not go on then: old weights that cannot be put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo

from megatron_patches.refit.errors import LostWeightsError, RefitError, TransferError
from megatron_patches.refit.vllm.all_or_none import AllOrNone
from megatron_patches.refit.vllm.joining import join
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.worker_session import ServingModel, WorkerSession

logger = logging.getLogger(__name__)

_ANOTHER = "by another session than the one that this engine has joined since; let one trainer at a time push to it"
_VOTE_S = 60.0  # for the other workers to come to the vote that this one cannot win


@dataclass
class NoUpdate(WeightTransferUpdateInfo):
    """vLLM's updates are not how this engine gets weights."""


class EtpWeightTransferEngine(WeightTransferEngine[RefitCall, NoUpdate]):
    """Hands the trainer's calls to the session that they are of; see [Note: calls].

    Attributes:
        version: number of the weights that serve; 0 for those that vLLM loaded itself.
    """

    init_info_cls = RefitCall
    update_info_cls = NoUpdate
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version = 0
        self._session: WorkerSession | None = None
        self._token = ""  # of the session

    def parse_init_info(self, init_dict: dict[str, Any]) -> RefitCall:
        """Reads one call.

        Raises:
            ValueError: if it has other fields than this version of the package knows. Where the engine has several
                workers, it is carried out as a call that fails, instead; see [Note: calls].
        """
        try:
            read: RefitCall = super().parse_init_info(init_dict)
        except ValueError as error:
            if self.parallel_config.world_size == 1:
                raise
            return RefitCall(call=f"unreadable: {error}")
        return read

    def init_transfer_engine(self, init_info: RefitCall) -> None:
        """Carries out one call; see [Note: calls].

        Raises:
            LostWeightsError: if the weights that served cannot be put back.
        """
        calls: dict[str, Callable[[RefitCall], None]] = {
            "join": self._join,
            "receive": self._receive,
            "commit": self._commit,
            "abandon": self._abandon,
        }
        try:
            if init_info.call not in calls:
                raise ValueError(f"call is {init_info.call!r}; it must be one of {', '.join(calls)}")
            calls[init_info.call](init_info)
        except LostWeightsError:
            logger.exception("refit: this worker's weights are of no version; the engine must be started anew")
            raise
        except Exception:
            logger.exception("refit: %s failed; version %d serves on", init_info.call, self.version)

    def start_weight_update(self) -> None:
        """Not how this engine gets weights."""
        logger.error("refit: start_weight_update does nothing; RefitSession drives this engine")

    def receive_weights(self, update_info: NoUpdate) -> None:
        """Not how this engine gets weights."""
        del update_info
        logger.error("refit: update_weights does nothing; RefitSession drives this engine")

    def finish_weight_update(self) -> None:
        """Not how this engine gets weights."""

    def shutdown(self) -> None:
        """Leaves the trainer's session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not how this engine is fed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the engine 'etp' is fed by megatron_patches.refit.session.RefitSession")

    def _join(self, call: RefitCall) -> None:
        """Joins a session. Ends an earlier one."""
        if self._session is not None:
            self._session.end()
            self._session = None
        self._session = join(call, ServingModel(self.model, self.vllm_config, self.device), self.version)
        self._token = call.token

    def _receive(self, call: RefitCall) -> None:
        if self._session is None:
            raise RefitError("this engine has joined no session; call init_weight_transfer_engine first")
        if call.token != self._token:
            raise RefitError(f"asked to receive version {call.version}, but {_ANOTHER}")
        self._session.receive(call.version, call.step, call.linked)

    def _commit(self, call: RefitCall) -> None:
        if self._session is None or call.token != self._token:
            AllOrNone(call.version, self.version, _VOTE_S).decline()
            why = "this engine has joined no session" if self._session is None else _ANOTHER
            raise TransferError(f"asked to commit version {call.version}, but {why}")
        try:
            self._session.commit(call.version)
        finally:
            self.version = self._session.version

    def _abandon(self, call: RefitCall) -> None:
        if self._session is not None and call.token in ("", self._token):
            self._session.abandon()
