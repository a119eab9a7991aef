"""An engine worker's part in a session with a trainer: receives versions, and commits or drops them.

[Note: meanwhile] vLLM executes a call between two steps of its engine, so requests wait during a call. A version that
is received beside the serving weights therefore arrives in a separate thread: ``receive`` only starts that thread, and
the next call waits for its end. Once the last bytes are in flight, the thread prepares the replacement, as far as only
the location of the new weights matters. With NCCL, versions arrive within the call: NCCL's kernels and those of the
engine's own communication could otherwise deadlock across workers.

[Note: in place] Between ``receive`` and ``commit`` the old version serves. If versions are received in place, nothing
serves: the engine is paused, and its model may be a mixture. A worker that has started to receive in place therefore
ends each call in one of three states: the new version is committed, it is complete but not committed, or the old one
is restored. Every call but the commit restores the old version first.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import State, StateLog
from megatron_patches.refit.errors import (
    LostWeightsError,
    PartyFailedError,
    RefitError,
    StaleVersionError,
    TransferError,
)
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.fan_out import Taking
from megatron_patches.refit.target.recorded import FillRecord
from megatron_patches.refit.target.replay import finish
from megatron_patches.refit.vllm.all_or_none import VOTE_S, AllOrNone
from megatron_patches.refit.vllm.aside import Aside
from megatron_patches.refit.vllm.device_memory import DeviceMemory
from megatron_patches.refit.vllm.engine_refusals import check_awake
from megatron_patches.refit.vllm.in_place import InPlace
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.quantized import check_scale_values
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.relaying import Relays
from megatron_patches.refit.vllm.reload import Replacement, refresh_attention
from megatron_patches.refit.vllm.version_memory import Arriving, VersionMemory

logger = logging.getLogger(__name__)

LEAVING_S = 30.0
"""Seconds for a thread to notice that the session has ended."""


@dataclass(frozen=True)
class ServingModel:
    """The serving model, as vLLM gives it to a worker.

    Attributes:
        model: the model.
        config: vLLM's configuration.
        device: the model's device.
    """

    model: nn.Module
    config: VllmConfig
    device: torch.device

    @property
    def worker(self) -> int:
        """Number of this worker in its engine."""
        parallel = self.config.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    @property
    def name(self) -> str:
        """Name of this worker, for messages."""
        return f"engine worker {self.worker} on {socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class WorkerLayout:
    """What a worker wants of every version, and how it uses it.

    Attributes:
        manifest: its storages, and where in them each box lies.
        fills: constants that the model's loader writes where no tensor of the trainer goes.
        layers: the model's layers.
        in_place: serving memory in which versions are received; None to receive beside it.
        relays: sends the version that serves to other engines.
        payload: what versions travel as.
    """

    manifest: Manifest
    fills: Sequence[FillRecord]
    layers: Layers
    in_place: InPlace | None
    relays: Relays
    payload: PayloadKind = PayloadKind.WHOLE


class _Staged(NamedTuple):
    """A version that has been received and verified: its number, its weights, and the digests of its boxes."""

    version: int
    replacement: Replacement
    digests: Sequence[int]


class WorkerSession:
    """One session, from the time when the parties have agreed on a plan.

    Args:
        party: this worker's party.
        serving: the model whose weights are replaced.
        layout: what the worker wants.
        version: number of the serving weights.
        may_go_on: whether requests are answered while a version arrives; see [Note: meanwhile].
        timeout_s: timeout of one step, in seconds.
        log: the state of the session.

    Attributes:
        version: number of the serving weights.
    """

    def __init__(
        self,
        party: DestinationParty,
        serving: ServingModel,
        layout: WorkerLayout,
        *,
        version: int,
        may_go_on: bool,
        timeout_s: float,
        log: StateLog,
    ) -> None:
        self.version, self._log = version, log
        self._party, self._serving, self._layout = party, serving, layout
        self._may_go_on, self._timeout_s = may_go_on, timeout_s
        # Without conversion rules, only the location of the new weights matters, which is known before they arrive.
        self._may_begin = may_go_on and all(storage.rule is None for storage in layout.manifest.storages)
        self._in_place = layout.in_place
        self._memory = VersionMemory(layout.manifest, serving.device, layout.in_place, layout.layers)
        self._takes_deltas = layout.payload is PayloadKind.DELTA
        self._aside = Aside(serving.device)
        self._latest = -1  # last version that this session has committed; a new session may start anywhere
        self._digests: Sequence[int] = ()  # digests of that version's boxes
        self._staged: _Staged | None = None
        self._given_up = -1  # version whose commit failed while it was still arriving
        self._staging = threading.Lock()  # for these two, because a version arrives in a thread of its own
        self._others: Taking | None = None  # receives versions from other engines, once it has met some
        self._receiving = party  # the party that received the last version: the trainer's, or that of a meeting
        self._instead = "nothing has been received"  # why nothing is staged
        self._lost: str | None = None  # why the model's weights are lost for good
        self._device_memory = DeviceMemory(serving.device)

    def meet(self, call: RefitCall) -> None:
        """Starts to agree with other engines on how versions that they serve come here; see [Note: meanwhile].

        Raises:
            LostWeightsError: if the old weights cannot be restored.
        """
        self._leave_others()
        self._come_to_rest()
        number, device = call.sources + self._party.rank, str(self._serving.device)
        others = Taking(
            call.invitation, number, self._party.name, call.links(self._serving.config), device, call.lease_s
        )
        self._aside.start(f"meet-{call.version}", lambda: others.meet(self._layout.manifest))
        self._others = others

    def receive(self, version: int, step: int, linked: bool, *, key: str = "") -> None:
        """Receives a version, or starts to; see [Note: meanwhile].

        Args:
            version: number of the weights.
            step: number of the sources' next step.
            linked: whether the sources' links are up.
            key: of the meeting with other engines from which it comes; empty if it comes from the trainer.

        Raises:
            RefitError: if it could not be received; the old weights are then restored.
            LostWeightsError: if they cannot be restored.
        """
        if not key and not self._aside.idle:
            self._leave_others()  # the trainer's version goes first
        self._come_to_rest()
        party = self._party
        if key:
            if self._others is None or self._others.key != key:
                raise RefitError(f"asked to receive version {version} from other engines, but this worker met none")
            party = self._others.party
            party.backup_bytes = self._party.backup_bytes
        self._receiving = party
        self._staged, self._instead, self._given_up = None, "nothing has been received", -1
        if self._in_place is not None:
            self._layout.relays.stop(LEAVING_S)
        self._log.enter(State.SENDING, version)
        if self._may_go_on:
            self._aside.start(f"receive-{version}", lambda: self._take(party, version, step, linked))
        else:
            self._take(party, version, step, linked)

    def commit(self, version: int) -> None:
        """Makes a received version serve, and reports the result to the trainer if it is still connected.

        Raises:
            RefitError: if a worker of this engine cannot; the old weights are then restored.
            LostWeightsError: if they cannot be restored.
        """
        try:
            self._commit(version)
        except Exception as error:
            reason = f"{type(error).__name__}: {describe_error(error)}"
            self._log.enter(State.FAILED if self._lost is not None else State.READY, version, reason)
            self._tell(version, reason)
            raise
        self._log.enter(State.READY, version)
        self._tell(version, None)

    def relay(self, call: RefitCall) -> None:
        """Starts to send the version that serves to another engine. If it cannot be sent, that engine's parties fail.

        It ends, sent or not, before the serving weights change.
        """
        holds = self._lost is None and not (self._in_place is not None and self._in_place.begun)
        self._layout.relays.start(call, self._latest if holds else -1, self._digests)

    @property
    def awaited(self) -> str:
        """What it waits for while a version arrives. Any thread may ask."""
        return self._receiving.awaited

    def abandon(self) -> None:
        """Drops what has been received.

        Raises:
            LostWeightsError: if the old weights cannot be restored.
        """
        self._come_to_rest()
        self._staged, self._instead = None, "what had been received was given up"

    def end(self) -> None:
        """Leaves the session, after restoring the old weights and ending what is under way.

        Raises:
            LostWeightsError: if the old weights cannot be restored.
            RefitError: if a version that is arriving does not end.
        """
        self._settle()
        self.close()

    def close(self) -> None:
        """Leaves the session, whatever the model holds.

        Raises:
            RefitError: if a version that is arriving does not end.
        """
        self._party.leave()  # so that a version that is arriving ends in its own thread
        self._leave_others()
        self._layout.relays.leave(LEAVING_S)
        self._aside.finish(LEAVING_S)
        self._party.close()
        self._staged = None
        self._log.enter(State.CLOSED)

    def _tell(self, version: int, reason: str | None) -> None:
        try:
            self._party.post_commit(version, reason)
        except PartyFailedError as error:
            logger.warning("refit: nobody hears how the commit of version %d went: %s", version, error)

    def _leave_others(self) -> None:
        others, self._others = self._others, None
        if others is not None:
            others.leave()

    def _come_to_rest(self) -> None:
        """Waits for a version that is arriving, and restores the old weights."""
        self._aside.finish(self._timeout_s)
        self._settle()

    def _settle(self) -> None:
        """Restores the old weights if they were overwritten.

        Raises:
            LostWeightsError: if that fails or has failed before.
        """
        if self._lost is not None:
            raise LostWeightsError(self._lost)
        if self._in_place is not None and self._in_place.begun:
            self._staged = None
            self._in_place.put_back(lambda: refresh_attention(self._serving.model, self._serving.config))
            logger.info("refit: version %d has been put back", self.version)

    def _take(self, party: DestinationParty, version: int, step: int, linked: bool) -> None:
        made: list[Arriving] = []
        begun: list[Replacement] = []

        def make() -> Memory:
            made.append(self._make(version))
            party.beside_bytes = made[0].beside_bytes
            return made[0].received_in

        def begin() -> None:
            begun.append(self._put_together(dict(made[0].tensors)))

        try:
            party.receive(version, step, linked, make, begin if self._may_begin else None, self._memory.base)
            made[0].bits.clear()  # the receiver may keep the dictionary
            check_scale_values(self._layout.manifest, made[0].tensors)
            if self._takes_deltas:
                self._memory.keep(made[0])
            parameters = finish(self._layout.manifest, self._layout.fills, made[0].tensors)
            replacement = begun[0] if begun else self._put_together(parameters)
            self._layout.relays.stop(LEAVING_S)  # here, so that requests do not wait for it during the commit
            if party is not self._party:
                party.unlink()
            with self._staging:
                if version == self._given_up:
                    raise TransferError(f"version {version} was put together after its commit had failed")
                self._staged = _Staged(version, replacement, party.verified)
                self._log.enter(State.COMMITTING, version)
        except Exception as error:
            if party is not self._party:
                party.close()
            self._log.enter(State.READY, version, describe_error(error))
            self._instead = f"what came of version {version} was given up ({type(error).__name__}: {error})"
            self._settle()  # does nothing while requests continue
            raise

    def _make(self, version: int) -> Arriving:
        check_awake()
        if version <= self._latest:
            raise StaleVersionError(f"asked to receive version {version} after version {self._latest}")
        self._device_memory.note("before")
        made = self._memory.make(self._timeout_s)
        self._device_memory.note("with both")
        return made

    def _put_together(self, parameters: dict[str, torch.Tensor]) -> Replacement:
        """The new weights, prepared as far as possible before the commit, for which requests wait."""
        replacement = Replacement(self._serving.model, self._serving.config, parameters, self._layout.layers)
        if self._may_go_on:
            replacement.begin()
        elif self._in_place is None:
            replacement.build()
        return replacement

    def _commit(self, version: int) -> None:
        # The slowest worker may first have to wait for the version to arrive.
        workers = AllOrNone(version, self.version, self._timeout_s + VOTE_S)
        try:
            staged = self._take_staged(version, workers)
            if self._in_place is not None:
                workers.overwrite(staged.replacement, self._serving.device)
            else:
                workers.exchange(staged.replacement)
        except LostWeightsError as error:
            self._lost = str(error)
            raise
        except Exception:
            self._settle()
            raise
        self.version = self._latest = version  # first: what follows may fail
        self._digests = staged.digests
        del staged  # it may hold the old weights
        self._device_memory.give_back(version)
        if self._takes_deltas:
            self._memory.committed(version)
        if self._in_place is not None:
            self._in_place.done()

    def _take_staged(self, version: int, workers: AllOrNone) -> _Staged:
        """Takes what is staged of a version.

        Raises:
            TransferError: if the version is not staged.
        """
        late: RefitError | None = None
        try:
            self._aside.finish(self._timeout_s)
            self._layout.relays.stop(LEAVING_S)
            check_awake()
        except RefitError as error:
            late = error
        with self._staging:
            staged, self._staged = self._staged, None
            self._given_up = version if late is not None else -1
        if late is not None or staged is None or staged.version != version:
            found = self._instead if staged is None else f"version {staged.version} has been received"
            found = found if late is None else str(late)
            if staged is not None:
                self._instead = f"version {staged.version} was given up for version {version}"
            workers.decline()
            raise TransferError(f"asked to commit version {version}, but {found}") from late
        self._instead = f"version {version} has been taken"
        return staged
