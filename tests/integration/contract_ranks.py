"""Ranks of a trainer that send what they hold, through vLLM's own contract; run in vLLM's environment.

::

    torchrun --nproc-per-node 2 -m tests.integration.contract_ranks URL WORKERS MODEL ANOTHER

The model is under FSDP2. The first rank prints, as JSON, what the server holds and how it labels that after each of
four versions, of which a rank cannot read the second, and the workers vote the third one down; and why they failed on
each rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.vllm_trainer import EtpTrainerInitInfo, GuardedSyncClient
from tests.support.vllm_server import VllmServer


class Failing(ModuleSource):
    """Fails on demand, on one rank."""

    fails = False

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One tensor, and then none."""
        for pair in super().iter_local():
            yield pair
            if self.fails and dist.get_rank() == 1:
                raise ValueError("this rank has lost its weights")


def main() -> None:
    """See the module's docstring."""
    url, workers, *folders = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, server = dist.get_rank(), VllmServer(url, Path())
    found: list[Any] = []
    model, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in folders)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    source = Failing(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        EtpTrainerInitInfo(int(workers), rank=rank), client=GuardedSyncClient(url), source=source
    )

    def send() -> None:
        reason = ""
        try:
            engine.send_weights()
        except RefitError as error:
            reason = str(error)
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if rank == 0:
            info: Any = server.get("weight_info")
            found.append((info["weight_version"], server.parameters(), reasons))
        dist.barrier()

    send()
    for name, parameter in model.named_parameters():
        whole = second.state_dict()[name]
        mine = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(mine)
    source.fails = True
    send()
    source.fails = False
    if rank == 0:
        server.rpc("sabotage")
    dist.barrier()
    send()
    send()
    engine.shutdown()
    if rank == 0:
        json.dump(found, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
