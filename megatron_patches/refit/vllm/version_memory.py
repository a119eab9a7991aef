"""The memory in which a worker receives a version: newly allocated, or the serving memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.ports import Bits, Memory
from megatron_patches.refit.vllm.in_place import InPlace

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass
class Arriving:
    """Memory of one version.

    Attributes:
        tensors: by storage, flat, in the types that arrive.
        bits: the same as unsigned integers, if it is the host's; otherwise empty.
        beside_bytes: how much of it was made, beside what serves.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    bits: dict[str, Bits] = field(default_factory=dict)
    beside_bytes: int = 0

    @property
    def received_in(self) -> Memory:
        """What a party receives into."""
        return self.bits or self.tensors


class VersionMemory:
    """Makes memory for one version after the other.

    Args:
        manifest: what the worker wants.
        device: where its model is.
        in_place: memory that serves, as far as versions are received in it; None for fresh memory alone.
    """

    def __init__(self, manifest: Manifest, device: torch.device, in_place: InPlace | None) -> None:
        self._storages, self._device, self._in_place = manifest.storages, device, in_place

    def make(self, timeout_s: float) -> Arriving:
        """Memory for the next version; where it is received in place, what served is overwritten from now on.

        Args:
            timeout_s: seconds to wait for a copy of what serves.

        Raises:
            RefitError: if there is no copy.
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
                made.bits[storage.name] = memory.view(_UNSIGNED[memory.element_size()]).numpy()
        return made
