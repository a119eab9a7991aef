"""vLLM's side of a refit: a ``WeightTransferEngine`` in every worker.

[Note: calls] Everything comes through ``init_weight_transfer_engine``, with a ``call``: ``join`` once, then for each
version ``receive`` and ``commit``; between the two the old version serves. vLLM's other calls are not used, for two
reasons. Its worker notes that an update was started and refuses the next one until it was finished, which a trainer
that was killed never does. And where an engine has several workers, an exception in one call leaves the answers of
the others unread (``MultiprocExecutor.collective_rpc`` of 0.26.0), so that every later call gets an answer to an
earlier one. For the same reason no call raises: how it went is told at the trainer's rendezvous, and in the log.

A version takes effect on all workers of an engine or on none: each tells the others that it can before any does, and
that it has before any forgets the old weights.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_patches.refit.errors import RefitError, StaleVersionError, TransferError
from megatron_patches.refit.exchange import describe_error
from megatron_patches.refit.joint import DestinationParty, LinkOptions, Model
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.ports import Memory
from megatron_patches.refit.rendezvous import Assembly, Invitation
from megatron_patches.refit.target.recorded import FillRecord, recorded_manifest
from megatron_patches.refit.target.replay import finish
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.vllm.recording import record_loading
from megatron_patches.refit.vllm.reload import Replacement, loader_form
from megatron_patches.refit.vllm.same_model import check_same_model

logger = logging.getLogger(__name__)

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(kw_only=True)
class RefitCall(WeightTransferInitInfo):
    """One call; JSON, as it may come over HTTP.

    Attributes:
        call: ``join``, ``receive`` or ``commit``.
        host: to join: address of the rendezvous.
        port: to join: its port.
        token: to join: secret that all parties share.
        parties: to join: number of all parties.
        timeout_s: to join: seconds that one step may take after its first party has finished.
        first_party: to join: number of this engine's worker 0 among all parties.
        sources: to join: number of trainer ranks.
        transport: to join: how packets travel.
        staging_bytes: to join: see :class:`megatron_patches.refit.joint.LinkOptions`.
        version: to receive and commit: number of the weights.
        step: to receive: number of the step at which the trainer is.
        linked: to receive: whether the trainer's links are up.
    """

    call: str
    host: str = ""
    port: int = 0
    token: str = ""
    parties: int = 0
    timeout_s: float = 0.0
    first_party: int = 0
    sources: int = 0
    transport: str = "shm"
    staging_bytes: int = 0
    version: int = 0
    step: int = 0
    linked: bool = False


@dataclass
class NoUpdate(WeightTransferUpdateInfo):
    """vLLM's updates are not how this engine gets weights."""


