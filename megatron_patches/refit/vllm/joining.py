"""Joins a trainer's session: meets the other parties, tells them what this worker wants, and agrees on a plan."""

from __future__ import annotations

import os
import socket

from torch import nn

from megatron_patches.refit.assembly import Assembly
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.memory_mode import MemoryMode
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.messages import Model
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.rendezvous_messages import Invitation
from megatron_patches.refit.target.recorded import recorded_manifest
from megatron_patches.refit.transports.base import TransportName, named_transport
from megatron_patches.refit.vllm.engine_refusals import (
    check_all_loaded,
    check_awake,
    check_derivations,
    check_options,
)
from megatron_patches.refit.vllm.in_place import InPlace
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.recording import record_loading
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.reload import loader_form
from megatron_patches.refit.vllm.same_model import check_same_model
from megatron_patches.refit.vllm.swap import make_ready
from megatron_patches.refit.vllm.worker_session import Layout, ServingModel, WorkerSession


def join(call: RefitCall, serving: ServingModel, version: int) -> WorkerSession:
    """Joins; all parties do so together.

    Args:
        call: which session.
        serving: the model that serves.
        version: number of its weights.

    Raises:
        RefitError: on all parties, if any failed.
    """
    parallel = serving.config.parallel_config
    worker = int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
    name = f"engine worker {call.first_party - call.sources + worker} on {socket.gethostname()}:{os.getpid()}"
    memory = MemoryMode(call.memory)
    options = LinkOptions(
        transport=named_transport(call.transport),
        staging_bytes=call.staging_bytes,
        sources=call.sources,
        memory=memory,
    )
    # Who has joined must answer, so whatever the call may ask for in vain comes first.
    invitation = Invitation(call.host, call.port, call.token, call.parties, call.timeout_s)
    assembly = Assembly(invitation, call.first_party + worker, name)
    party = DestinationParty(assembly, options, str(serving.device))
    found: list[Layout] = []

    def want(model: Model) -> Manifest:
        layout = describe_layout(model, serving, party.rank, memory)
        if memory is MemoryMode.BESIDE:
            make_ready(serving.device)  # here, so that all parties hear why where it cannot be done
        if layout.in_place is not None:
            party.backup_bytes = layout.in_place.backup.nbytes
        found.append(layout)
        return layout.manifest

    try:
        party.prepare(want)
        (layout,) = found
        assembly.most_silence_s = call.lease_s  # before, long messages may keep others waiting
        if layout.in_place is not None:
            layout.in_place.backup.start()
    except BaseException:
        party.close()
        raise
    nccl = party.transport is TransportName.C10D and serving.device.type != "cpu"
    may_go_on = memory is MemoryMode.BESIDE and not nccl
    return WorkerSession(party, serving, layout, version=version, may_go_on=may_go_on, timeout_s=call.timeout_s)


def describe_layout(model: Model, serving: ServingModel, rank: int, memory: MemoryMode) -> Layout:
    """What a worker wants of a model, found by running the engine's own weight loaders.

    Args:
        model: what the trainer has.
        serving: what serves here.
        rank: of the worker, as a destination.
        memory: where versions are to be received.

    Raises:
        UnsupportedEngineError: if new weights would not reach all that serves.
        ModelMismatchError: if these are two models.
        UnsupportedModelError: if a loader does what cannot be recorded.
        UnmappedParameterError: if it leaves a parameter out.
    """
    check_options(serving.config)
    check_derivations(serving.model)
    check_awake()
    check_same_model(model.config, serving.config.model_config.hf_text_config, type(serving.model).__name__)
    with loader_form(serving.model) as tensors:
        recording = record_loading(serving.model.load_weights, tensors, model.tensors)
        parameters = {name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter) and tensor.numel()}
    check_all_loaded(serving.model, parameters, {parameter.name for parameter in recording.parameters})
    by_name = {spec.name: spec for spec in model.tensors}
    manifest = recorded_manifest(
        rank, socket.gethostname(), recording.parameters, recording.copies, recording.fills, by_name
    )
    layers = Layers(serving.model)
    in_place = InPlace(layers, manifest.storages, serving.device) if memory is MemoryMode.IN_PLACE else None
    return Layout(manifest, recording.fills, layers, in_place)
