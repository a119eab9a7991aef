"""Weight loaders see a model as it was before vLLM wrapped its layers for adapters, and nobody else does."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from megatron_patches.refit.errors import UnsupportedEngineError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.lora.layers import FusedMoEWithLoRA, RowParallelLinearWithLoRA, VocabParallelEmbeddingWithLoRA

from megatron_patches.refit.vllm.reload import without_adapter_layers


def wrapped(kind: type[nn.Module], layer: nn.Module, **attributes: Any) -> Any:
    """One of vLLM's wrappers, without what it computes with."""
    wrapper: Any = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper.base_layer = layer
    for name, value in attributes.items():
        setattr(wrapper, name, value)
    return wrapper


class Model(nn.Module):
    """Two layers, one of them under two names, and one that is not wrapped."""

    def __init__(self, embeddings: torch.Tensor | None = None) -> None:
        super().__init__()
        self.embed = wrapped(VocabParallelEmbeddingWithLoRA, nn.Embedding(3, 2), embeddings_weights=embeddings)
        self.block = nn.Module()
        self.block.linear = wrapped(RowParallelLinearWithLoRA, nn.Linear(2, 2))
        self.block.alias = self.block.linear
        self.norm = nn.LayerNorm(2)


def test_layers_have_their_names_and_get_their_wrappers_back() -> None:
    model = Model()
    before = dict(model.named_modules(remove_duplicate=False))
    with without_adapter_layers(model):
        assert model.block.linear is model.block.alias is before["block.linear"].base_layer
        assert set(dict(model.named_parameters())) == {
            *("embed.weight", "block.linear.weight", "block.linear.bias", "norm.weight", "norm.bias")
        }
    after = dict(model.named_modules(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(layer is after[path] for path, layer in before.items())


def test_a_wrapper_that_keeps_something_of_the_weights_is_refused() -> None:
    model = Model()
    model.block.experts = wrapped(FusedMoEWithLoRA, nn.Linear(2, 2))
    message = r"block.experts is wrapped for adapters \(FusedMoEWithLoRA\).*without --enable-lora"
    with pytest.raises(UnsupportedEngineError, match=message), without_adapter_layers(model):
        pytest.fail("it is unwrapped")
    assert isinstance(model.embed, VocabParallelEmbeddingWithLoRA)
    with (
        pytest.raises(UnsupportedEngineError, match="VocabParallelEmbeddingWithLoRA"),
        without_adapter_layers(Model(torch.ones(1))),
    ):
        pytest.fail("it is unwrapped")
