"""A trainer written against vLLM's own weight transfer contract, whose engines are Ray actors; in vLLM's environment.

Run as ``python -m tests.integration.ray_contract FOLDER``. It writes what the actors hold, and what it is told, to
``found.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.distributed.weight_transfer import ModuleSource, RayVLLMWeightSyncClient, WeightTransferTrainerFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.vllm_trainer import EtpTrainerInitInfo
from tests.integration.ray_publishing import build
from tests.support.ray_program import start_ray
from tests.support.vllm_digests import digests_of
from tests.support.vllm_host import LLM_OPTIONS

_HOST = "localhost"
_OPTIONS = {
    **LLM_OPTIONS,
    "distributed_executor_backend": "uni",
    "additional_config": {"etp": {"trainers": [_HOST]}},
}


class Offline(LLM):
    """An engine that generates in batches, and what it holds."""

    def __init__(self, model: str) -> None:
        super().__init__(model=model, **_OPTIONS)

    def found(self) -> list[Any]:
        """Digests of all weights, and their label."""
        return [self.collective_rpc(digests_of), self.get_weight_version()]


class Online(AsyncLLM):
    """An engine that takes requests at any time, and what it holds."""

    def __init__(self, model: str) -> None:
        config = AsyncEngineArgs(model=model, **_OPTIONS).create_engine_config()
        super().__init__(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False)

    async def found(self) -> list[Any]:
        """As :meth:`Offline.found`."""
        return [await self.collective_rpc(digests_of), await self.get_weight_version()]


def trainer_engine(actors: Any, model: torch.nn.Module, host: str = _HOST, workers: int = 1, version: int = 1) -> Any:
    """As vLLM documents it."""
    options = RefitOptions(host=host, timeout_s=30.0)
    return WeightTransferTrainerFactory.trainer_init(
        EtpTrainerInitInfo(workers, rank=0, options=options, first_version=version),
        client=RayVLLMWeightSyncClient(actors),
        source=ModuleSource(model),
    )


def main(folder: Path) -> None:
    """Gives each actor the weights that the other one has loaded, then both the same; then fails to."""
    import ray

    models = [build(seed) for seed in (0, 1)]
    for seed, model in enumerate(models):
        model.save_pretrained(folder / f"model_{seed}")
    start_ray(2)
    kinds = Offline, Online
    actors = [ray.remote(num_cpus=1)(kind).remote(str(folder / f"model_{seed}")) for seed, kind in enumerate(kinds)]
    states, reasons = [], []

    def note() -> None:
        states.append(ray.get([actor.found.remote() for actor in actors]))

    def fail(actors: Any, host: str = _HOST) -> None:
        try:
            trainer_engine(actors, models[0], host).send_weights()
        except (ValueError, RefitError) as error:
            reasons.append(str(error))

    note()
    fail([])
    fail(actors)
    fail(actors[1], "127.0.0.1")
    note()
    engines = [trainer_engine(actor, model) for actor, model in zip(actors, reversed(models), strict=True)]
    for engine in engines:
        engine.send_weights()
    note()
    for engine in engines:
        engine.shutdown()
    both = trainer_engine(actors, models[1], workers=2, version=2)
    both.send_weights()
    note()
    ray.kill(actors[0])
    fail(actors[0])
    both.shutdown()
    (folder / "found.json").write_text(json.dumps({"states": states, "reasons": reasons}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
