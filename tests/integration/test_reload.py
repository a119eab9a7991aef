"""How new weights are put into a vLLM model, and what is checked before, on models of one layer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_patches.refit.errors import TransferError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(120),
]


class Mixer(nn.Module):
    """A weight in a layer within, and a view of it, as Mamba's mixer has its convolution."""

    conv_weights: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Linear(4, 6, bias=False)
        self.register_buffer("conv_weights", self.conv1d.weight.view(24), persistent=False)


class Model(nn.Module):
    """A mixer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()


def build(model: Model) -> torch.Tensor:
    """Replaces the weight with twos; what the buffer then holds."""
    from vllm.config import VllmConfig

    from megatron_patches.refit.vllm.reload import Replacement

    replacement = Replacement(model, VllmConfig(), {"mixer.conv1d.weight": torch.full((24,), 2.0)})
    replacement.build()
    replacement.apply()
    return model.mixer.conv_weights


def recorded() -> Model:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    return model


def test_a_view_of_a_weight_follows_it() -> None:
    assert torch.equal(build(recorded()), torch.full((24,), 2.0))


def test_a_view_that_has_become_a_copy_is_refused_and_the_model_stays_as_it_was() -> None:
    model = recorded()
    weight, before = model.mixer.conv1d.weight, model.mixer.conv1d.weight.detach().clone()
    model.mixer.conv_weights = model.mixer.conv_weights.detach().clone()  # as packing for a kernel would
    with pytest.raises(TransferError, match=r"mixer\.conv_weights was a view of a weight when the model was built"):
        build(model)
    assert model.mixer.conv1d.weight is weight
    assert torch.equal(weight, before)
    assert torch.equal(model.mixer.conv_weights, before.view(24))


def nothing(layer: Any) -> None:
    """A method for GPUs that serves from what was loaded."""


def copied_onto_itself(layer: Any) -> None:
    """As vLLM's experts do, so that their memory stays where it is."""
    layer.weight.data = layer.weight.data
    layer.weight.copy_(layer.weight.contiguous().data)


def copied_onto_its_transpose(layer: Any) -> None:
    layer.weight.data[:4].copy_(layer.weight.data[:4].t().clone())


def remembered_as_data(layer: Any) -> None:
    layer.quant_method.kernels.append(layer.weight.data)


def doubled_in_place(layer: Any) -> None:
    layer.weight.data.mul_(2)


def doubled_elsewhere(layer: Any) -> None:
    layer.weight.data = layer.weight.data * 2


def doubled_by_a_new_parameter(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data * 2, requires_grad=False)


def a_new_parameter_for_the_same_memory(layer: Any) -> None:
    """As vLLM's kernels for block FP8 do."""
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


def a_new_parameter_beside_the_old_one(layer: Any) -> None:
    layer.quant_method.kernels.append(layer.weight)
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


def remembered_in_a_list(layer: Any) -> None:
    layer.quant_method.kernels.append(layer.weight)


def a_new_kernel_for_experts(layer: Any) -> None:
    """As vLLM's quantized experts do."""
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    layer.quant_method.moe_quant_config = SimpleNamespace(w1_scale=layer.weight)
    layer.quant_method.moe_kernel = SimpleNamespace(config=layer.quant_method.moe_quant_config)


def remembered_by_the_layer(layer: Any) -> None:
    layer.scale = float(layer.weight.shape[0])


def remembered_by_the_method(layer: Any) -> None:
    layer.quant_method.seen = layer.weight


def remembered_beside_the_weights(layer: Any) -> None:
    """As Marlin's kernels keep their workspace, to which captured graphs refer."""
    layer.sums = layer.weight.data.sum(1)


