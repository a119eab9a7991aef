"""vLLM's side of a refit: a ``WeightTransferEngine`` in every worker.

[Note: calls] Everything comes through ``init_weight_transfer_engine``, with a ``call``: ``join`` once, then for each
version ``receive`` and ``commit``, or ``abandon``. vLLM's other calls are not used, for two reasons. Its worker notes
that an update was started and refuses the next one until it was finished, which a trainer that was killed never does.
And where an engine has several workers, an exception in one call leaves the answers of the others unread
(``MultiprocExecutor.collective_rpc`` of 0.26.0), so that every later call gets an answer to an earlier one. For the
same reason no call raises: how it went is told at the trainer's rendezvous, and in the log. One thing does raise, as
the engine must not go on then: old weights that cannot be put back.

[Note: meanwhile] vLLM carries out a call between two steps of its engine, so no request goes on during one. A version
that is received beside the weights that serve therefore arrives in a thread of its own: ``receive`` only begins, and
the next call waits for its end. With NCCL it does not: its kernels and those of the engine's own communication could
wait for each other in a circle, across workers.

[Note: in place] Between ``receive`` and ``commit`` the old version serves, or, where versions are received in place,
nothing: the engine is paused, and what its model holds is of no version. A worker that has begun to receive in place
therefore ends each call with the new version committed, with it complete but not committed, or with the old one put
back; and every call but the commit puts it back first.

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
from functools import partial
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

from megatron_patches.refit.errors import LostWeightsError, RefitError, StaleVersionError, TransferError
from megatron_patches.refit.exchange import describe_error
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.memory_mode import MemoryMode, direct_bytes
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.messages import Model
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.ports import Bits, Memory
from megatron_patches.refit.rendezvous import Assembly, Invitation
from megatron_patches.refit.target.recorded import FillRecord, recorded_manifest
from megatron_patches.refit.target.replay import finish
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.vllm.aside import Aside
from megatron_patches.refit.vllm.in_place import InPlace
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.recording import record_loading
from megatron_patches.refit.vllm.reload import Replacement, loader_form, refresh_attention
from megatron_patches.refit.vllm.same_model import check_same_model

logger = logging.getLogger(__name__)

_LEAVING_S = 30.0  # for a thread to notice that the session has ended
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(kw_only=True)
class RefitCall(WeightTransferInitInfo):
    """One call; JSON, as it may come over HTTP.

    Attributes:
        call: ``join``, ``receive``, ``commit`` or ``abandon``.
        host: to join: address of the rendezvous.
        port: to join: its port.
        token: to join: secret that all parties share.
        parties: to join: number of all parties.
        timeout_s: to join: seconds that one step may take after its first party has finished.
        first_party: to join: number of this engine's worker 0 among all parties.
        sources: to join: number of trainer ranks.
        transport: to join: how packets travel.
        staging_bytes: to join: see :class:`megatron_patches.refit.parties.terms.LinkOptions`.
        memory: to join: where versions are received; see :class:`megatron_patches.refit.memory_mode.MemoryMode`.
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
    memory: str = MemoryMode.BESIDE.value
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
        self._layers: Layers | None = None
        self._staged: tuple[int, Replacement] | None = None
        self._instead = "nothing has been received"  # why nothing is staged
        self._in_place: InPlace | None = None
        self._aside = Aside(device)
        self._may_go_on = False  # whether requests are answered while a version arrives
        self._timeout_s = 0.0

    def init_transfer_engine(self, init_info: RefitCall) -> None:
        """Carries out one call; see [Note: calls].

        Raises:
            LostWeightsError: if the weights that served cannot be put back.
        """
        calls = {
            "join": self._join,
            "receive": self._receive,
            "commit": self._commit_and_tell,
            "abandon": self._abandon,
        }
        try:
            if init_info.call not in calls:
                raise ValueError(f"call is {init_info.call!r}; it must be one of {', '.join(calls)}")
            if init_info.call == "join":
                self._leave()
            elif init_info.call != "commit":
                self._aside.finish(self._timeout_s)
                self._settle()
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
        """Leaves the rendezvous and forgets what was staged."""
        party, self._party = self._party, None
        if party is not None:
            party.close()
        self._aside.finish(_LEAVING_S)
        self._manifest, self._staged, self._latest = None, None, 0
        self._layers, self._in_place = None, None

    def _leave(self) -> None:
        """Ends a session: the weights that served are back, and nothing is under way."""
        self._settle()
        self.shutdown()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not how this engine is fed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the engine 'etp' is fed by megatron_patches.refit.session.RefitSession")

    def _join(self, call: RefitCall) -> None:
        """Joins the trainer's rendezvous and agrees on a plan. Ends an earlier session."""
        worker = self._worker()
        invitation = Invitation(call.host, call.port, call.token, call.parties, call.timeout_s)
        name = f"engine worker {call.first_party - call.sources + worker} on {socket.gethostname()}:{os.getpid()}"
        assembly = Assembly(invitation, call.first_party + worker, name)
        self._timeout_s = call.timeout_s
        transport, memory, device = TransportName(call.transport), MemoryMode(call.memory), str(self.device)
        options = LinkOptions(
            transport=transport,
            staging_bytes=call.staging_bytes,
            sources=call.sources,
            direct_bytes=direct_bytes(memory, transport, self.device.type),
        )
        nccl = transport is TransportName.C10D and self.device.type != "cpu"
        self._may_go_on = memory is MemoryMode.BESIDE and not nccl
        self._party = DestinationParty(assembly, options, device)
        try:
            self._manifest = self._party.prepare(partial(self._record, memory))
            if self._in_place is not None:
                self._in_place.backup.start()
        except BaseException:
            self.shutdown()
            raise

    def _worker(self) -> int:
        """Number of this worker in its engine."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def _record(self, memory: MemoryMode, model: Model) -> Manifest:
        if self._party is None:
            raise RefitError("no session")
        check_same_model(model.config, self.model_config.hf_text_config)
        tensors = model.tensors
        with loader_form(self.model) as parameters:
            recording = record_loading(self.model.load_weights, parameters, tensors)
        self._fills = recording.fills
        by_name = {spec.name: spec for spec in tensors}
        manifest = recorded_manifest(
            self._party.rank, socket.gethostname(), recording.parameters, recording.copies, recording.fills, by_name
        )
        self._layers = Layers(self.model)
        if memory is MemoryMode.IN_PLACE:
            self._in_place = InPlace(self._layers, manifest.storages, self.device)
            self._party.backup_bytes = self._in_place.backup.nbytes
        return manifest

    def _receive(self, update: RefitCall) -> None:
        """Receives a version, or begins to; see [Note: meanwhile]."""
        party = self._party
        if party is None:
            raise RefitError("this engine has joined no session; call init_weight_transfer_engine first")
        self._staged, self._instead = None, "nothing has been received"
        if self._may_go_on:
            self._aside.start(f"receive-{update.version}", lambda: self._take(party, update))
        else:
            self._take(party, update)

    def _take(self, party: DestinationParty, update: RefitCall) -> None:
        version = update.version
        staged: dict[str, torch.Tensor] = {}
        arrays: dict[str, Bits] = {}
        try:
            party.receive(version, update.step, update.linked, lambda: self._make_memory(version, staged, arrays))
            arrays.clear()  # whoever received into them may keep the dictionary
            if self._manifest is None:
                raise RefitError("no plan")
            self._staged = version, self._put_together(finish(self._manifest, self._fills, staged))
        except Exception as error:
            self._instead = f"what came of version {version} was given up ({type(error).__name__}: {error})"
            self._settle()  # has nothing to do where requests go on
            raise

    def _put_together(self, staged: dict[str, torch.Tensor]) -> Replacement:
        """New weights, as far as they can be made ready before the commit, for which requests wait."""
        replacement = Replacement(self.model, self.vllm_config, staged, self._layers)
        if self._may_go_on:
            replacement.begin()
        elif self._in_place is None:
            replacement.build()
        return replacement

    def _make_memory(self, version: int, staged: dict[str, torch.Tensor], arrays: dict[str, Bits]) -> Memory:
        """Memory in which elements arrive as the trainer sends them: fresh, or in place that which serves.

        Args:
            version: that they are of.
            staged: it is put here, by storage, in the types that arrive.
            arrays: and here, as bits, if it is the host's.

        Returns:
            Whichever of the two a party receives into.

        Raises:
            StaleVersionError: if the version is not later than the one that this session committed last.
        """
        if version <= self._latest:
            raise StaleVersionError(f"asked to receive version {version} after version {self._latest}")
        if self._manifest is None or self._party is None:
            raise RefitError("no plan")
        serving = self._in_place.begin(self._timeout_s) if self._in_place is not None else {}
        self._party.beside_bytes = 0
        for storage in self._manifest.storages:
            memory = serving.get(storage.name)
            if memory is None:
                memory = torch.empty(storage.numel, dtype=getattr(torch, storage.dtype), device=self.device)
                self._party.beside_bytes += memory.nbytes
            staged[storage.name] = memory
        if self.device.type != "cpu":
            return staged
        arrays |= {name: tensor.view(_UNSIGNED[tensor.element_size()]).numpy() for name, tensor in staged.items()}
        return arrays

    def _abandon(self, call: RefitCall) -> None:
        """Gives up what has been received; what served is back by now."""
        del call
        self._staged, self._instead = None, "what had been received was given up"

    def _settle(self) -> None:
        """Puts the weights that served back if others are in their place.

        Raises:
            LostWeightsError: if that fails.
        """
        if self._in_place is not None and self._in_place.begun:
            self._staged = None
            self._in_place.put_back()
            refresh_attention(self.model, self.vllm_config)
            logger.info("refit: version %d has been put back", self.version)

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
        try:
            replacement = self._take_staged(version)
            if self._in_place is not None:
                self._replace_in_place(version, replacement)
            else:
                self._replace(version, replacement)
        except Exception:
            self._settle()
            raise
        self.version = self._latest = version
        if self._in_place is not None:
            self._in_place.done()
        logger.info("refit: version %d serves", version)

    def _take_staged(self, version: int) -> Replacement:
        """What has been received of a version, which is then the caller's.

        Raises:
            TransferError: if that is nothing.
        """
        late: RefitError | None = None
        try:
            self._aside.finish(self._timeout_s)
        except RefitError as error:
            late = error
        staged, self._staged = self._staged, None
        if late is not None or staged is None or staged[0] != version:
            found = self._instead if staged is None else f"version {staged[0]} has been received"
            # The other workers wait for this one's vote.
            self._all_can(False)
            raise TransferError(f"asked to commit version {version}, but {found}") from late
        self._instead = f"version {version} has been taken"
        return staged[1]

    def _replace(self, version: int, replacement: Replacement) -> None:
        """Lets staged weights and those that serve change places, on all workers or on none."""
        failure: Exception | None = None
        try:
            replacement.build()
        except Exception as error:  # noqa: BLE001 - the other workers must hear of it; raised below
            failure = error
        if not self._all_can(failure is None):
            raise self._refusal(version, "cannot put it together") from failure
        try:
            replacement.apply()
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
        if not self._all_can(failure is None):
            replacement.undo()
            raise self._refusal(version, "failed to replace its weights") from failure
        replacement.forget()

    def _replace_in_place(self, version: int, replacement: Replacement) -> None:
        """Makes the weights that serve of what has been received in their place, and of what has been beside."""
        failure: Exception | None = None
        if not self._all_can(True):
            raise self._refusal(version, "has not received it")
        try:
            replacement.replace()
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)  # what failed there must be known before the vote
        except Exception as error:  # noqa: BLE001 - the other workers must hear of it; raised below
            failure = error
        if not self._all_can(failure is None):
            raise self._refusal(version, "failed to replace its weights") from failure

    def _refusal(self, version: int, why: str) -> TransferError:
        return TransferError(
            f"version {version} was not taken: a worker of this engine {why}; version {self.version} serves on"
        )

    def _all_can(self, able: bool) -> bool:
        """Whether all workers of this engine are able to commit."""
        group = get_world_group()
        if group.world_size == 1:
            return able
        votes = torch.tensor([int(able)], dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group.cpu_group, async_op=True)
        work.wait(timedelta(seconds=60))
        return bool(votes.item())
