"""A model without the layers that vLLM wraps around others for adapters (``--enable-lora``).

A wrapper computes with the weights of the layer inside, and adds the factors of adapters, which it keeps separately. So
new weights reach everything that serves. But weight loaders look for the inner layer under the wrapper's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from megatron_patches.refit.errors import UnsupportedEngineError

_WRAPPERS = (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)


@contextmanager
def without_adapter_layers(model: nn.Module) -> Iterator[None]:
    """Replaces wrappers with the layers inside, until the context ends. Nothing may compute meanwhile.

    Raises:
        UnsupportedEngineError: naming a layer whose wrapper may keep something of its weights.
    """
    places: list[tuple[dict[str, Any], str, Any]] = []
    for path, parent in model.named_modules():
        for name, layer in parent._modules.items():
            if not isinstance(layer, BaseLayerWithLoRA):
                continue
            if not isinstance(layer, _WRAPPERS) or getattr(layer, "embeddings_weights", None) is not None:
                raise UnsupportedEngineError(
                    f"{path}.{name} is wrapped for adapters ({type(layer).__name__}) in a way that new weights may not "
                    "reach; start the engine without --enable-lora"
                )
            places.append((parent._modules, name, layer))
    for modules, name, layer in places:
        modules[name] = layer.base_layer
    try:
        yield
    finally:
        for modules, name, layer in places:
            modules[name] = layer
