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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import State, StateLog
from megatron_patches.refit.errors import LostWeightsError, RefitError, StaleVersionError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.fan_out import Taking
from megatron_patches.refit.target.recorded import FillRecord
from megatron_patches.refit.target.replay import finish
from megatron_patches.refit.vllm.all_or_none import VOTE_S, AllOrNone, ReceivedVersion, report_commit
from megatron_patches.refit.vllm.aside import Aside
from megatron_patches.refit.vllm.engine_refusals import check_awake
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.quantized import check_scale_values, check_weight_values
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.relaying import Relays
from megatron_patches.refit.vllm.reload import Replacement, refresh_attention
from megatron_patches.refit.vllm.version_memory import InPlace, VersionMemory

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

    @property
    def is_alone(self) -> bool:
        """Whether its engine has no other worker."""
        return int(self.config.parallel_config.world_size_across_dp) == 1

    @property
    def level(self) -> int:
        """Level of messages that one of an engine's workers logs for all."""
        return logging.INFO if self.config.parallel_config.rank == 0 else logging.DEBUG


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
        quantizes: whether the engine quantizes what it receives.
    """

    manifest: Manifest
    fills: Sequence[FillRecord]
    layers: Layers
    in_place: InPlace | None
    relays: Relays
    payload: PayloadKind = PayloadKind.WHOLE
    quantizes: bool = False


class _Complete(NamedTuple):
    """A version that has been received and verified: its weights, and the digests of its boxes."""

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
        self._memory = VersionMemory(layout.manifest, serving.device, layout.in_place, layout.layers, layout.payload)
        self._aside = Aside(serving.device)
        self._latest = -1  # last version that this session has committed; a new session may start anywhere
        self._digests: Sequence[int] = ()  # digests of that version's boxes
        self._received = ReceivedVersion[_Complete](log)
        self._others: Taking | None = None  # receives versions from other engines, once it has met some
        self._receiving = party  # the party that received the last version: the trainer's, or that of a meeting
        self._lost: str | None = None  # why the model's weights are lost for good

    def meet(self, call: RefitCall) -> None:
        """Starts to agree with other engines on how versions that they serve come here; see [Note: meanwhile].

        Raises:
            LostWeightsError: if the old weights cannot be restored.
        """
        self._leave_others()
        self._come_to_rest()
        serving, number = self._serving, call.sources + self._serving.worker
        links, device = call.links(serving.config), str(serving.device)
        others = Taking(call.invitation, number, serving.name, links, device, call.lease_s)
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
        self._received.clear()
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
            report_commit(self._party, version, reason)
            raise
        self._log.enter(State.READY, version)
        report_commit(self._party, version, None)

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
        self._received.clear("what had been received was given up")

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
        self._received.drop()
        self._log.enter(State.CLOSED)

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
            self._received.drop()
            self._in_place.put_back(lambda: refresh_attention(self._serving.model, self._serving.config))
            logger.info("refit: version %d has been put back", self.version)

    def _take(self, party: DestinationParty, version: int, step: int, linked: bool) -> None:
        made: dict[str, torch.Tensor] = {}
        begun: list[Replacement] = []

        def make() -> Memory:
            made.update(self._make(version))
            party.beside_bytes = self._memory.beside_bytes
            return made

        def begin() -> None:
            begun.append(self._put_together(dict(made)))

        try:
            party.receive(version, step, linked, make, begin if self._may_begin else None, self._memory.base)
            check_scale_values(self._layout.manifest, made)
            self._memory.keep(made)
            parameters = finish(self._layout.manifest, self._layout.fills, made)
            if self._layout.quantizes:
                check_weight_values(self._layout.manifest, parameters)
            replacement = begun[0] if begun else self._put_together(parameters)
            self._layout.relays.stop(LEAVING_S)  # here, so that requests do not wait for it during the commit
            if party is not self._party:
                party.unlink()
            self._received.put(version, _Complete(replacement, party.verified))
        except Exception as error:
            if party is not self._party:
                party.close()
            self._received.lose(version, error)
            self._settle()  # does nothing while requests continue
            raise

    def _make(self, version: int) -> dict[str, torch.Tensor]:
        check_awake()
        if version <= self._latest:
            raise StaleVersionError(f"asked to receive version {version} after version {self._latest}")
        return self._memory.make(self._timeout_s)

    def _put_together(self, parameters: dict[str, torch.Tensor]) -> Replacement:
        """The new weights, prepared as far as possible before the commit, for which requests wait."""
        serving = self._serving
        replacement = Replacement(
            serving.model, serving.config, parameters, self._layout.layers, is_alone=serving.is_alone
        )
        if self._may_go_on:
            replacement.begin()
        elif self._in_place is None:
            replacement.build()
        return replacement

    def _commit(self, version: int) -> None:
        # The slowest worker may first have to wait for the version to arrive.
        workers = AllOrNone(version, self.version, self._timeout_s + VOTE_S)
        try:
            received = self._received.take(version, workers, self._end_reading)
            if self._in_place is not None:
                workers.overwrite(received.replacement, self._serving.device)
            else:
                workers.exchange(received.replacement)
        except LostWeightsError as error:
            self._lost = str(error)
            raise
        except Exception:
            self._settle()
            raise
        self.version = self._latest = version  # first: what follows may fail
        self._digests = received.digests
        del received  # it may hold the old weights
        self._memory.committed(version)
        if self._in_place is not None:
            self._in_place.done()

    def _end_reading(self) -> None:
        """Waits until a version has arrived, and nothing reads the serving weights.

        Raises:
            RefitError: if that is not so in time, or the engine sleeps.
        """
        self._aside.finish(self._timeout_s)
        self._layout.relays.stop(LEAVING_S)
        check_awake()
