"""Converts a vLLM model to the form that its weight loaders expect, and new weights from there into the running model.

New weights take effect in two halves. :meth:`Replacement.build` runs vLLM's own processing on staged weights, beside
the model that serves; it may fail, and changes nothing. :meth:`Replacement.apply` lets them and the old ones change
places, in the memory that captured graphs refer to, and can be undone. :meth:`Replacement.replace` does both at once,
for whoever has the old weights elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.vllm.layers import Layer, Layers, join
from megatron_patches.refit.vllm.releases import installed
from megatron_patches.refit.vllm.releases.release import tensors_of
from megatron_patches.refit.vllm.swap import Pair, Swap, Users, same_memory

logger = logging.getLogger(__name__)

Named = dict[str, torch.Tensor]


@contextmanager
def loader_form(model: nn.Module) -> Iterator[Named]:
    """The model as its weight loaders know it, on the meta device; as it was before, afterwards.

    Yields:
        Every parameter and buffer, by module path and attribute.
    """
    with installed().loader_form(model):
        yield {
            join(path, name): found
            for path, layer in model.named_modules()
            for name, found in tensors_of(layer).items()
        }


class Replacement:
    """New weights for a model.

    Args:
        model: the model that serves.
        vllm_config: its configuration.
        staged: flat memory of every tensor that was loaded, in loader form, by module path and attribute. Nobody may
            use it afterwards. It may be the memory that serves, as :meth:`Layers.in_loader_form` gives it.
        layers: what is known of the model's layers from earlier replacements; found out anew without.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        staged: Mapping[str, torch.Tensor],
        layers: Layers | None = None,
    ) -> None:
        self._model, self._config, self._staged = model, vllm_config, dict(staged)
        self._layers = layers or Layers(model)
        self._users = Users(self._staged.values())
        self._pairs: list[Pair] = []
        self._left: Sequence[tuple[Layer, Sequence[str]]] | None = None  # layers that must be processed
        self._swap: Swap | None = None

    def begin(self) -> None:
        """As much of :meth:`build` as disturbs no request: the layers whose weights are taken as they are.

        Raises:
            TransferError: as :meth:`build`.
        """
        self._layers.check_views()
        left = []
        for layer, names in self._layers.of(self._staged):
            plain = self._plain_tensors(layer, names)
            if plain is None:
                left.append((layer, names))
            else:
                self._pairs += plain
        self._left = left
        if not left:
            self._make_swap()

    def build(self) -> None:
        """Processes the staged weights layer by layer, as vLLM does after loading.

        Raises:
            TransferError: if a layer cannot be put together from what was staged, or a buffer would go stale.
        """
        if self._left is None:
            self.begin()
        left, self._left = self._left, []
        if left:
            logger.info("refit: vLLM processes the weights of %d layers while the engine waits", len(left))
            # Whoever received the weights may have had views of them when this began.
            self._users.settle(new for _, new in self._pairs)
        with torch.no_grad(), set_current_vllm_config(self._config):
            for layer, names in left or ():
                self._pairs += self._new_tensors(layer, names)
        if self._swap is None:
            self._make_swap()

    def apply(self) -> None:
        """Lets the new weights and the old ones change places and refreshes what depends on them.

        The old ones are kept until :meth:`forget`. After an error call :meth:`undo`.

        Raises:
            TransferError: before :meth:`build` has succeeded.
        """
        if self._swap is None:
            raise TransferError("nothing was built")
        with torch.no_grad(), set_current_vllm_config(self._config):
            self._swap.run()
        refresh_attention(self._model, self._config)
        # What failed on a GPU must be known before the workers agree that nothing has.
        self._await_devices()

    def undo(self) -> None:
        """Puts back what :meth:`apply` has replaced so far."""
        if self._swap is not None:
            with torch.no_grad():
                self._swap.undo()
        refresh_attention(self._model, self._config)
        # What is read there may have been made in another thread, whose stream takes it again once it is let go of.
        self._await_devices()
        self.forget()

    def forget(self) -> None:
        """Lets go of the old weights."""
        self._swap, self._staged, self._users, self._pairs = None, {}, Users(), []

    def replace(self) -> None:
        """Builds and applies layer by layer, with memory for one of them; keeps nothing of the old weights.

        Raises:
            TransferError: as :meth:`build`; then the model is a mixture.
        """
        self._layers.check_views()
        self._users = Users()  # which keep what they count
        with torch.no_grad(), set_current_vllm_config(self._config):
            for layer, names in self._layers.of(self._staged):
                for target, new in self._new_tensors(layer, names):
                    if not same_memory(target, new):
                        target.copy_(new)
                for name in names:
                    del self._staged[join(layer.path, name)]
        refresh_attention(self._model, self._config)

    def _await_devices(self) -> None:
        for device in {tensor.device for tensor in self._staged.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _make_swap(self) -> None:
        with torch.no_grad():
            self._swap = Swap(self._pairs, self._users)
        if self._swap.copied_bytes:
            logger.info(
                "refit: %d bytes are copied aside, as more than these weights use them", self._swap.copied_bytes
            )

    def _new_tensors(self, layer: Layer, names: Sequence[str]) -> list[Pair]:
        """A layer's memory that serves, and what it shall hold."""
        plain = self._plain_tensors(layer, names)
        return layer.process(self._of(layer, names)) if plain is None else plain

    def _plain_tensors(self, layer: Layer, names: Sequence[str]) -> list[Pair] | None:
        """The same, if nothing has to be done to the layer's weights; otherwise None."""
        if not layer.is_plain or not layer.has_loader_form():
            return None
        running = layer.running()
        pairs: list[Pair] = []
        for name, flat in self._of(layer, names).items():
            target = running[name].data
            new = flat.as_strided(target.shape, target.stride())
            layer.check_form(name, new, target)
            pairs.append((target, new))
        return pairs

    def _of(self, layer: Layer, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What was staged for a layer, by attribute."""
        return {name: self._staged[join(layer.path, name)] for name in names}


def refresh_attention(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Computes anew what attention derives from other layers' weights, such as MLA's absorbed projections."""
    vllm = installed()
    with torch.no_grad(), set_current_vllm_config(vllm_config):
        for layer in model.modules():
            if vllm.derives(layer):
                cast(Any, layer).process_weights_after_loading(vllm_config.model_config.dtype)
