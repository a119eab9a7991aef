"""A model that is taken to the form of its weight loaders is afterwards as it was, wherever that ended."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.model_executor.model_loader.reload import layerwise

from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.reload import loader_form


class Model(nn.Module):
    """Three layers, one with a buffer that checkpoints leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.second.register_buffer("scale", torch.ones(2), persistent=False)
        layerwise.record_metadata_for_reloading(self)

    def held(self) -> dict[str, int]:
        """The very tensors, by name."""
        return {name: id(tensor) for name, tensor in [*self.named_parameters(), *self.named_buffers()]}


def test_within_weights_have_no_memory_and_afterwards_they_are_back() -> None:
    """All but biases, which some releases leave where they are."""
    model = Model()
    before, state = model.held(), set(model.state_dict())
    with loader_form(model) as tensors:
        assert set(tensors) == set(before)
        kept = {name for name, tensor in tensors.items() if not tensor.is_meta}
        assert kept == {name for name in before if name.endswith("bias") and installed_release().keeps(model, "bias")}
        assert all(id(tensors[name]) == before[name] for name in kept)
    assert model.held() == before
    assert set(model.state_dict()) == state


@pytest.mark.parametrize("where", ["restore_layer_on_meta", "initialize_online_processing"])
@pytest.mark.parametrize("number", range(4))
def test_a_failure_half_way_leaves_the_weights_that_serve(
    where: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layers = Model(), []
    before = model.held()
    original = getattr(layerwise, where)

    def fail(layer: nn.Module, *rest: object) -> None:
        layers.append(layer)
        original(layer, *rest)
        if len(layers) > number:
            raise MemoryError("half way")

    monkeypatch.setattr(layerwise, where, fail)
    with pytest.raises(MemoryError, match="half way"), loader_form(model):
        pass
    monkeypatch.undo()
    assert model.held() == before
    with loader_form(model) as tensors:
        assert len(tensors) == len(before)
    assert model.held() == before
