"""vLLM's sleep mode on CPUs, where it has none: what sleeps is overwritten, as a GPU's released memory would be lost.

The scheduler and the executor, which keep the tags that sleep, are vLLM's own. Here a worker overwrites what its GPU
worker would give back, and restores what that would restore: at level 1 everything of the model, at level 2 buffers.
For a server started with ``--worker-extension-cls tests.support.vllm_sleep.SleepingWorker``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.device_allocator import AllocationData
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.vllm_digests import DigestingWorker


class Memory:
    """What a worker can lose."""

    def __init__(self) -> None:
        self.by_tag = {tag: AllocationData((0, 0, 0, 0), tag) for tag in ("weights", "kv_cache")}
        self.pointer_to_data = dict(enumerate(self.by_tag.values()))
        self.kept: dict[str, torch.Tensor] = {}

    def sleep(self, worker: Any, level: int) -> None:
        """Overwrites everything, and keeps what wakes up again."""
        model = worker.get_model()
        tensors = dict([*(model.named_parameters() if level == 1 else ()), *model.named_buffers()])
        self.kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for tensor in [*model.parameters(), *model.buffers(), *worker.model_runner.kv_caches]:
            tensor.detach().fill_(5)
        for data in self.by_tag.values():
            data.is_asleep = True

    def wake_up(self, worker: Any, tags: list[str] | None) -> None:
        """Gives memory back; that of a tag that is awake would be mapped twice."""
        for tag in tags or self.by_tag:
            if not self.by_tag[tag].is_asleep:
                raise RuntimeError(f"{tag} is mapped twice")
            self.by_tag[tag].is_asleep = False
        model = worker.get_model()
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        for name, content in self.kept.items():
            tensors[name].detach().copy_(content)
        self.kept = {}


def _sleep(worker: Any, level: int = 1) -> None:
    if not isinstance(CuMemAllocator.instance, SimpleNamespace):
        CuMemAllocator.instance = SimpleNamespace(memory=Memory())
        CuMemAllocator.instance.pointer_to_data = CuMemAllocator.instance.memory.pointer_to_data
    CuMemAllocator.instance.memory.sleep(worker, level)


def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    CuMemAllocator.instance.memory.wake_up(worker, tags)


CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


class SleepingWorker(DigestingWorker):
    """A worker that can sleep, and can be asked for its digests."""