def layer_with(process: Callable[[Any], None]) -> nn.Module:
    """A linear layer whose method does ``process`` to what was loaded, serving zeros."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    calls: list[int] = []

    class Method(QuantizeMethodBase):
        def __init__(self) -> None:
            self.kernels: list[torch.Tensor] = []

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

        def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            calls.append(1)
            process(layer)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)
            self.inner.requires_grad_(False)
            self.inner.quant_method = Method()
            self.calls = calls

    model = Outer()
    record_metadata_for_reloading(model)
    for parameter in model.parameters():
        parameter.zero_()
    if process in (a_new_kernel_for_experts, remembered_beside_the_weights):
        process(model.inner)  # when the model is loaded
    return model


def replaced(model: Any, value: float, layers: Any, *, in_place: bool) -> Any:
    """Replaces the weight by ``value``; the replacement, applied."""
    from vllm.config import VllmConfig

    from megatron_patches.refit.vllm.reload import Replacement

    staged = {"inner.weight": torch.full((24,), value), "inner.bias": torch.full((6,), value)}
    if in_place:
        serving = layers.in_loader_form(staged)
        assert {name: len(memory) for name, memory in serving.items()} == {"inner.weight": 24, "inner.bias": 6}
        for name, memory in serving.items():
            memory.copy_(staged[name])
        staged = serving
    replacement = Replacement(model, VllmConfig(), staged, layers)
    if in_place:
        replacement.replace()
        return replacement
    before = model.inner.weight.clone()
    parameters = dict(model.named_parameters())
    replacement.begin()  # while it serves
    assert dict(model.named_parameters()) == parameters
    sums = vars(model.inner).get("sums")
    replacement.build()
    assert torch.equal(model.inner.weight, before)
    assert vars(model.inner).get("sums") is sums
    assert sums is None or torch.equal(sums, before.sum(1))
    replacement.apply()
    return replacement


@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in_place"])
@pytest.mark.parametrize(
    ("process", "factor", "is_watched_once"),
    [
        (nothing, 1, True),
        (copied_onto_itself, 1, True),
        (copied_onto_its_transpose, 1, False),
        (doubled_in_place, 2, False),
        (doubled_elsewhere, 2, False),
        (doubled_by_a_new_parameter, 2, False),
        (a_new_parameter_for_the_same_memory, 1, True),
        (a_new_parameter_beside_the_old_one, 1, False),
        (a_new_kernel_for_experts, 1, True),
        (remembered_as_data, 1, False),
        (remembered_in_a_list, 1, False),
        (remembered_by_the_layer, 1, False),
        (remembered_by_the_method, 1, False),
        (remembered_beside_the_weights, 1, False),
    ],
)
def test_processing_is_left_out_only_where_it_does_nothing(
    process: Callable[[Any], None], factor: int, is_watched_once: bool, in_place: bool
) -> None:
    from megatron_patches.refit.vllm.layers import Layers

    model: Any = layer_with(process)
    layers = Layers(model)
    weight, place = model.inner.weight, model.inner.weight.data_ptr()
    kernel, sums = vars(model.inner.quant_method).get("moe_kernel"), vars(model.inner).get("sums")
    for value in (3.0, 5.0, 7.0):
        replacement = replaced(model, value, layers, in_place=in_place)
        assert torch.equal(weight, torch.full((6, 4), factor * value))
        assert torch.equal(model.inner.bias, torch.full((6,), value))
        assert model.inner.weight is weight
        assert weight.data_ptr() == place
        assert vars(model.inner.quant_method).get("moe_kernel") is kernel
        assert vars(model.inner).get("sums") is sums
        assert sums is None or torch.equal(sums, weight.sum(1))
        if not in_place:
            replacement.undo()
            assert not weight.any()
            assert not model.inner.bias.any()
            assert sums is None or not sums.any()
    backed_up = [tensor.data_ptr() for tensor in layers.serving(["inner.weight"])]
    assert sums is None or sums.data_ptr() in backed_up
    assert len(model.calls) == (1 if is_watched_once else 3)


@pytest.mark.parametrize("is_alone", [False, True])
def test_only_a_lone_worker_may_overwrite_old_weights(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    from megatron_patches.refit.vllm.reload import Replacement
    from megatron_patches.refit.vllm.swap import Swap

    kept: list[bool] = []
    run = Swap.run

    def watched(swap: Swap, *, keeps_old: bool) -> None:
        kept.append(keeps_old)
        run(swap, keeps_old=keeps_old)

    monkeypatch.setattr(Swap, "run", watched)
    model = recorded()
    staged = {"mixer.conv1d.weight": torch.full((24,), 2.0)}
    replacement = Replacement(model, VllmConfig(), staged, is_alone=is_alone)
    replacement.build()
    replacement.apply()
    assert torch.equal(model.mixer.conv1d.weight, torch.full((6, 4), 2.0))
    assert kept == [not is_alone]


def test_a_lone_worker_gets_its_old_weights_back_where_what_attention_derives_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import VllmConfig

    from megatron_patches.refit.vllm.releases import installed_release
    from megatron_patches.refit.vllm.reload import Replacement

    model: Any = recorded()
    before = model.mixer.conv1d.weight.detach().clone()
    calls: list[torch.Tensor] = []

    def derived(dtype: torch.dtype) -> None:
        calls.append(model.mixer.conv1d.weight.detach().clone())
        if len(calls) == 1:
            raise RuntimeError("no kernel")

    model.mixer.process_weights_after_loading = derived
    monkeypatch.setattr(installed_release(), "derives", lambda layer: layer is model.mixer)
    staged = {"mixer.conv1d.weight": torch.full((24,), 2.0)}
    replacement = Replacement(model, VllmConfig(), staged, is_alone=True)
    assert replacement._keeps_old
    monkeypatch.setattr(replacement._config, "model_config", SimpleNamespace(dtype=torch.float32))
    replacement.build()
    with pytest.raises(RuntimeError, match="no kernel"):
        replacement.apply()
    replacement.undo()
    assert [bool((weight == 2).all()) for weight in calls] == [True, False]
    assert torch.equal(model.mixer.conv1d.weight, before)


def test_weights_are_looked_up_anew_once_they_have_moved() -> None:
    """A parameter that something else replaced between two versions."""
    from megatron_patches.refit.vllm.layers import Layers

    model: Any = layer_with(nothing)
    layers = Layers(model)
    replaced(model, 3.0, layers, in_place=False)  # now the layer is known to be plain
    replaced(model, 4.0, layers, in_place=False).forget()
    names = ["inner.weight", "inner.bias"]
    found = layers.as_loaded(names)
    assert found is layers.as_loaded(names)
    assert (list(found.memory), found.processed) == (names, [])
    old = model.inner.weight
    model.inner.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
    replaced(model, 5.0, layers, in_place=False)
    assert torch.equal(model.inner.weight, torch.full((6, 4), 5.0))
    assert torch.equal(old, torch.full((6, 4), 4.0))
    assert list(layers.as_loaded(["inner.bias"]).memory) == ["inner.bias"]


def test_a_layer_is_watched_anew_where_its_weights_no_longer_lie_as_loaders_know_them() -> None:
    from megatron_patches.refit.vllm.layers import Layers

    model: Any = Model()
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    model.mixer.conv1d.weight.data = torch.zeros(4, 6).t()
    model.mixer.conv_weights = model.mixer.conv1d.weight.data
    assert Layers(model).in_loader_form(["mixer.conv1d.weight"]) == {}
    build(model)
    assert torch.equal(model.mixer.conv1d.weight, torch.full((6, 4), 2.0))
    assert model.mixer.conv1d.weight.stride() == (1, 6)
