"""vLLM's side of a refit: a ``WeightTransferEngine`` in every worker.

[Note: calls] All calls come through ``init_weight_transfer_engine``, with a field ``call``. The server's own guard
sends ``admit``. The trainer sends ``join`` and ``record`` once per session, then for each version ``receive`` and
``commit``, or ``abandon``. With fan-out, ``meet`` lets the workers agree with other engines on how a version comes from
them, before ``receive``, and ``relay`` makes those engines send what they serve. The server sends ``leave`` once it no
longer hears from the trainer. Calls that name an adapter are passed to its own session
(:mod:`megatron_patches.refit.vllm.adapter_session`). Calls do not raise: if an engine has several workers, an exception
in one leaves the answers of the others unread (``MultiprocExecutor.collective_rpc`` of 0.26.0 and 0.32.0), so that
every later call gets the answer to an earlier one. Workers report results at the trainer's rendezvous and in the log.
Calls raise only if old weights cannot be restored, because the engine must not continue then.

[Note: contract] A trainer of vLLM's own contract sends ``receive`` through ``update_weights``, within
``start_weight_update`` and ``finish_weight_update``. All else, ``commit`` included, comes as above: vLLM labels the
weights with a version after ``finish_weight_update``, whether they were committed or not, unless a worker raises. So
``finish_weight_update`` only drops what was not committed, and the trainer gives the label to a version that serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from megatron_patches.refit.control.messages import Standing, State, StateLog
from megatron_patches.refit.errors import LostWeightsError, RefitError, TransferError
from megatron_patches.refit.vllm import patches
from megatron_patches.refit.vllm.adapter_session import Adapters
from megatron_patches.refit.vllm.all_or_none import VOTE_S, AllOrNone
from megatron_patches.refit.vllm.joining import Joining
from megatron_patches.refit.vllm.refit_call import UNGUARDED, RefitCall, read_call, settings_of
from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.worker_session import ServingModel, WorkerSession

logger = logging.getLogger(__name__)

_ANOTHER = "by another session than the one that this engine has joined since; let one trainer at a time push to it"


class EtpWeightTransferEngine(WeightTransferEngine[RefitCall, RefitCall]):
    """Passes the trainer's calls to their session; see [Note: calls] and [Note: contract].

    Attributes:
        version: number of the serving weights; 0 for those that vLLM loaded itself.

    Raises:
        UnsupportedEngineError: if the installed vLLM lacks a name that refit uses in that release.
    """

    init_info_cls = RefitCall
    update_info_cls = RefitCall
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        installed_release()  # refuse a modified vLLM before it serves
        super().__init__(config, vllm_config, device, model)
        patches.end_open_updates()
        self.version = 0
        self._settings = settings_of(vllm_config.additional_config)
        self._admitted = self._settings.unguarded
        self._joining: Joining | None = None
        self._session: WorkerSession | None = None
        self._token = ""  # the session's
        self._trainer = ""  # address of the session's trainer
        self._log: StateLog | None = None
        self._serving = serving = ServingModel(model, vllm_config, device)
        self._level = serving.level
        self._adapters = Adapters(serving)

    def parse_init_info(self, init_dict: dict[str, Any]) -> RefitCall:
        """Reads one call.

        Raises:
            ValueError: if it has fields or values that this version of the package does not know. If the engine has
                several workers, it returns a call that fails instead; see [Note: calls].
        """
        try:
            return read_call(init_dict)
        except ValueError as error:
            if self.parallel_config.world_size == 1:
                raise
            return RefitCall(call=f"unreadable: {error}")

    def init_transfer_engine(self, init_info: RefitCall) -> None:
        """Carries out one call; see [Note: calls].

        Raises:
            LostWeightsError: if the old weights cannot be restored.
        """
        calls: dict[str, Callable[[RefitCall], None]] = {
            "admit": self._admit,
            "join": self._join,
            "record": self._record,
            "receive": self._receive,
            "commit": self._commit,
            "abandon": self._abandon,
            "relay": self._relay,
            "meet": self._meet,
            "leave": self._leave,
        }
        try:
            if init_info.adapter:
                if init_info.call == "join":
                    self._check_allowed(init_info)
                self._adapters.carry_out(init_info)
                return
            if init_info.call not in calls:
                raise ValueError(f"call is {init_info.call!r}; it must be one of {', '.join(calls)}")
            calls[init_info.call](init_info)
        except LostWeightsError:
            logger.exception("refit: this worker's weights are of no version; restart the engine")
            raise
        except Exception:
            logger.exception("refit: %s failed; version %d serves on", init_info.call, self.version)

    def state(self) -> Standing | None:
        """The session's state, and what this worker waits for; None if it has joined none. Any thread may ask."""
        session = self._session

        def waits_for(state: State) -> list[str]:
            if state is State.SENDING and session is not None:
                return [session.awaited]
            return {
                State.JOINING: [f"the trainer at {self._trainer}, or other workers, to agree on a plan"],
                State.COMMITTING: [f"the trainer at {self._trainer} to commit"],
            }.get(state, [])

        return None if self._log is None else self._log.standing(waits_for)

    def start_weight_update(self) -> None:
        """Does nothing: a version is prepared for when it is received."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> RefitCall:
        """Reads a call to receive a version; see :meth:`parse_init_info`."""
        return self.parse_init_info({**update_dict, "call": "receive"})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Starts to receive a version. Unlike vLLM's own engines it does not wait for a device, nor need one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitCall) -> None:
        """Starts to receive a version; see [Note: contract].

        Raises:
            LostWeightsError: if the old weights cannot be restored.
        """
        self.init_transfer_engine(update_info)

    def finish_weight_update(self) -> None:
        """Drops what was received and not committed; see [Note: contract].

        Raises:
            LostWeightsError: if the old weights cannot be restored.
        """
        self.init_transfer_engine(RefitCall(call="abandon", token=self._token))

    def shutdown(self) -> None:
        """Leaves the trainer's session."""
        self._adapters.close()
        if self._joining is not None:
            self._joining.end()
        if self._session is not None:
            self._session.close()
        self._joining, self._session = None, None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Unused: RefitSession sends the weights.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the engine 'etp' is fed by megatron_patches.refit.trainer.session.RefitSession")

    def _admit(self, call: RefitCall) -> None:  # noqa: ARG002 - the call has no fields that matter
        """Accepts trainers from now on: the caller knows the server's secret or owns this process."""
        self._admitted = True

    def _join(self, call: RefitCall) -> None:
        """Starts to join a session, after ending an earlier one.

        Raises:
            RefitError: if the trainer is not allowed; nothing has been sent to it then.
        """
        self._check_allowed(call)
        self._end()
        self._token, self._trainer = call.token, f"{call.host}:{call.port}"
        self._log = StateLog(f"the trainer at {self._trainer}", self._level)
        try:
            self._joining = Joining(call, self._serving, self.version, self._log)
        except BaseException:
            self._token = ""
            raise

    def _record(self, call: RefitCall) -> None:
        if self._joining is None or call.token != self._token:
            raise RefitError(f"asked to record the layout, but {self._why_not()}")
        self._joining.record()

    def _joined(self, call: RefitCall, what: str) -> WorkerSession:
        """The session that a call belongs to.

        Raises:
            RefitError: if it belongs to another one, or there is none; says ``what`` was asked.
        """
        if call.token == self._token and self._joining is not None:
            joining, self._joining = self._joining, None
            self._session = joining.finish()
            logger.log(self._level, "refit: the trainer at %s pushes into this engine from now on", self._trainer)
        if self._session is None or call.token != self._token:
            raise RefitError(f"asked to {what}, but {self._why_not()}")
        return self._session

    def _why_not(self) -> str:
        """Why a call belongs to no session."""
        return "this engine has joined no session" if self._joining is None and self._session is None else _ANOTHER

    def _end(self) -> None:
        """Leaves the session, if there is one. If that fails, the session records that the weights are lost."""
        for under_way in (self._joining, self._session):
            if under_way is not None:
                under_way.end()
        self._joining, self._session, self._token = None, None, ""

    def _check_allowed(self, call: RefitCall) -> None:
        if not self._admitted:
            raise RefitError(
                "this server obeys whoever reaches it, so its workers join no trainer: start it with --middleware "
                f"megatron_patches.refit.vllm.guard.RefitGuard, or with --additional-config '{UNGUARDED}' if nobody "
                "else can reach it"
            )
        self._settings.check_trainer(call.host)

    def _receive(self, call: RefitCall) -> None:
        session = self._joined(call, f"receive version {call.version}")
        session.receive(call.version, call.step, call.linked, key=call.key)

    def _commit(self, call: RefitCall) -> None:
        session = self._session if call.token == self._token else None
        if session is None:
            AllOrNone(call.version, self.version, VOTE_S).decline()
            raise TransferError(f"asked to commit version {call.version}, but {self._why_not()}")
        try:
            session.commit(call.version)
        finally:
            self.version = session.version
        logger.log(self._level, "refit: version %d of the trainer at %s serves", call.version, self._trainer)

    def _abandon(self, call: RefitCall) -> None:
        if self._session is not None and call.token == self._token:
            self._session.abandon()

    def _relay(self, call: RefitCall) -> None:
        """Starts to send the version that serves to another engine.

        Raises:
            RefitError: if the trainer of another session asks, or its address is not allowed.
        """
        self._settings.check_trainer(call.host)
        self._joined(call, f"send version {call.version} to another engine").relay(call)

    def _meet(self, call: RefitCall) -> None:
        """Starts to meet other engines, to take a version from them.

        Raises:
            RefitError: as for :meth:`_relay`.
        """
        self._settings.check_trainer(call.host)
        self._joined(call, f"take version {call.version} from other engines").meet(call)

    def _leave(self, call: RefitCall) -> None:
        """Ends the session of a trainer that has fallen silent."""
        if call.token == self._token and (self._joining is not None or self._session is not None):
            self._end()
            logger.log(self._level, "refit: left the trainer at %s; version %d serves", self._trainer, self.version)