class EtpWeightTransferEngine(WeightTransferEngine[RefitCall, NoUpdate]):
    """See the module's docstring."""

    init_info_cls = RefitCall
    update_info_cls = NoUpdate
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version = 0  # that serves; 0 are the weights that vLLM loaded
        self._latest = 0  # version that this session has committed: a new one may begin anywhere
        self._party: DestinationParty | None = None
        self._manifest: Manifest | None = None
        self._fills: Sequence[FillRecord] = ()
        self._staged: tuple[int, dict[str, torch.Tensor]] | None = None
        self._instead = "nothing has been received"  # why nothing is staged

    def init_transfer_engine(self, init_info: RefitCall) -> None:
        """Carries out one call. Never raises; see [Note: calls]."""
        calls = {"join": self._join, "receive": self._receive, "commit": self._commit_and_tell}
        try:
            if init_info.call not in calls:
                raise ValueError(f"call is {init_info.call!r}; it must be one of {', '.join(calls)}")
            calls[init_info.call](init_info)
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
        """Leaves the rendezvous and forgets what was staged."""
        party, self._party = self._party, None
        self._manifest, self._staged, self._latest = None, None, 0
        if party is not None:
            party.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not how this engine is fed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the engine 'etp' is fed by megatron_patches.refit.session.RefitSession")

    def _join(self, call: RefitCall) -> None:
        """Joins the trainer's rendezvous and agrees on a plan. Ends an earlier session."""
        self.shutdown()
        worker = self._worker()
        invitation = Invitation(call.host, call.port, call.token, call.parties, call.timeout_s)
        name = f"engine worker {call.first_party - call.sources + worker} on {socket.gethostname()}:{os.getpid()}"
        assembly = Assembly(invitation, call.first_party + worker, name)
        options = LinkOptions(
            transport=TransportName(call.transport),
            staging_bytes=call.staging_bytes,
            sources=call.sources,
        )
        self._party = DestinationParty(assembly, options, str(self.device))
        try:
            self._manifest = self._party.prepare(self._record)
        except BaseException:
            self.shutdown()
            raise

    def _worker(self) -> int:
        """Number of this worker in its engine."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def _record(self, model: Model) -> Manifest:
        if self._party is None:
            raise RefitError("no session")
        check_same_model(model.config, self.model_config.hf_text_config)
        tensors = model.tensors
        with loader_form(self.model) as parameters:
            recording = record_loading(self.model.load_weights, parameters, tensors)
        self._fills = recording.fills
        by_name = {spec.name: spec for spec in tensors}
        return recorded_manifest(
            self._party.rank, socket.gethostname(), recording.parameters, recording.copies, recording.fills, by_name
        )

    def _receive(self, update: RefitCall) -> None:
        version = update.version
        if self._party is None:
            raise RefitError("this engine has joined no session; call init_weight_transfer_engine first")
        self._staged, self._instead = None, "nothing has been received"
        staged: dict[str, torch.Tensor] = {}
        self._party.receive(version, update.step, update.linked, lambda: self._make_memory(version, staged))
        if self._manifest is None:
            raise RefitError("no plan")
        try:
            self._staged = version, finish(self._manifest, self._fills, staged)
        except Exception as error:
            self._instead = f"what was received could not be converted ({type(error).__name__}: {error})"
            raise

    def _make_memory(self, version: int, staged: dict[str, torch.Tensor]) -> Memory:
        """Fresh memory in which elements arrive as the trainer sends them.

        Raises:
            StaleVersionError: if the version is not later than the one that this session committed last.
        """
        if version <= self._latest:
            raise StaleVersionError(f"asked to receive version {version} after version {self._latest}")
        if self._manifest is None:
            raise RefitError("no plan")
        for storage in self._manifest.storages:
            dtype = getattr(torch, storage.dtype)
            staged[storage.name] = torch.empty(storage.numel, dtype=dtype, device=self.device)
        if self.device.type != "cpu":
            return staged
        return {name: tensor.view(_UNSIGNED[tensor.element_size()]).numpy() for name, tensor in staged.items()}

    def _commit_and_tell(self, call: RefitCall) -> None:
        """Commits, and tells the trainer how it went if it is still there."""
        reason: str | None = None
        try:
            self._commit(call.version)
        except Exception as error:
            reason = f"{type(error).__name__}: {describe_error(error)}"
            raise
        finally:
            if self._party is not None:
                self._party.post_commit(call.version, reason)

    def _commit(self, version: int) -> None:
        if self._staged is None or self._staged[0] != version:
            found = self._instead if self._staged is None else f"version {self._staged[0]} has been received"
            # The other workers wait for this one's vote.
            self._all_can(False)
            raise TransferError(f"asked to commit version {version}, but {found}")
        replacement = Replacement(self.model, self.vllm_config, self._staged[1])
        failure: Exception | None = None
        try:
            replacement.build()
        except Exception as error:  # noqa: BLE001 - the other workers must hear of it; raised below
            failure = error
        if not self._all_can(failure is None):
            self._staged = None
            raise TransferError(
                f"version {version} was not taken: a worker of this engine cannot put it together; version "
                f"{self.version} serves on"
            ) from failure
        try:
            replacement.apply()
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
        if not self._all_can(failure is None):
            replacement.undo()
            self._staged = None
            raise TransferError(
                f"version {version} was not taken: a worker of this engine failed to replace its weights; version "
                f"{self.version} serves on"
            ) from failure
        replacement.forget()
        self._staged = None
        self.version = self._latest = version
        logger.info("refit: version %d serves", version)

    def _all_can(self, able: bool) -> bool:
        """Whether all workers of this engine are able to commit."""
        group = get_world_group()
        if group.world_size == 1:
            return able
        votes = torch.tensor([int(able)], dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group.cpu_group, async_op=True)
        work.wait(timedelta(seconds=60))
        return bool(votes.item())
