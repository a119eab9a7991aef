"""verl's manager updates its vLLM servers from an FSDP2 actor in two processes, on a CPU.

Run as ``python -m tests.integration.verl_publishing FOLDER``; it writes what the servers answered to ``found.json``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.rollout.replica import get_rollout_replica_class

from examples.serving import write_byte_tokenizer
from megatron_patches.refit.errors import RefitError
from tests.integration.tiny_models import QWEN3
from tests.support.prepared import variables_of, vllm_on_cpu
from tests.support.vllm_digests import digests_of

CONFIG = QWEN3 | {"vocab_size": 256, "num_hidden_layers": 2}
MODULE = "megatron_patches.refit.verl"
PROMPT = list(range(40, 60))
CHECKPOINT_ENGINE = CheckpointEngineConfig(
    backend="etp",
    custom_backend_module=MODULE,
    update_weights_bucket_megabytes=1,
    engine_kwargs={"etp": {"allow_narrowing": True, "timeout_s": 60.0}},
)


class Trainer(TrainingWorker):
    """One rank of an actor, with what ``verl.workers.engine_workers.ActorRolloutRefWorker`` adds for updates."""

    def __init__(self, settings: dict[str, Any]) -> None:
        Worker.__init__(self)
        initialize_global_process_group_ray(backend="gloo")  # verl itself asks for one of each device
        super().__init__(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(**settings),  # which imports its external_lib, as in verl's worker
                engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
                optimizer_config=FSDPOptimizerConfig(total_training_steps=8),
            )
        )
        import_external_libs(CHECKPOINT_ENGINE.custom_backend_module)
        backend = CHECKPOINT_ENGINE.backend
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            backend,
            is_master=self.rank == 0,
            bucket_size=CHECKPOINT_ENGINE.update_weights_bucket_megabytes << 20,
            **CHECKPOINT_ENGINE.engine_kwargs[backend],
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """As verl's worker."""
        assert mode == "etp"
        weights, _ = self.engine.get_per_tensor_param()
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **named: Any) -> Any:
        """As verl's worker."""
        return getattr(self.checkpoint_engine, method)(*args, **named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """Changes all weights."""
        torch.manual_seed(seed)
        for param in self.engine.module.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.data += torch.randn_like(local) * 0.05

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self) -> None:
        """Adds a tensor to the model of the last rank."""
        if self.rank == self.world_size - 1:
            self.engine.module.lm_head.register_buffer("more", torch.ones(3))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, file: str) -> None:
        """Writes what verl itself would send, in the servers' dtype."""
        from safetensors.torch import save_file

        weights, _ = self.engine.get_per_tensor_param()
        whole = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights}
        if self.rank == 0:
            save_file(whole, file, metadata={"format": "pt"})


def write_model(folder: Path) -> None:
    """A model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {key: value for key, value in CONFIG.items() if key not in {"model_type", "architectures"}}
    config = AutoConfig.for_model(str(CONFIG["model_type"]), **settings)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    write_byte_tokenizer(folder, 255)


def write_digests(worker: Any, file: str) -> None:
    """In a worker of vLLM: writes what it holds. verl's servers do not return what their workers return."""
    Path(file).write_text(json.dumps(digests_of(worker)))


def refusals() -> list[str]:
    """What is said of settings and weights that cannot be meant."""
    import_external_libs(MODULE)
    said = []
    for options in ({"pause": "keep"}, {"on_engine_failure": "drop"}, {"no": 1}, {"transport": "pigeon"}):
        try:
            CheckpointEngineRegistry.new("etp", bucket_size=1 << 20, **options)
        except ValueError as error:
            said.append(str(error))
    from megatron_patches.refit.verl import ModelWeights, check_settings

    engine, weights = CheckpointEngineRegistry.new("etp", bucket_size=1 << 20), iter([("weight", torch.ones(2))])
    for sent in (weights, ModelWeights(weights, torch.nn.Linear(1, 1), "LoRA")):
        try:
            asyncio.run(engine.send_weights(sent))
        except RefitError as error:
            said.append(str(error))

    for settings in (RolloutConfig(name="vllm"), RolloutConfig(name="vllm", free_cache_engine=False)):
        try:
            check_settings("a server", settings)
        except RefitError as error:
            said.append(str(error))
    return said


def answer(server: Any, number: int) -> list[Any]:
    """The step of the weights that a server says it answered with, and the answer's tokens."""
    sampling = {"temperature": 0.0, "max_tokens": 8}
    found = ray.get(server.generate.remote(PROMPT, sampling, f"request-{number}"))
    return [found.extra_fields["global_steps"], list(found.token_ids)]


async def main(folder: Path, said: list[str]) -> None:
    """Updates one server, two, and the other one; then fails to."""
    write_model(model := folder / "model")
    # Ray hands out GPUs that there are not: two for the actor, one for each server.
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, runtime_env={"env_vars": variables_of(vllm_on_cpu)})
    settings = {
        "path": str(model),
        "external_lib": MODULE,
        "use_remove_padding": False,
        "override_config": {"attn_implementation": "eager"},
    }
    model_config = HFModelConfig(**settings)
    rollout = RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=1,
        enforce_eager=True,
        free_cache_engine=False,
        enable_sleep_mode=False,
        prompt_length=32,
        response_length=16,
        max_model_len=64,
        max_num_seqs=4,
        checkpoint_engine=CHECKPOINT_ENGINE,
        engine_kwargs={
            "vllm": {"weight_transfer_config": {"backend": "etp"}, "block_size": 32, "num_gpu_blocks_override": 64}
        },
    )
    trainer = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Trainer), settings=settings),
        device_name="cpu",
    )
    trainer.reset()
    replica_class = get_rollout_replica_class("vllm")
    replicas = [replica_class(rank, rollout, model_config, gpus_per_node=1) for rank in range(2)]
    await asyncio.gather(*[replica.init_standalone() for replica in replicas])
    first, other = (replica.servers[0] for replica in replicas)
    manager = CheckpointEngineManager(CHECKPOINT_ENGINE, trainer, replicas[:1])
    found: dict[str, Any] = {"updates": [], "refused": said}

    def ask(step: int) -> None:
        for number, server in enumerate((first, other)):
            file = folder / f"held_{step}_{number}.json"
            ray.get(server.collective_rpc.remote(write_digests, args=(str(file),)))

    async def update(step: int) -> None:
        trainer.train(step)
        metrics = await manager.update_weights(global_steps=step)
        trainer.save(str(folder / f"step_{step}.safetensors"))
        ask(step)
        answers = [answer(server, step) for server in (first, other)]
        found["updates"].append({"step": step, "metrics": metrics, "answers": answers})

    await update(3)
    manager.add_replicas(replicas[1:])
    await update(4)
    manager.remove_replicas(replicas[:1])
    await update(5)
    trainer.change()
    try:
        await manager.update_weights(global_steps=6)
    except ray.exceptions.RayTaskError as error:
        found["failed"] = str(error.cause)
    ask(6)
    (folder / "found.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), refusals()))
