"""Sends the version that serves in a worker to other engines, in threads, while the engine answers requests."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_patches.refit.control.messages import Model
from megatron_patches.refit.errors import RefitError, UnsupportedEngineError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.parties.fan_out import Committed, Relay
from megatron_patches.refit.vllm.aside import Aside
from megatron_patches.refit.vllm.engine_refusals import check_awake, check_stays_awake
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.refit_call import RefitCall

if TYPE_CHECKING:
    from megatron_patches.refit.vllm.worker_session import ServingModel

_ENDING_S = 10.0
"""Seconds for a thread to end after the last version has been sent."""


class Relays:
    """What one worker sends to other engines.

    Args:
        model: the model, as the trainer described it.
        manifest: what the worker receives of every version.
        layers: layers of the serving model.
        serving: the serving model.
    """

    def __init__(self, model: Model, manifest: Manifest, layers: Layers, serving: ServingModel) -> None:
        self._model, self._manifest, self._layers, self._serving = model, manifest, layers, serving
        self._relays: dict[str, tuple[Relay, Aside]] = {}  # by key of the meeting
        self._lock = threading.Lock()

    @property
    def refusal(self) -> str:
        """Why this worker could not send what it serves; empty if it could."""
        try:
            self._memory()
        except RefitError as error:
            return str(error)
        return ""

    def start(self, call: RefitCall, version: int, digests: Sequence[int]) -> None:
        """Starts to send the version that serves.

        Args:
            call: says where to.
            version: number of the serving weights; -1 if they did not come in this session.
            digests: digests of the boxes of the manifest, as compared with the trainer's.
        """

        def committed() -> Committed:
            return Committed(version, self._model, self._manifest, self._memory(), digests)

        with self._lock:
            for key, (kept, thread) in list(self._relays.items()):
                if thread.idle and not kept.goes_on:
                    kept.leave()
                    del self._relays[key]
            relay, aside = self._relays.get(call.key) or (self._meet(call), Aside(self._serving.device))
            aside.finish(_ENDING_S)
            aside.start(f"relay-{version}", lambda: relay.run(call.version, committed))
            self._relays[call.key] = relay, aside

    def stop(self, timeout_s: float) -> None:
        """Ends all that is being sent, because the serving memory is about to change. Any thread may call it.

        Raises:
            RefitError: if one does not end in time.
        """
        with self._lock:
            reading = [aside for relay, aside in self._relays.values() if not aside.idle and relay.stop()]
            for aside in reading:
                aside.finish(timeout_s)

    def leave(self, timeout_s: float) -> None:
        """Ends all, because the session ends.

        Raises:
            RefitError: if one does not end in time.
        """
        self.stop(timeout_s)
        with self._lock:
            for relay, _ in self._relays.values():
                relay.leave()
            self._relays = {}

    def _meet(self, call: RefitCall) -> Relay:
        serving, number = self._serving, call.first + self._serving.worker
        links, device = call.links(serving.config), str(serving.device)
        return Relay(call.invitation, number, serving.name, links, device, call.lease_s)

    def _memory(self) -> Memory:
        """The serving weights, by name of the storages in which they arrived.

        Raises:
            UnsupportedEngineError: naming a weight that no longer has the form in which it arrived.
        """
        check_stays_awake()
        check_awake()
        for storage in self._manifest.storages:
            if storage.rule is not None:
                raise UnsupportedEngineError(
                    f"{self._serving.name} cannot send what it serves: it keeps {storage.target} as "
                    f"{storage.final_dtype}, computed from the {storage.dtype} that the trainer sent"
                )
        found: Mapping[str, torch.Tensor] = self._layers.readable([storage.name for storage in self._manifest.storages])
        for storage in self._manifest.storages:
            tensor = found.get(storage.name)
            if tensor is None or tensor.numel() != storage.numel or tensor.dtype is not getattr(torch, storage.dtype):
                raise UnsupportedEngineError(
                    f"{self._serving.name} cannot send what it serves: vLLM has changed the form of {storage.name} "
                    "after loading"
                )
        return found
