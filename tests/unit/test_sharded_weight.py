"""A Megatron shard's own operations on a group of one rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etp.config import EtpConfig
from etp.group import WeightGroup
from etp.runtime import EtpRuntime
from etp.te import refuse_unsupported_te
from megatron_patches.arguments import MegatronEtpConfig
from megatron_patches.sharded_weight import EmbeddingWeight, MegatronShardedParam
from megatron_patches.weight_shard_api import WeightShardApi
from tests.support.fake_group import fake_group


@pytest.mark.parametrize(
    "hooks",
    [
        nullcontext(),
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.detach),
    ],
    ids=["none", "offloaded", "copied"],
)
def test_an_embeddings_gradient_survives_hooks_on_saved_tensors(
    world: dist.ProcessGroup, hooks: AbstractContextManager[None]
) -> None:
    table = torch.randn(10, 3, requires_grad=True)
    runtime = EtpRuntime()
    shard = MegatronShardedParam.from_full(table, world)
    shard.attach(runtime, "embedding.weight")
    runtime.add(WeightGroup([shard], world))
    tokens, upstream = torch.tensor([[1, 9], [1, 4]]), torch.randn(2, 2, 3)
    with hooks:
        rows = EmbeddingWeight.apply(shard)[tokens]
    rows.backward(upstream)
    expected = table[tokens]
    assert torch.equal(rows, expected)
    expected.backward(upstream)
    assert shard.grad is not None
    assert torch.equal(shard.grad[:10], table.grad)
    assert not shard.grad[10:].any()


class _Linear(torch.autograd.Function):
    """Gathers and reduces as ``LinearWithGradAccumulationAndAsyncCommunication`` of Megatron does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: Any) -> torch.Tensor:
        ctx.saved = x, shard
        return torch.nn.functional.linear(x, shard.all_gather_and_prefetch(fwd=True))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, Any]:
        x, shard = ctx.saved
        return None, shard.wgrad_reduce_scatter(grad.t().mm(x))


@pytest.mark.parametrize("kind", ["embedding", "linear"])
def test_gradients_that_autograd_returns_are_those_of_the_whole_weight(world: dist.ProcessGroup, kind: str) -> None:
    weight, x, tokens = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4), torch.tensor([5, 0, 5])
    shard: Any = MegatronShardedParam.from_full(weight, world, 4)
    shard.attach(runtime := EtpRuntime(), "weight")
    runtime.add(WeightGroup([shard], world))
    out = _Linear.apply(x, shard) if kind == "linear" else EmbeddingWeight.apply(shard)[tokens]
    expected = torch.nn.functional.linear(x, weight) if kind == "linear" else weight[tokens]
    upstream = torch.randn(expected.shape)
    (found,) = torch.autograd.grad(out, [shard], upstream)
    assert torch.equal(found[:6], *torch.autograd.grad(expected, [weight], upstream))
    assert tuple(found.shape) == (8, 4)
    assert not found[6:].any()
    assert shard.grad is None


def test_the_gradient_of_a_penalty_reaches_main_grad(world: dist.ProcessGroup) -> None:
    """Megatron's hook drops what autograd leaves in grad, as part of what is in main_grad already."""
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4)
    shard: Any = MegatronShardedParam.from_full(weight, world, 1)
    shard.attach(runtime := EtpRuntime(), "weight")
    runtime.add(WeightGroup([shard], world))
    shard.main_grad, shard.grad_added_to_main_grad = torch.zeros(6, 4), False
    seen = []

    def drop(*_: object) -> None:
        assert shard.grad_added_to_main_grad
        shard.grad = None
        seen.append(shard.main_grad.clone())

    shard.register_grad_accum_hook(None, drop)
    for each in (weight, shard):
        for _ in range(2):
            (torch.nn.functional.linear(x, each).square().sum() + each.square().sum()).backward()
    torch.testing.assert_close(shard.main_grad, weight.grad)
    assert torch.equal(seen[-1], shard.main_grad)


