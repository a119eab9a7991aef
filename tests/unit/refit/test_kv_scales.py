"""Scales of KV caches travel as numbers in fp32; what cannot be a scale is refused by its layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron_patches.refit.control.kv_scales import KVScales, is_kv_scale, scale_values, split_scale_name
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.source.kv_scale_source import KVScaleSource
from megatron_patches.refit.source.modules import ModuleSource

ONE = KVScales(k_scale=0.5, v_scale=0.25)


def test_each_scale_is_a_number_in_fp32_with_a_name_of_its_own() -> None:
    given: dict[int | str, KVScales] = {
        3: KVScales(k_scale=0.1, v_scale=2, q_scale=0.5),
        "model.layers.0.self_attn": ONE,
    }
    values = scale_values(given)
    assert {split_scale_name(name): value for name, value in values.items()} == {
        ("3", "k_scale"): torch.tensor(0.1).item(),
        ("3", "v_scale"): 2.0,
        ("3", "q_scale"): 0.5,
        ("model.layers.0.self_attn", "k_scale"): 0.5,
        ("model.layers.0.self_attn", "v_scale"): 0.25,
    }
    assert all(is_kv_scale(name) for name in values)
    assert not is_kv_scale("model.layers.0.self_attn.k_scale")


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, 1e-60, 1e60, None, "1"])
def test_a_scale_that_is_not_positive_and_finite_is_refused(value: Any) -> None:
    with pytest.raises(RefitError, match=r"kv_scales: k_scale of layer 2 is .*; it must be positive and finite"):
        scale_values({1: ONE, 2: KVScales(k_scale=value, v_scale=1.0)})


@pytest.mark.parametrize("layer", [-1, "", "layers/0", True])
def test_what_names_no_layer_is_refused(layer: Any) -> None:
    with pytest.raises(RefitError, match=r"kv_scales: .* is neither the number nor the name of an attention layer"):
        scale_values({layer: ONE})


def test_a_layer_that_is_given_twice_is_refused() -> None:
    with pytest.raises(RefitError, match="kv_scales: layer 1 is given twice, as a number and as a text; give it once"):
        scale_values({1: ONE, "1": KVScales(k_scale=2.0, v_scale=4.0)})


def test_no_scales_at_all_are_refused() -> None:
    with pytest.raises(RefitError, match="kv_scales is empty"):
        scale_values({})


def test_the_order_in_which_layers_are_given_does_not_matter() -> None:
    """A push with the same layers in another order finds memory that is laid out for the first order."""
    other = KVScales(k_scale=2.0, v_scale=4.0)
    source = KVScaleSource(ModuleSource(nn.Linear(2, 2), {}))
    source.values = scale_values({0: ONE, 1: other})
    views = {one.box.tensor: one.view for one in source.describe(0).manifest.placements if is_kv_scale(one.box.tensor)}
    orders: list[dict[int | str, KVScales]] = [{0: ONE, 1: other}, {1: ONE, 0: other}, {1: other, 0: ONE}]
    for given in orders:
        source.values = scale_values(given)
        source.settle()
        memory = source.look_up()["kv_scales"]
        assert {name: view.tensor(memory).item() for name, view in views.items()} == source.values
