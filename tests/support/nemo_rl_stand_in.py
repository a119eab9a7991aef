"""What a checkpoint engine meets in NeMo-RL, which cannot be installed here: a base class, and workers that call it.

The names, signatures and order of calls are NeMo-RL's: ``CheckpointEngine``, ``PolicyCheckpointEngineMixin``,
``VllmCheckpointEngineMixin``, ``VllmCheckpointEngineRpcMixin`` and ``CheckpointEngineWeightSynchronizer``.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

EXTENSION = "tests.support.nemo_rl_stand_in.WorkerExtension"


class CheckpointEngine(ABC):
    """``nemo_rl.utils.checkpoint_engines.base.CheckpointEngine``."""

    shard_expert_weights: bool = False

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:
        return

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]: ...


def install() -> None:
    """Makes the base class importable by NeMo-RL's name, in this process."""
    parts = "nemo_rl", "utils", "checkpoint_engines", "base"
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["nemo_rl.utils.checkpoint_engines.base"].CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]


def documented() -> dict[str, Any]:
    """The settings ``policy.generation`` that docs/rl.md adds to NeMo-RL's."""
    import yaml

    page = (Path(__file__).resolve().parents[2] / "docs" / "rl.md").read_text().partition("## NeMo-RL\n")[2]
    (fence,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return dict(yaml.safe_load(fence)["policy"]["generation"])


def create(backend: str, bucket_size: int, settings: dict[str, Any]) -> CheckpointEngine:
    """The engine of a ``refit_transport``, as NeMo-RL makes it."""
    install()
    module, _, name = backend.partition(":")
    return getattr(importlib.import_module(module), name)(bucket_size=bucket_size, **settings)


def dtensor_params_generator(
    model: nn.Module, target_dtype: torch.dtype
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """What a DTensor policy passes to a checkpoint engine: whole tensors, gathered when it is iterated."""
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.to(target_dtype).contiguous()


class PolicyWorker:
    """A rank of a DTensor policy: how it calls its checkpoint engine."""

    checkpoint_engine: CheckpointEngine
    model: Any
    rank: int

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any]) -> Any:
        """One step of an update."""
        if checkpoint_method == "init_checkpoint_engine":
            self.checkpoint_engine = create(**method_kwargs)
        elif checkpoint_method == "prepare_checkpoint_engine":
            return {**self.checkpoint_engine.prepare(), "rank": self.rank}
        elif checkpoint_method == "init_checkpoint_engine_process_group":
            self.checkpoint_engine.init_policy_process_group(worker_rank=self.rank, **method_kwargs)
        elif checkpoint_method == "send_weights_via_checkpoint_engine":
            with torch.no_grad():
                await self.checkpoint_engine.send_weights(dtensor_params_generator(self.model, torch.bfloat16))
        else:
            self.checkpoint_engine.finalize()
        return None


class WorkerExtension:
    """A worker of vLLM: how it calls its checkpoint engine."""

    checkpoint_engine: CheckpointEngine

    def init_checkpoint_engine(self, backend: str, bucket_size: int, settings: dict[str, Any]) -> None:
        """Makes it."""
        self.checkpoint_engine = create(backend, bucket_size, settings)

    def prepare_checkpoint_engine(self) -> Any:
        """What the policy is told about it."""
        return {**self.checkpoint_engine.prepare(), "rank": dist.get_rank()}

    def init_checkpoint_engine_process_group(
        self, rank_prefix: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connects it."""
        self.checkpoint_engine.init_rollout_process_group(
            rollout_rank=rank_prefix + dist.get_rank(),
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )

    def update_weights_from_checkpoint_engine(self) -> int:
        """Returns the number of batches that NeMo-RL would load into the weights that serve."""

        async def count() -> int:
            return len([batch async for batch in self.checkpoint_engine.receive_weight_batches()])

        return asyncio.run(count())

    def finalize_checkpoint_engine(self) -> None:
        """Ends it."""
        self.checkpoint_engine.finalize()


class GenerationWorker:
    """An actor that owns an engine of vLLM: passes calls on to the engine's workers."""

    llm: Any

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        """One step of an update, or any other method of the workers."""
        return self.llm.collective_rpc(checkpoint_method, args=method_args)

    def is_alive(self) -> bool:
        """Whether it answers."""
        return True

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        self.llm.llm_engine.reset_prefix_cache()
