"""`--gradient-accumulation-fusion` with Megatron's own layers and no APEX: sharded weights train as without it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest

import megatron_patches
from megatron_patches.cpu import arguments as cpu_arguments
from tests.integration.cases import GPT2, LLAMA, ONE_MICROBATCH, SCHEDULE
from tests.integration.megatron_run import MegatronPool, Trajectory, train

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.cpu_only("cases.py has this with Transformer Engine's layers and Megatron's output layer"),
    pytest.mark.skipif(find_spec("fused_weight_gradient_mlp_cuda") is not None, reason="APEX is installed"),
]


def train_fused(rank: int, world_size: int, arguments: tuple[str, ...]) -> tuple[Trajectory, set[bool]]:
    """Train on a CPU with the option left on, as it is by default on GPUs, and say which layers had it on."""
    from megatron.training import training

    megatron_patches.apply()
    required = {name: value for name, value in cpu_arguments.required_arguments().items() if "accumulation" not in name}
    train_step = training.train_step
    seen: set[bool] = set()

    def noting_step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        layers = (module for chunk in model for module in chunk.modules())
        seen.update(layer.gradient_accumulation_fusion for layer in layers if hasattr(layer, "allreduce_dgrad"))
        return train_step(forward_step, data, model, *args, **kwargs)

    with (
        mock.patch.object(cpu_arguments, "required_arguments", return_value=required),
        mock.patch.object(training, "train_step", noting_step),
    ):
        return train(rank, world_size, arguments), seen


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "tied"])
def test_fused_accumulation_needs_no_apex(megatron: MegatronPool, model: str) -> None:
    arguments = tuple(f"{model} {SCHEDULE} {ONE_MICROBATCH}".split())
    stock = megatron.train(2, arguments)
    fused = megatron.run(train_fused, 2, 240.0, ((*arguments, "--etp-size", "2"),))
    for expected, (found, layers) in zip(stock, fused, strict=True):
        assert layers == {True}
        assert len(expected.losses) == 20
        assert found.losses == expected.losses
