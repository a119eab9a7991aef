"""verl's manager updates its vLLM servers from its FSDP2 worker in two processes, on a CPU.

Run as ``python -m tests.integration.verl_publishing FOLDER SETTING=VALUE ...``, with settings of verl's command line.
It writes what the servers answered to ``found.json``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import get_rollout_replica_class

from examples.serving import write_byte_tokenizer
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.verl import ModelWeights, check_settings
from tests.integration.tiny_models import QWEN3
from tests.support.prepared import variables_of, vllm_on_cpu
from tests.support.vllm_digests import digests_of

CONFIG = QWEN3 | {"vocab_size": 256, "num_hidden_layers": 2}
PROMPT = list(range(40, 60))
SETTINGS = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.optim.total_training_steps=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.prompt_length=32",
    "actor_rollout_ref.rollout.response_length=16",
    "actor_rollout_ref.rollout.max_model_len=64",
    "actor_rollout_ref.rollout.max_num_seqs=4",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=64",
)
"""Of a tiny model on a CPU."""


class Trainer(ActorRolloutRefWorker):
    """verl's worker, and what the test asks of it."""

    def __init__(self, config: DictConfig, role: str) -> None:
        super().__init__(config, role)
        initialize_global_process_group_ray(backend="gloo")  # verl itself asks for one of each device

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """Changes all weights."""
        torch.manual_seed(seed)
        for param in self.actor.engine.module.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.data += torch.randn_like(local) * 0.05

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self) -> None:
        """Adds a tensor to the model of the last rank."""
        if self.rank == self.world_size - 1:
            self.actor.engine.module.lm_head.register_buffer("more", torch.ones(3))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, file: str) -> None:
        """Writes what verl itself would send, in the servers' dtype."""
        from safetensors.torch import save_file

        weights, _ = self.actor.engine.get_per_tensor_param()
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
    said = []
    for options in ({"pause": "keep"}, {"on_engine_failure": "drop"}, {"no": 1}, {"transport": "pigeon"}):
        try:
            CheckpointEngineRegistry.new("etp", bucket_size=1 << 20, **options)
        except ValueError as error:
            said.append(str(error))
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


async def main(folder: Path, settings: Sequence[str], said: list[str]) -> None:
    """Updates one server, two, and the other one; then fails to."""
    write_model(model := folder / "model")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"actor_rollout_ref.model.path={model}", *SETTINGS, *settings])
    rollout = config.actor_rollout_ref.rollout
    # Ray hands out GPUs that there are not: two for the actor, one for each server.
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, runtime_env={"env_vars": variables_of(vllm_on_cpu)})
    trainer = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Trainer), config=config.actor_rollout_ref, role="actor"),
        device_name="cpu",
    )
    trainer.init_model()
    replica_class = get_rollout_replica_class(rollout.name)
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    replicas = [replica_class(rank, rollout, model_config, gpus_per_node=1) for rank in range(2)]
    await asyncio.gather(*[replica.init_standalone() for replica in replicas])
    servers = [replica.servers[0] for replica in replicas]
    manager = CheckpointEngineManager(omega_conf_to_dataclass(rollout.checkpoint_engine), trainer, replicas[:1])
    found: dict[str, Any] = {"updates": [], "refused": said}

    def ask(step: int) -> None:
        for number, server in enumerate(servers):
            file = folder / f"held_{step}_{number}.json"
            ray.get(server.collective_rpc.remote(write_digests, args=(str(file),)))

    async def update(step: int) -> None:
        trainer.train(step)
        metrics = await manager.update_weights(global_steps=step)
        trainer.save(str(folder / f"step_{step}.safetensors"))
        ask(step)
        answers = [answer(server, step) for server in servers]
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
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:], refusals()))
