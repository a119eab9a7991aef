"""Measures how long a trainer rank takes to locate its weights before a push, on a CPU with thousands of tiny experts.

python -m benchmarks.refit_look_up [--layers 14] [--experts 128]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import megatron_patches
from benchmarks.command_line import positive
from benchmarks.refit import QWEN3_MOE
from benchmarks.refit_vllm_model import TrainerModel
from megatron_patches.refit.simulation.cluster import trainer_mesh
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.source.live import MegatronSource

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512}


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of ``work``."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both ways, in milliseconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=positive, default=14)
    parser.add_argument("--experts", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=10)
    options = parser.parse_args(arguments)
    config = {**QWEN3_MOE, **SMALL, "num_hidden_layers": options.layers, "num_experts": options.experts}
    config |= {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    torch.set_num_threads(1)
    megatron_patches.apply()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = TrainerModel(config, trainer_mesh("tp=1"), torch.device("cpu"), 64)
        source = MegatronSource([model.module], 1, None)
        source.prepare()
        print(f"{len(source.look_up())} parameters")
        described = milliseconds(lambda: list(describe_model([model.module])), options.repeats)
        print(f"described anew: {described:.1f} ms")
        print(f"looked up: {milliseconds(source.look_up, options.repeats):.1f} ms")
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
