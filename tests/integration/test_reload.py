"""What is checked before new weights are put into a vLLM model, on models of one layer."""

from __future__ import annotations

import importlib.util

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
