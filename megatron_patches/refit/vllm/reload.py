"""Takes a vLLM model to the form that its weight loaders know, and new weights from there into the running model.

What differs between releases of vLLM is here; written against 0.26.0, whose layerwise reloading
(``vllm/model_executor/model_loader/reload/``) this drives layer by layer instead of loader call by loader call.

New weights take effect in two halves. :meth:`Replacement.build` runs vLLM's own processing on staged weights, beside
the model that serves; it may fail, and changes nothing. :meth:`Replacement.apply` only copies, into the memory that
captured graphs refer to, and can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from megatron_patches.refit.errors import TransferError

Named = dict[str, torch.Tensor]


@contextmanager
def loader_form(model: nn.Module) -> Iterator[Named]:
    """The model as its weight loaders know it, on the meta device; as it was before, afterwards.

    Yields:
        Every parameter and buffer, by module path and attribute.
    """
    initialize_layerwise_reload(model)
    try:
        tensors: Named = {}
        for path, layer in model.named_modules():
            for name, tensor in get_layer_tensors(layer).items():
                tensors[_join(path, name)] = tensor
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = _get_original_loader(tensor)
        yield tensors
    finally:
        _restore(model)


class Replacement:
    """New weights for a model.

    Args:
        model: the model that serves.
        vllm_config: its configuration.
        staged: flat memory of every tensor that was loaded, in loader form, by module path and attribute.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, staged: Mapping[str, torch.Tensor]) -> None:
        self._model, self._config, self._staged = model, vllm_config, staged
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory of the running model, its new content
        self._old: list[tuple[torch.Tensor, torch.Tensor]] = []

    def build(self) -> None:
        """Processes the staged weights layer by layer, as vLLM does after loading.

        Raises:
            TransferError: if a layer cannot be put together from what was staged, or a buffer would go stale.
        """
        used: set[str] = set()
        initialize_layerwise_reload(self._model)
        try:
            _check_aliases(self._model)
            with torch.no_grad(), set_current_vllm_config(self._config):
                for path, layer in self._model.named_modules():
                    used |= self._build_layer(path, layer)
        finally:
            _restore(self._model)
        missing = sorted(set(self._staged) - used)
        if missing:
            raise TransferError(f"the model has no {missing[0]} (and {len(missing) - 1} more) that weights came for")

    def apply(self) -> None:
        """Copies the new weights over the old ones and refreshes what depends on them.

        The old ones are kept until :meth:`forget`. After an error call :meth:`undo`.
        """
        with torch.no_grad(), set_current_vllm_config(self._config):
            for kernel, new in self._pairs:
                self._old.append((kernel, kernel.detach().clone()))
                kernel.copy_(new)
            self._refresh_attention()

    def undo(self) -> None:
        """Puts back what :meth:`apply` has replaced so far."""
        with torch.no_grad(), set_current_vllm_config(self._config):
            for kernel, before in self._old:
                kernel.copy_(before)
            self._refresh_attention()
        self.forget()

    def forget(self) -> None:
        """Lets go of the old weights."""
        self._pairs, self._old = [], []

    def _build_layer(self, path: str, layer: nn.Module) -> set[str]:
        """Processes one layer's weights; returns the names of those that it used."""
        info = get_layerwise_info(layer)
        loaded = get_layer_tensors(layer)
        staged = {name: self._staged[_join(path, name)] for name in loaded if _join(path, name) in self._staged}
        if not staged or info.kernel_tensors is None:
            return set()
        parameters, buffers = info.kernel_tensors
        running = {**parameters, **buffers}
        # Some tensors vLLM never takes to the meta device; no processing changes them.
        direct = {name for name, tensor in loaded.items() if not tensor.is_meta}
        for name, tensor in loaded.items():
            if name not in direct:
                setattr(layer, name, _materialized(path, name, tensor, staged.get(name), running.get(name)))
        _process(layer)
        for name, target in running.items():
            if name in direct:
                new = staged[name].view(target.shape) if name in staged else None
            elif name in buffers and name not in staged and _is_derived(layer, name):
                new = None
            else:
                new = getattr(layer, name).data
            if new is not None:
                _check_same_form(_join(path, name), new, target)
                self._pairs.append((target.data, new))
        _place_kernel_tensors(layer, info)
        info.reset()
        return {_join(path, name) for name in staged}

    def _refresh_attention(self) -> None:
        """What attention derives from other layers' weights, such as MLA's absorbed projections."""
        for layer in self._model.modules():
            if isinstance(layer, Attention | MLAAttention):
                cast(Any, layer).process_weights_after_loading(self._config.model_config.dtype)


def _process(layer: nn.Module) -> None:
    """What vLLM does to a layer once its weights are loaded."""
    for tensor in get_layer_tensors(layer).values():
        tensor.weight_loader = _get_original_loader(tensor)
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        delattr(layer, "_already_called_process_weights_after_loading")
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        with get_layerwise_info(layer).restore_device:
            method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            cast(Any, layer).update_param_tp_status()


def _is_derived(layer: nn.Module, name: str) -> bool:
    """Whether a buffer is computed by the layer, not loaded; processing may have dropped it."""
    return name not in layer._buffers or name in get_layerwise_info(layer).kernel_non_persistent_buffers


def _check_aliases(model: nn.Module) -> None:
    """Buffers that were views of weights when the model was built, such as Mamba's ``conv_weights``, must still be.

    vLLM leaves them alone when weights are replaced. Where processing has since put a weight elsewhere, the buffer
    would keep the old values.
    """
    for path, layer in model.named_modules():
        kernel = get_layerwise_info(layer).kernel_tensors
        if kernel is None:
            continue
        dropped = {name: buffer for name, buffer in kernel[1].items() if name not in layer._buffers}
        if not dropped:
            continue
        weights = {
            tensor.untyped_storage().data_ptr()
            for inner in layer.modules()
            for tensor in (get_layerwise_info(inner).kernel_tensors or ({}, {}))[0].values()
        }
        for name, buffer in dropped.items():
            if buffer.untyped_storage().data_ptr() not in weights:
                raise TransferError(
                    f"{_join(path, name)} was a view of a weight when the model was built and has memory of its own "
                    "now; new weights would not reach it"
                )


def _check_same_form(name: str, new: torch.Tensor, target: torch.Tensor) -> None:
    if new.shape != target.shape or new.dtype != target.dtype:
        raise TransferError(
            f"{name} came out as {new.dtype} of shape {tuple(new.shape)}; the running model has {target.dtype} of "
            f"shape {tuple(target.shape)}"
        )


def _materialized(
    path: str, name: str, meta: torch.Tensor, staged: torch.Tensor | None, kernel: torch.Tensor | None
) -> torch.Tensor:
    """A tensor in loader form: what was staged, or the running model's where nothing came for it."""
    if staged is not None:
        tensor = staged.as_strided(meta.shape, meta.stride())
    elif kernel is not None and kernel.shape == meta.shape and kernel.dtype == meta.dtype:
        tensor = kernel.detach().clone()
    else:
        raise TransferError(f"no weights came for {_join(path, name)}, whose layer's other weights are replaced")
    tensor.__class__ = meta.__class__
    tensor.__dict__ = meta.__dict__.copy()
    return tensor


def _restore(model: nn.Module) -> None:
    """Puts the running model's tensors back wherever they are not in their place."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
