"""Total norms and loss scaling over NCCL: the same bodies as on gloo."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.devices import needs_gpus
from tests.gpu.launch import run_on_gpus
from tests.multiproc import bodies_clipping as bodies
from tests.multiproc import bodies_hooks

WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4)]
FOUR = pytest.param(4, marks=needs_gpus(4))
INF = float("inf")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, INF, -INF, 3.5])
def test_every_way_to_clip_equals_the_unsharded_one(world_size: int, norm_type: float, dtype: torch.dtype) -> None:
    run_on_gpus(bodies.clip_equals_whole, world_size, args=("linears", norm_type, dtype))


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_hook_sees_the_norm_of_the_whole_gradient(world_size: int) -> None:
    run_on_gpus(bodies.norms_inside_hooks, world_size)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", bodies.OPTIMIZERS)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=needs_gpus(2))])
def test_loss_scaling_equals_the_unsharded_one(world_size: int, name: str, unscale: bool) -> None:
    answers = run_on_gpus(bodies.scaler_equals_whole, world_size, args=(name, unscale))
    assert answers[0][1] != answers[1][1], "each overflow was on both ranks"


@pytest.mark.parametrize("world_size", [FOUR])
def test_an_overflow_on_one_rank_is_one_on_all(world_size: int) -> None:
    run_on_gpus(bodies.overflow_on_one_rank, world_size, args=(3,))


@pytest.mark.parametrize("world_size", WORLDS)
def test_hooks_run_once_a_backward_through_two_forwards(world_size: int) -> None:
    run_on_gpus(bodies_hooks.hooks_of_two_forwards, world_size, args=({"tied": True},))