class _Fused(torch.autograd.Function):
    """As Transformer Engine, writes the gradient into a buffer of the shard's and brings autograd any memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: Any, fails: bool) -> torch.Tensor:
        ctx.saved = x, shard, fails
        return torch.nn.functional.linear(x, shard.materialize_group_for_forward()[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        x, shard, fails = ctx.saved
        buffer = shard.grad_buffer()
        if fails:
            raise ArithmeticError
        shard.finalize_group_grads(torch.mm(grad.t(), x, out=buffer))
        return None, torch.full((6, 4), float("nan")), None


def test_what_transformer_engine_returns_for_a_fused_accumulation_reaches_no_main_grad(
    world: dist.ProcessGroup,
) -> None:
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4)
    shard: Any = MegatronShardedParam.from_full(weight, world, 1)
    shard.attach(runtime := EtpRuntime(), "weight")
    runtime.add(WeightGroup([shard], world))
    shard.main_grad = torch.zeros(6, 4)
    for step in range(2):
        _Fused.apply(x, shard, False).square().sum().backward()
        torch.nn.functional.linear(x, weight).square().sum().backward()
        torch.testing.assert_close(shard.main_grad, weight.grad, msg=f"step {step}")
        shard.grad = None


def test_a_penalty_counts_after_a_fused_accumulation_that_failed(world: dist.ProcessGroup) -> None:
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4)
    shard: Any = MegatronShardedParam.from_full(weight, world, 1)
    shard.attach(runtime := EtpRuntime(), "weight")
    runtime.add(WeightGroup([shard], world))
    shard.main_grad = torch.zeros(6, 4)
    with pytest.raises(ArithmeticError):
        _Fused.apply(x, shard, True).sum().backward()
    for each in (weight, shard):
        (torch.nn.functional.linear(x, each).square().sum() + each.square().sum()).backward()
    torch.testing.assert_close(shard.main_grad, weight.grad)


def test_a_layer_that_delays_its_weight_gradients_is_refused() -> None:
    """They would be reduced before they are computed, whatever asked for the delay."""

    class Delaying:
        def delay_wgrad_compute(self) -> bool:
            return True

    grouped = type("GroupedLinear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.grouped"})
    layer = grouped()
    layer.weight0 = torch.nn.Parameter(torch.randn(8, 4))
    layer.wgrad_store = Delaying()
    with (
        fake_group(0, 2) as group,
        pytest.raises(ValueError, match="GroupedLinear: delay_wgrad_compute computes gradients after"),
    ):
        WeightShardApi(MegatronEtpConfig()).wrap_module(layer, ["weight0"], group, is_grouped=True)
    assert layer.weight0.shape == (8, 4)


def test_a_quantized_weight_is_refused() -> None:
    """Its shards would be of the dtype that it was quantized from."""
    origin = {"__module__": "transformer_engine.pytorch.quantized_tensor"}
    layer = torch.nn.Linear(4, 8)
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(type("QuantizedTensor", (torch.Tensor,), origin)))
    with (
        fake_group(0, 2) as group,
        pytest.raises(ValueError, match=r"^Linear\.weight is a QuantizedTensor, and its shards would be"),
    ):
        WeightShardApi(MegatronEtpConfig()).wrap_module(layer, ["weight"], group)
    assert layer.weight.shape == (8, 4)


LINEAR = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
"""For the engine, a layer of Transformer Engine's."""


@pytest.mark.parametrize(
    ("recipe", "multiple"),
    [
        ({"fp8": True, "fp8_recipe": "tensorwise"}, 8),
        ({"fp8": True, "fp8_recipe": "blockwise"}, 128),
        ({"fp8": True, "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": True}, 16),
    ],
)
def test_shards_that_cannot_be_quantized_are_refused_where_padding_is_forbidden(
    recipe: dict[str, Any], multiple: int
) -> None:
    api = WeightShardApi(MegatronEtpConfig(engine=EtpConfig(pad_for_alignment=0)))
    with fake_group(0, 2) as group:
        api.configure_from_recipe(**recipe)
        layer = LINEAR(16, 2 * multiple + 8)
        with pytest.raises(ValueError, match=rf"^Linear\.weight is cut .* {multiple + 4} rows.*-alignment {multiple}$"):
            api.wrap_module(layer, ["weight"], group)
        assert len(layer.weight) == 2 * multiple + 8
        # Others divide, or are no layers of Transformer Engine's, which alone quantizes.
        api.wrap_module(LINEAR(16, 2 * multiple), ["weight"], group)
        api.wrap_module(torch.nn.Linear(16, 6), ["weight"], group)
        api.configure_from_recipe()
        api.wrap_module(layer, ["weight"], group)
        assert len(layer.weight) == multiple + 4


@pytest.mark.parametrize(("recipe", "rows"), [({}, 4), ({"fp8": True, "fp8_recipe": "tensorwise"}, 8)])
def test_shards_are_aligned_as_a_recipe_needs_them(recipe: dict[str, Any], rows: int) -> None:
    api = WeightShardApi(MegatronEtpConfig(engine=EtpConfig(pad_for_alignment=4)))
    with fake_group(0, 2) as group:
        api.configure_from_recipe(**recipe)
        assert api.shard_rows(8, group) == (rows, 2 * rows - 8)


@pytest.mark.parametrize(
    ("attributes", "variables", "culprit"),
    [
        ({"use_grouped_tensor": True}, {}, "experts: with use_grouped_tensor=True its experts would silently"),
        ({}, {"NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": "1"}, "and without NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED"),
        ({}, {"NVTE_BACKWARD_OVERRIDE": "high_precision"}, "experts: NVTE_BACKWARD_OVERRIDE=high_precision"),
        ({"use_grouped_tensor": False}, {"NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": "1"}, ""),
        ({}, {"NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": "0", "NVTE_BACKWARD_OVERRIDE": "dequantized"}, ""),
    ],
)
def test_experts_that_would_not_train_are_refused(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[str, bool], variables: dict[str, str], culprit: str
) -> None:
    layer = type("GroupedLinear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.grouped"})()
    vars(layer).update(attributes)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    if not culprit:
        refuse_unsupported_te("experts", layer)
        return
    with pytest.raises(ValueError, match=culprit):
        refuse_unsupported_te("experts", layer)
