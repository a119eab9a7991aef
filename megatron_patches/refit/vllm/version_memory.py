"""The memory in which a worker receives a version: newly allocated, or the serving memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.ports import Bits, Memory
from megatron_patches.refit.vllm.in_place import InPlace

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
    """

    def __init__(self, manifest: Manifest, device: torch.device, in_place: InPlace | None) -> None:
        self._storages, self._device, self._in_place = manifest.storages, device, in_place

    def make(self, timeout_s: float) -> Arriving:
        """Makes memory for the next version. In place, the serving weights may be overwritten from now on.

        Args:
            timeout_s: seconds to wait for the backup of the serving weights.

        Raises:
            RefitError: if there is no backup.
        """
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
