"""Joins a trainer's session: connects to the other parties, describes what this worker wants, and agrees on a plan."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import Future, wait

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.kv_scales import is_kv_scale
from megatron_patches.refit.control.messages import TICK_S, Model, State, StateLog
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.target.recorded import recorded_manifest
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.vllm.aside import Aside
from megatron_patches.refit.vllm.engine_refusals import (
    check_all_loaded,
    check_awake,
    check_derivations,
    check_options,
    wanted_parameters,
)
from megatron_patches.refit.vllm.kv_scales import with_kv_scales
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.quantized import check_scales, record_in_one_format
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.relaying import Relays
from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.reload import loader_form, without_adapter_layers
from megatron_patches.refit.vllm.same_model import check_same_model
from megatron_patches.refit.vllm.swap import make_ready
from megatron_patches.refit.vllm.version_memory import InPlace
from megatron_patches.refit.vllm.worker_session import LEAVING_S, ServingModel, WorkerLayout, WorkerSession

logger = logging.getLogger(__name__)


class Joining:
    """A worker that is joining a session. It agrees on a plan in its own thread while the engine answers requests.

    Only the part that needs the model blocks the engine: :meth:`record`.

    Args:
        call: the call to join.
        serving: the serving model.
        version: number of its weights.
        log: the state of the session.

    Raises:
        RefitError: if the rendezvous cannot be reached.
    """

    def __init__(self, call: RefitCall, serving: ServingModel, version: int, log: StateLog) -> None:
        self._call, self._serving, self._version, self._log = call, serving, version, log
        self._assembly = Assembly(call.invitation, call.sources + serving.worker, serving.name)
        self._party = DestinationParty(self._assembly, call.links(serving.config), str(serving.device))
        self._model: Future[Model] = Future()  # from the other parties
        self._layout: Future[WorkerLayout] = Future()  # from record()
        self._failure: Exception | None = None
        self._aside = Aside(serving.device)
        self._aside.start("join", self._meet)

    def record(self) -> None:
        """Finds out what this worker wants of the trainer's model. If that fails, the step fails for all parties.

        Raises:
            RefitError: if there is no model, because joining failed.
        """
        try:
            model = self._model.result(self._call.timeout_s)
        except TimeoutError as error:
            raise PartyFailedError(f"no trainer described its model within {self._call.timeout_s:.0f} s") from error
        try:
            with without_adapter_layers(self._serving.model):
                layout = describe_layout(model, self._serving, self._call.memory, self._call.payload)
            if self._call.memory is MemoryMode.BESIDE:
                make_ready(self._serving.device)  # here, so that all parties learn of a failure
        except Exception as error:  # noqa: BLE001 - raised in the step of all parties
            self._layout.set_exception(error)
        else:
            self._layout.set_result(layout)

    def finish(self) -> WorkerSession:
        """The session. Waits until all parties have agreed on a plan.

        Raises:
            RefitError: on all parties, if any failed.
        """
        self._aside.finish(self._call.timeout_s)
        if self._failure is not None:
            raise self._failure
        nccl = self._party.transport is TransportName.C10D
        return WorkerSession(
            self._party,
            self._serving,
            self._layout.result(0),
            version=self._version,
            may_go_on=self._call.memory is MemoryMode.BESIDE and not nccl,
            timeout_s=self._call.timeout_s,
            log=self._log,
        )

    def end(self) -> None:
        """Leaves the session.

        Raises:
            RefitError: if the thread does not end.
        """
        self._party.leave()
        self._aside.finish(LEAVING_S)
        self._party.close()

    def _meet(self) -> None:
        try:
            self._party.prepare(self._want)
            self._assembly.most_silence_s = self._call.lease_s  # only now, as long messages before it may delay others
            in_place = self._layout.result(0).in_place
            if in_place is not None:
                in_place.backup.start()
            self._log.enter(State.READY)
        except Exception as error:
            self._failure = error
            self._log.enter(State.FAILED, reason=describe_error(error))
            if not self._model.done():
                self._model.set_exception(error)
            self._party.close()
            raise

    def _want(self, model: Model) -> Manifest:
        self._model.set_result(model)
        patience = Patience(
            self._call.timeout_s, "the engine to let this worker look at its model", self._assembly.check
        )
        while not self._layout.done():
            patience.tick()
            wait([self._layout], TICK_S)
        layout = self._layout.result(0)
        self._party.cannot_send = refusal = layout.relays.refusal
        if refusal:
            logger.info("refit: %s", refusal)
        if layout.in_place is not None:
            self._party.backup_bytes = layout.in_place.backup.nbytes
        return layout.manifest


def describe_layout(model: Model, serving: ServingModel, memory: MemoryMode, payload: PayloadKind) -> WorkerLayout:
    """Describes what a worker wants of a model, by running the engine's own weight loaders.

    Args:
        model: the trainer's model.
        serving: the serving model.
        memory: where versions will be received.
        payload: what versions travel as.

    Raises:
        UnsupportedEngineError: if what is new would not reach everything that serves.
        ModelMismatchError: if the two models, or their attention layers, differ.
        UnsupportedModelError: if a loader does something that cannot be recorded.
        UnmappedParameterError: if the loader leaves a parameter out.
    """
    check_options(serving.config)
    check_derivations(serving.model)
    check_awake()
    if model.config:  # a program may publish a model of which it knows no configuration
        check_same_model(model.config, serving.config.model_config.hf_text_config, type(serving.model).__name__)
    weights = [spec for spec in model.tensors if not is_kv_scale(spec.name)]
    check_scales(weights)
    with loader_form(serving.model) as tensors:
        recording = record_in_one_format(serving.model.load_weights, tensors, weights)
        parameters = wanted_parameters(serving.model)
    check_all_loaded(serving.model, parameters, {parameter.name for parameter in recording.parameters})
    by_name = {spec.name: spec for spec in weights}
    manifest = recorded_manifest(serving.worker, socket.gethostname(), recording, by_name)
    manifest = with_kv_scales(manifest, serving.model, serving.config, model.tensors)
    layers = Layers(serving.model)
    in_place = InPlace(layers, manifest.storages, serving.device) if memory is MemoryMode.IN_PLACE else None
    relays = Relays(model, manifest, layers, serving)
    quantizes = installed_release().quantizes_to_fp8(serving.config)
    return WorkerLayout(manifest, recording.fills, layers, in_place, relays, payload, quantizes)
