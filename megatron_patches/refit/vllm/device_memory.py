"""Memory of a GPU that an engine in vLLM's sleep mode may share with a trainer: what a version takes of it."""

from __future__ import annotations

import logging

import torch
from vllm.device_allocator.cumem import CuMemAllocator

logger = logging.getLogger(__name__)


class DeviceMemory:
    """What is in use of a worker's GPU, by all processes. Does nothing for engines that cannot sleep.

    Args:
        device: the worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used_gib: dict[str, float] = {}

    def note(self, when: str) -> None:
        """Notes how much is in use.

        Args:
            when: the stage of a version, for the log.
        """
        if self._may_sleep:
            free, total = torch.cuda.mem_get_info(self._device)
            self._used_gib[when] = (total - free) / 2**30

    def give_back(self, version: int) -> None:
        """Gives back the memory of replaced weights, which a KV cache that wakes up, or a trainer, may need."""
        if self._may_sleep:
            torch.cuda.empty_cache()
            self.note("now")
            stages = ", ".join(f"{gib:.2f} {when}" for when, gib in self._used_gib.items())
            logger.info("refit: version %d: GiB of %s in use: %s", version, self._device, stages)

    @property
    def _may_sleep(self) -> bool:
        return self._device.type == "cuda" and CuMemAllocator.instance is not None
