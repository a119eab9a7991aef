"""The projections around latent experts on a CPU: linear layers, marked as Megatron marks Transformer Engine's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_patches.cpu.latent_projections import DuplicatedLinear


def projection(*, bias: bool = False, init: Any = torch.nn.init.normal_, **settings: Any) -> DuplicatedLinear:
    plain = {"params_dtype": torch.float32, "perform_initialization": True, "sequence_parallel": False}
    config = SimpleNamespace(**(plain | settings))
    return DuplicatedLinear(6, 3, parallel_mode="duplicated", config=config, init_method=init, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_a_linear_layer_does(bias: bool) -> None:
    layer, x = projection(bias=bias), torch.randn(2, 5, 6, requires_grad=True)
    if bias:
        torch.nn.init.normal_(layer.bias)
    found, left = layer(x)
    assert left is None
    assert torch.equal(found, functional.linear(x, layer.weight, layer.bias))
    gradient = torch.randn_like(found)
    found.backward(gradient)
    torch.testing.assert_close(layer.weight.grad, gradient.flatten(0, 1).T @ x.detach().flatten(0, 1))
    layer.backward_dw()  # has nothing left to do


def test_weights_are_drawn_in_fp32_from_the_cpus_generator() -> None:
    torch.manual_seed(3)
    drawn = torch.nn.init.normal_(torch.empty(3, 6))
    torch.manual_seed(3)
    layer = projection(bias=True, params_dtype=torch.bfloat16)
    assert torch.equal(layer.weight, drawn.bfloat16())
    assert torch.equal(layer.bias, torch.zeros(3, dtype=torch.bfloat16))


def test_nothing_is_drawn_for_weights_that_are_loaded() -> None:
    def fail(_: torch.Tensor) -> None:
        raise AssertionError("drawn")

    assert projection(init=fail, perform_initialization=False).weight.shape == (3, 6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_is_told_how_gradients_are_summed(sequence_parallel: bool) -> None:
    layer = projection(bias=True, sequence_parallel=sequence_parallel)
    for parameter in layer.parameters():
        marks = vars(parameter)
        assert marks == {"allreduce": True, "sequence_parallel": sequence_parallel}  # and not as cut by TP
