"""The memory in which a worker receives a version: newly allocated, or the serving memory.

[Note: base] A version may be sent relative to the one that serves. Most weights serve exactly as they arrived, so they
are their own base. Of the others (converted, processed, or sharing memory), a copy is kept as it arrived.
"""

from __future__ import annotations

import logging

import torch
from vllm.device_allocator.cumem import CuMemAllocator

from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import Base, PayloadKind
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.vllm.in_place import InPlace, serving_storages
from megatron_patches.refit.vllm.layers import Layers

logger = logging.getLogger(__name__)


class VersionMemory:
    """Makes memory for successive versions.

    Of an engine in vLLM's sleep mode, which may share its GPU with a trainer, it logs what a version takes.

    Args:
        manifest: what the worker wants.
        device: where versions are received.
        in_place: serving memory in which versions are received; None to allocate all memory.
        layers: the model's layers; None if nothing serves as it arrives.
        payload: what versions travel as.

    Attributes:
        beside_bytes: size of the memory that was last allocated beside the serving weights.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        in_place: InPlace | None = None,
        layers: Layers | None = None,
        payload: PayloadKind = PayloadKind.WHOLE,
    ) -> None:
        self._storages, self._device, self._in_place, self._layers = manifest.storages, device, in_place, layers
        self._keeps_base = payload is PayloadKind.DELTA
        self.beside_bytes = 0
        self._version = -1  # number of the base; -1 for none
        self._copies: dict[str, torch.Tensor] = {}  # of the base
        self._next: dict[str, torch.Tensor] = {}  # of the version that may become the base
        self._used_gib: dict[str, float] = {}  # of the GPU, by all processes, at each stage of a version

    def make(self, timeout_s: float) -> dict[str, torch.Tensor]:
        """Makes memory for the next version. In place, the serving weights may be overwritten from now on.

        Args:
            timeout_s: seconds to wait for the backup of the serving weights.

        Returns:
            Flat tensors in the arriving dtypes, by storage.

        Raises:
            RefitError: if there is no backup.
        """
        self._note_use("before")
        self._next = {}
        serving = self._in_place.begin(timeout_s) if self._in_place is not None else {}
        made: dict[str, torch.Tensor] = {}
        self.beside_bytes = 0
        for storage in self._storages:
            memory = serving.get(storage.name)
            if memory is None:
                memory = torch.empty(storage.numel, dtype=getattr(torch, storage.dtype), device=self._device)
                self.beside_bytes += memory.nbytes
            made[storage.name] = memory
        self._note_use("with both")
        return made

    def keep(self, made: FlatMemory) -> None:
        """Copies the part of a base that will not serve as it arrived, before anything processes the version."""
        if self._keeps_base:
            served = self._served()
            self._next = {name: tensor.clone() for name, tensor in made.items() if name not in served}

    def committed(self, version: int) -> None:
        """The version of the last :meth:`keep` serves from now on, and the replaced weights are freed.

        Their memory is given back if a KV cache that wakes up, or a trainer, may need it.
        """
        if self._may_sleep:
            torch.cuda.empty_cache()
            self._note_use("now")
            stages = ", ".join(f"{gib:.2f} {when}" for when, gib in self._used_gib.items())
            logger.info("refit: version %d: GiB of %s in use: %s", version, self._device, stages)
        if self._keeps_base:
            self._version, self._copies, self._next = version, self._next, {}

    def base(self) -> Base | None:
        """The version that serves, as it arrived; None if none was kept. See [Note: base]."""
        return None if self._version < 0 else Base(self._version, {**self._served(), **self._copies})

    def _served(self) -> dict[str, torch.Tensor]:
        """Storages that serve as they arrive."""
        layers = self._layers
        if layers is None:
            return {}
        found = serving_storages(layers, self._storages)
        return {name: memory for name, memory in found.items() if layers.is_plain(name)}

    @property
    def _may_sleep(self) -> bool:
        return self._device.type == "cuda" and CuMemAllocator.instance is not None

    def _note_use(self, when: str) -> None:
        if self._may_sleep:
            free, total = torch.cuda.mem_get_info(self._device)
            self._used_gib[when] = (total - free) / 2**30
