"""The memory in which a worker receives a version: newly allocated, or the serving memory.

[Note: base] A version may be sent relative to the one that serves. Most weights serve exactly as they arrived, so they
are their own base. Of the others (converted, processed, or sharing memory), a copy is kept as it arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.delta import Base
from megatron_patches.refit.memory.ports import Bits, Memory
from megatron_patches.refit.vllm.in_place import InPlace, serving_storages
from megatron_patches.refit.vllm.layers import Layers

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def bits_of(memory: torch.Tensor) -> Bits:
    """Flat host memory as unsigned integers."""
    bits: Bits = memory.view(_UNSIGNED[memory.element_size()]).numpy()
    return bits


@dataclass
class Arriving:
    """Memory of one version.

    Attributes:
        tensors: flat tensors in the arriving dtypes, by storage.
        bits: the same as unsigned integers if in host memory; otherwise empty.
        beside_bytes: size of the memory that was allocated beside the serving weights.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    bits: dict[str, Bits] = field(default_factory=dict)
    beside_bytes: int = 0

    @property
    def received_in(self) -> Memory:
        """The memory that a party receives into."""
        return self.bits or self.tensors


class VersionMemory:
    """Makes memory for successive versions.

    Args:
        manifest: what the worker wants.
        device: where its model is.
        in_place: serving memory in which versions are received; None to allocate all memory.
        layers: the model's layers; None if nothing serves as it arrives.
    """

    def __init__(
        self, manifest: Manifest, device: torch.device, in_place: InPlace | None, layers: Layers | None = None
    ) -> None:
        self._storages, self._device, self._in_place, self._layers = manifest.storages, device, in_place, layers
        self._version = -1  # number of the base; -1 for none
        self._copies: dict[str, torch.Tensor] = {}  # of the base
        self._next: dict[str, torch.Tensor] = {}  # of the version that may become the base

    def make(self, timeout_s: float) -> Arriving:
        """Makes memory for the next version. In place, the serving weights may be overwritten from now on.

        Args:
            timeout_s: seconds to wait for the backup of the serving weights.

        Raises:
            RefitError: if there is no backup.
        """
        self._next = {}
        serving = self._in_place.begin(timeout_s) if self._in_place is not None else {}
        made = Arriving()
        for storage in self._storages:
            memory = serving.get(storage.name)
            if memory is None:
                memory = torch.empty(storage.numel, dtype=getattr(torch, storage.dtype), device=self._device)
                made.beside_bytes += memory.nbytes
            made.tensors[storage.name] = memory
            if self._device.type == "cpu":
                made.bits[storage.name] = bits_of(memory)
        return made

    def keep(self, made: Arriving) -> None:
        """Copies the part of a complete version that will not serve as it arrived, before anything processes it."""
        served = self._served()
        self._next = {name: tensor.clone() for name, tensor in made.tensors.items() if name not in served}

    def committed(self, version: int) -> None:
        """The version of the last :meth:`keep` serves from now on."""
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
