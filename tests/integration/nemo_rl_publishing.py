"""A policy under FSDP2 in two processes updates two engines of vLLM, with NeMo-RL's order of calls, on a CPU.

Run as ``python -m tests.integration.nemo_rl_publishing FOLDER SETTINGS_JSON``, with ``refit_transport`` and
``refit_cfg``. It writes what the engines hold to ``found.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.ray_publishing import build
from tests.support.nemo_rl_stand_in import EXTENSION, GenerationWorker, PolicyWorker, dtensor_params_generator
from tests.support.prepared import vllm_on_cpu
from tests.support.ray_program import start_ray
from tests.support.vllm_digests import digests_of
from tests.support.vllm_host import LLM_OPTIONS

RANKS = 2
_BUCKET = 1 << 20


class Policy(PolicyWorker):
    """A rank of the policy, and what the test asks of it."""

    def __init__(self, rank: int, store: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        self.rank, self.model = rank, build(0).float()
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def train(self, file: str) -> None:
        """Changes all weights, and writes what NeMo-RL itself would send."""
        from safetensors.torch import save_file

        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(torch.full_like(param, 0.01))
        whole = dict(dtensor_params_generator(self.model, torch.bfloat16))
        if self.rank == 0:
            save_file(whole, file, metadata={"format": "pt"})

    def add_a_buffer(self) -> None:
        """Changes the model of the last rank to one that the engines do not have."""
        if self.rank == RANKS - 1:
            self.model.lm_head.register_buffer("more", torch.ones(3))


class Generation(GenerationWorker):
    """An engine, and what it holds."""

    def __init__(self, model: str) -> None:
        vllm_on_cpu()
        from vllm import LLM

        options = {**LLM_OPTIONS, "worker_extension_cls": EXTENSION}
        self.llm = LLM(model=model, distributed_executor_backend="uni", **options)

    def held(self) -> Any:
        """Digests of all weights of each worker."""
        return self.llm.collective_rpc(digests_of)


class Update:
    """NeMo-RL's order of calls.

    Args:
        policy: actors of the policy.
        generation: actors that own engines, each with one worker.
        settings: ``refit_transport`` and ``refit_cfg``.
    """

    def __init__(self, policy: list[Any], generation: list[Any], settings: dict[str, Any]) -> None:
        self._policy, self._generation = policy, generation
        transport = settings["refit_transport"]
        given = {"release_after_refit": False, **settings["refit_cfg"][transport]}
        del given["update_weights_bucket_memory_ratio"]
        engine = {"backend": transport, "bucket_size": _BUCKET, "settings": given}
        self._both("init_checkpoint_engine", engine)
        train, rollout = self._both("prepare_checkpoint_engine", {})
        metadata = sorted(train, key=lambda one: one["rank"]) + [one for workers in rollout for one in workers]
        topology = {"train_world_size": len(policy), "rollout_world_size": len(generation), "metadata": metadata}
        self._both("init_checkpoint_engine_process_group", topology, prefixed=True)

    def send(self) -> list[Any]:
        """One update; returns what each worker of vLLM did."""
        return self._both("send_weights_via_checkpoint_engine", {}, "update_weights_from_checkpoint_engine")[1]

    def end(self) -> None:
        """Ends the connections."""
        self._both("finalize_checkpoint_engine", {})

    def _both(self, method: str, named: dict[str, Any], other: str = "", *, prefixed: bool = False) -> list[list[Any]]:
        import ray

        sides = [
            [actor.checkpoint_engine_rpc.remote(method, named) for actor in self._policy],
            [
                actor.checkpoint_engine_rpc.remote(other or method, (*([rank] if prefixed else []), *named.values()))
                for rank, actor in enumerate(self._generation)
            ],
        ]
        answers = ray.get(sides[0] + sides[1], timeout=120.0)
        return [answers[: len(self._policy)], answers[len(self._policy) :]]


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Updates the engines twice, with new connections in between; then fails to."""
    import ray

    build(1).save_pretrained(folder / "other")
    start_ray(8)
    policy = [
        ray.remote(num_cpus=1)(Policy).options(name=f"lm_policy-0-{rank}").remote(rank, str(folder / "store"))
        for rank in range(RANKS)
    ]
    generation = [
        ray.remote(num_cpus=1)(Generation).options(name=f"vllm_policy-0-{number}").remote(str(folder / "other"))
        for number in range(2)
    ]
    found: dict[str, Any] = {"updates": []}

    def held() -> Any:
        return ray.get([actor.held.remote() for actor in generation])

    build(1).save_pretrained(folder / "model")
    for step in (0, 1):
        ray.get([actor.train.remote(str(folder / "model" / "model.safetensors")) for actor in policy])
        update = Update(policy, generation, settings)
        batches = update.send()
        fresh = ray.remote(num_cpus=1)(Generation).remote(str(folder / "model"))
        found["updates"].append({"batches": batches, "held": held(), "fresh": ray.get(fresh.held.remote())})
        ray.kill(fresh)
        if step == 0:
            update.end()
    ray.get([actor.add_a_buffer.remote() for actor in policy])
    try:
        update.send()
    except ray.exceptions.RayTaskError as error:
        found["failed"] = str(error.cause)
    found["after"] = held()
    (folder / "found.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
