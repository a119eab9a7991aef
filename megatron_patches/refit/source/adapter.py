"""Describes the LoRA factors of an adapter that PEFT trains, plain or sharded as its model is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.control.adapter_names import FACTOR_A, FACTOR_B, PREFIX, SCALE
from megatron_patches.refit.errors import RefitError, UnsupportedModelError
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.source.live_memory import LiveTensor
from megatron_patches.refit.source.modules import HeldBlock, ModuleSource, config_of, plain_path, unwrapped_module

if TYPE_CHECKING:
    import torch

_UNCHANGED = (True, False, "gaussian", "orthogonal", "eva")  # kinds of init_lora_weights that leave the weights alone


class AdapterSource(ModuleSource):
    """The factors of one adapter, and nothing of the base model; see [Note: adapter tensors].

    Args:
        module: a model with adapters of PEFT: of ``get_peft_model``, or changed by ``inject_adapter_in_model``. Plain,
            under :func:`etp.shard_module`, or under ``fully_shard`` (FSDP2).
        adapter: PEFT's name of the adapter.

    Raises:
        UnsupportedModelError: if there is no such adapter, or vLLM could not serve it as it is trained.
    """

    def __init__(self, module: torch.nn.Module, adapter: str = "default") -> None:
        import torch

        inner: Any = unwrapped_module(module)
        super().__init__(module, config_of(inner.get_base_model() if hasattr(inner, "get_base_model") else inner))
        self._adapter = adapter
        self._scales = {
            name: torch.empty(1, dtype=torch.float64, device=layer.lora_A[adapter].weight.device)
            for name, layer in self._layers()
            if adapter in layer.lora_A
        }
        self.check()

    def check(self) -> None:
        """Checks that the adapter can be published as it is now.

        Raises:
            UnsupportedModelError: if vLLM could not serve it as it is trained.
            RefitError: naming a module whose scale is not a finite number, or into whose weight it is merged.
        """
        _check_config(self._module, self._adapter)
        layers = dict(self._layers())
        if not layers:
            raise UnsupportedModelError(
                f"the model has no LoRA adapter {self._adapter!r} of PEFT; it has {_names_of(self._module)}"
            )
        for name, layer in layers.items():
            _check_layer(name, layer, self._adapter)
        changed = sorted(layers.keys() ^ self._scales.keys())
        if changed:
            raise RefitError(f"the adapter {self._adapter!r} has other modules than before: {changed[0]}")

    def look_up(self) -> FlatMemory:
        """See :class:`megatron_patches.refit.source.weight_source.WeightSource`. Reads the scales again."""
        self.check()
        self._read_scales()
        return super().look_up()

    def _described(self) -> list[LiveTensor[HeldBlock]]:
        self._read_scales()
        return super()._described()

    def _read_scales(self) -> None:
        for name, layer in self._layers():
            self._scales[name].fill_(layer.scaling[self._adapter])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, layer in self._layers():
            yield name + FACTOR_A, layer.lora_A[self._adapter].weight
            yield name + FACTOR_B, layer.lora_B[self._adapter].weight
            yield name + SCALE, self._scales[name]

    def _layers(self) -> Iterator[tuple[str, Any]]:
        """The modules that have the adapter, by the beginning of the names of their tensors."""
        for path, layer in lora_layers(self._module):
            if self._adapter in adapters_of(layer):
                yield PREFIX + path.removeprefix(PREFIX), layer


def lora_layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Every module that PEFT has wrapped for LoRA, by its path without names of wrappers."""
    from peft.tuners.lora import LoraLayer

    for path, part in module.named_modules():
        if isinstance(part, LoraLayer):
            yield plain_path(path), part


def adapters_of(layer: Any) -> set[str]:
    """Names of the adapters of one such module."""
    return {*layer.lora_A, *layer.lora_embedding_A}


def _names_of(module: torch.nn.Module) -> str:
    found = sorted({name for _, layer in lora_layers(module) for name in adapters_of(layer)})
    return ", ".join(map(repr, found)) if found else "none"


def _check_config(module: Any, adapter: str) -> None:
    """Refuses what an adapter may have beside its factors, all of which vLLM would leave out."""
    config: Any = getattr(module, "peft_config", {}).get(adapter)
    if config is None:  # of a model changed by inject_adapter_in_model, which keeps no configuration in some releases
        return
    left_out = {
        "bias": config.bias != "none",
        "modules_to_save": bool(config.modules_to_save),
        "trainable_token_indices": bool(config.trainable_token_indices),
        "layer_replication": bool(config.layer_replication),
        "target_parameters": bool(config.target_parameters),
        "alora_invocation_tokens": bool(config.alora_invocation_tokens),
        "init_lora_weights": config.init_lora_weights not in _UNCHANGED,
    }
    for name, is_set in left_out.items():
        if is_set:
            why = "changes the base model's weights" if name == "init_lora_weights" else "is not served by vLLM"
            raise UnsupportedModelError(
                f"the adapter {adapter!r} was made with {name}={getattr(config, name)!r}, which {why}; train it "
                "without, or merge it into a copy of the model and publish that with WeightPublisher"
            )


def _check_layer(name: str, layer: Any, adapter: str) -> None:
    """Refuses a module in which an adapter is not scale * B @ A beside a weight.

    Raises:
        UnsupportedModelError: if it is of another kind.
        RefitError: if it is merged, or its scale is not finite.
    """
    from torch import nn

    base = layer.get_base_layer()
    if adapter not in layer.lora_A or not isinstance(base, nn.Linear):
        raise UnsupportedModelError(f"{name} is a {type(base).__name__}; only adapters of linear layers are published")
    if layer.lora_variant.get(adapter) is not None:
        kind = type(layer.lora_variant[adapter]).__name__.removesuffix("LinearVariant")
        raise UnsupportedModelError(f"{name} has a variant of LoRA ({kind}), which vLLM does not serve")
    if layer.lora_bias.get(adapter):
        raise UnsupportedModelError(f"{name} has a bias beside its factors (lora_bias), which vLLM does not serve")
    if adapter in layer.merged_adapters:
        raise RefitError(f"{name} has the adapter {adapter!r} merged into its weight; call unmerge_adapter() first")
    scale = layer.scaling[adapter]
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise RefitError(f"the scale of the adapter {adapter!r} at {name} is {scale!r}; it must be a finite number")
