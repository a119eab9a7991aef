"""Bodies: Megatron trainings that tell how often they replayed a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_patches.process_exit import drop_graphs
from tests.integration.megatron_run import Trajectory, train


def train_counting_replays(
    rank: int, world_size: int, arguments: Sequence[str], script: Path
) -> tuple[Trajectory, int]:
    """A training, as :func:`tests.integration.megatron_run.train` runs it, and its number of replays."""
    replay, count = torch.cuda.CUDAGraph.replay, 0

    def counting(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal count
        count += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counting  # type: ignore[method-assign]
    try:
        return train(rank, world_size, arguments, script), count
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
        drop_graphs()  # the launcher does so where a script ends; NCCL's groups wait for it
