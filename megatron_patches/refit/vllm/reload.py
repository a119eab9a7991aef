"""Puts a vLLM model into the form that its weight loaders expect, and replaces its weights.

New weights take effect in two steps. :meth:`Replacement.build` runs vLLM's own processing on staged weights, beside
the serving model; it may fail, and changes nothing. :meth:`Replacement.apply` swaps them with the old ones, in the
memory that captured graphs refer to, and can be undone. :meth:`Replacement.replace` does both at once, for callers that
have the old weights elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from megatron_patches.refit.errors import TransferError, UnsupportedEngineError
from megatron_patches.refit.vllm.kv_scales import follow_scales
from megatron_patches.refit.vllm.layers import Layer, Layers, check_form, join
from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.releases.release import tensors_of
from megatron_patches.refit.vllm.swap import Pair, Swap, Users, same_memory

logger = logging.getLogger(__name__)

Named = dict[str, torch.Tensor]

_WRAPPERS = (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)


@contextmanager
def loader_form(model: nn.Module) -> Iterator[Named]:
    """Puts a model into the form that its weight loaders know, on the meta device, and restores it at the end.

    Yields:
        Every parameter and buffer, by module path and attribute.
    """
    with installed_release().loader_form(model):
        yield {
            join(path, name): found
            for path, layer in model.named_modules()
            for name, found in tensors_of(layer).items()
        }


@contextmanager
def without_adapter_layers(model: nn.Module) -> Iterator[None]:
    """Replaces vLLM's wrappers for adapters (``--enable-lora``) with the layers inside, until the context ends.

    A wrapper computes with the weights of the layer inside, and adds the factors of adapters, which it keeps
    separately. So new weights reach everything that serves. But weight loaders look for the inner layer under the
    wrapper's name. Nothing may compute meanwhile.

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


class Replacement:
    """New weights for a model.

    Args:
        model: the serving model.
        vllm_config: its configuration.
        staged: flat memory of every loaded tensor, in loader form, by module path and attribute. The caller must not
            use it afterwards. It may be serving memory from :meth:`Layers.in_loader_form`.
        layers: the model's layers as known from earlier replacements; None to examine them again.
        is_alone: whether no other worker could fail once this one has succeeded, so that :meth:`undo` would only follow
            an error of :meth:`apply`. Old weights are then overwritten if nothing in :meth:`apply` computes.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        staged: Mapping[str, torch.Tensor],
        layers: Layers | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self._model, self._config, self._staged = model, vllm_config, dict(staged)
        self._layers = layers or Layers(model)
        self._left: Sequence[tuple[Layer, Sequence[str]]] | None = None  # layers that must still be processed
        self._plain: list[Pair] = []  # of weights that need no processing
        self._users = Users()  # of the memory of the others
        self._keeps_old = not is_alone or self._layers.has_derived
        self._swap: Swap | None = None

    def begin(self) -> None:
        """The part of :meth:`build` that disturbs no request: layers whose weights need no processing.

        Raises:
            TransferError: as :meth:`build`.
        """
        self._layers.check_views()
        found = self._layers.as_loaded(self._staged)
        for name, serving in found.memory.items():
            check_form(name, self._staged[name], serving)
            self._plain.append((serving, self._staged[name]))
        self._users = Users(tensor for layer, names in found.processed for tensor in self._of(layer, names).values())
        self._left = found.processed
        if not self._left:
            self._make_swap([])

    def build(self) -> None:
        """Processes the staged weights layer by layer, as vLLM does after loading.

        Raises:
            TransferError: if a layer cannot be assembled from what was staged, or a buffer would become stale.
        """
        if self._left is None:
            self.begin()
        left, self._left = self._left, []
        if left:
            logger.info("refit: vLLM processes the weights of %d layers while the engine waits", len(left))
            self._users.settle()  # the receiver of the weights may have had views of them when begin() ran
        pairs: list[Pair] = []
        with torch.no_grad(), set_current_vllm_config(self._config):
            for layer, names in left or ():
                pairs += layer.process(self._of(layer, names))
        if self._swap is None:
            self._make_swap(pairs)

    def apply(self) -> None:
        """Swaps the new weights with the old ones and refreshes what depends on them.

        The old ones are kept until :meth:`forget`, unless ``is_alone`` says otherwise. After an error, call
        :meth:`undo`.

        Raises:
            TransferError: before :meth:`build` has succeeded.
        """
        if self._swap is None:
            raise TransferError("nothing was built")
        with torch.no_grad(), set_current_vllm_config(self._config):
            self._swap.run(keeps_old=self._keeps_old)
        refresh_attention(self._model, self._config)
        # Errors on a GPU must be known before the workers agree that there are none.
        self._await_devices()

    def undo(self) -> None:
        """Restores what :meth:`apply` has replaced so far.

        Raises:
            TransferError: if it was overwritten.
        """
        if self._swap is not None:
            with torch.no_grad():
                self._swap.undo()
        refresh_attention(self._model, self._config)
        # The tensors read here may belong to another thread's stream, which may reuse their memory once they are freed.
        self._await_devices()
        self.forget()

    def forget(self) -> None:
        """Frees the old weights."""
        self._swap, self._staged, self._users, self._plain = None, {}, Users(), []

    def replace(self) -> None:
        """Builds and applies layer by layer, with memory for one layer. Keeps none of the old weights.

        Raises:
            TransferError: as :meth:`build`; the model is then a mixture.
        """
        self._layers.check_views()
        found = self._layers.as_loaded(self._staged)
        for name, serving in found.memory.items():
            new = self._staged.pop(name)
            check_form(name, new, serving)
            if not same_memory(serving, new):
                serving.copy_(new)
        with torch.no_grad(), set_current_vllm_config(self._config):
            for layer, names in found.processed:
                for target, new in layer.process(self._of(layer, names)):
                    if not same_memory(target, new):
                        target.copy_(new)
                for name in names:
                    del self._staged[join(layer.path, name)]
        refresh_attention(self._model, self._config)

    def _await_devices(self) -> None:
        for device in {tensor.device for tensor in self._staged.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _make_swap(self, processed: Sequence[Pair]) -> None:
        with torch.no_grad():
            self._swap = Swap(processed, self._users, plain=self._plain)
        if self._swap.copied_bytes:
            logger.info(
                "refit: %d bytes are copied aside, as more than these weights use them", self._swap.copied_bytes
            )

    def _of(self, layer: Layer, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The staged tensors of a layer, by attribute."""
        return {name: self._staged[join(layer.path, name)] for name in names}


def refresh_attention(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Recomputes what attention derives from other layers' weights, such as MLA's absorbed projections, and scales."""
    vllm = installed_release()
    with torch.no_grad(), set_current_vllm_config(vllm_config):
        for layer in model.modules():
            if vllm.derives(layer):
                cast(Any, layer).process_weights_after_loading(vllm_config.model_config.dtype)
        follow_scales(model)
