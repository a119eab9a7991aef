"""Records where vLLM's own weight loaders put every element, by running them on tensors without memory.

The model's parameters are taken back to the form in which its loaders know them (vLLM's layerwise reloading does
that), its ``load_weights`` runs on meta tensors of the trainer's names, shapes and dtypes, and a dispatch mode notes
each copy instead of making it. No rule about any model is needed, and no weight is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_patches.refit.boxes import TensorSpec
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.target.recorded import CopyRecord, FillRecord, RecordedParameter, Region

_aten = torch.ops.aten
# What keeps an element's place and value, into new memory.
_SAME_ELEMENTS = frozenset({_aten._to_copy.default, _aten.clone.default})


@dataclass
class Recording:
    """What a loader did.

    Attributes:
        parameters: those that it wrote to.
        copies: in order.
        fills: in order.
    """

    parameters: list[RecordedParameter] = field(default_factory=list)
    copies: list[CopyRecord] = field(default_factory=list)
    fills: list[FillRecord] = field(default_factory=list)


def record_loading(load: Any, parameters: Mapping[str, torch.Tensor], tensors: Iterable[TensorSpec]) -> Recording:
    """Runs ``load`` on meta tensors and notes its copies into ``parameters``.

    Args:
        load: takes an iterator of (name, tensor), as ``load_weights`` of a vLLM model does.
        parameters: where it may copy to, by name. None is written.
        tensors: the model's tensors.

    Raises:
        UnsupportedModelError: if an element would reach a parameter changed, by other than a copy.
    """
    sources = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in tensors}
    recorder = _Recorder(sources, parameters)
    with torch.no_grad(), recorder:
        load(iter(sources.items()))
    recording = recorder.recording
    written = {record.storage for record in recording.copies} | {record.storage for record in recording.fills}
    recording.parameters = [
        RecordedParameter(name, str(tensor.dtype).removeprefix("torch."), _storage_numel(tensor))
        for name, tensor in parameters.items()
        if name in written
    ]
    return recording


def _storage_numel(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _region(tensor: torch.Tensor) -> Region:
    return Region(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


class _Recorder(TorchDispatchMode):
    """Follows memory by the identity of its storage: views share it, so they need no attention."""

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.recording = Recording()
        self._source_of = {_key(tensor): name for name, tensor in sources.items()}
        self._parameter_of: dict[int, str] = {}
        for name, tensor in parameters.items():
            self._parameter_of.setdefault(_key(tensor), name)
        # Tensors made on the way: the source region that each is an image of, or its name and what was done to it.
        self._image_of: dict[int, tuple[str, Region, Region]] = {}
        self._changed_by: dict[int, tuple[str, str]] = {}
        # An identity is only good while its object lives.
        self._alive: list[torch.Tensor] = [*sources.values(), *parameters.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and _key(first) in self._parameter_of:
            if func is _aten.copy_.default:
                return self._copy(first, args[1])
            if func in (_aten.fill_.Scalar, _aten.zero_.default):
                value = float(args[1]) if len(args) > 1 else 0.0
                self.recording.fills.append(FillRecord(self._parameter_of[_key(first)], _region(first), value))
                return first
            if func._schema.is_mutable:
                raise UnsupportedModelError(
                    f"the engine's loader changes {self._parameter_of[_key(first)]} with {func}, which is no copy"
                )
        if func in _SAME_ELEMENTS and first is not None and self._known(first):
            return self._image(first, kwargs.get("dtype"))
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _known(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self._source_of or _key(tensor) in self._image_of

    def _image(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """New memory for the same elements, wherever it was asked for: there is nothing to move."""
        if dtype is not None and dtype is not tensor.dtype:
            raise UnsupportedModelError(
                f"the engine's loader converts {self._name(tensor)} from {tensor.dtype} to {dtype}"
            )
        image = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        name, region = self._origin(tensor)
        self._image_of[_key(image)] = (name, region, _region(image))
        self._alive.append(image)
        return image

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        storage = self._parameter_of[_key(target)]
        if _key(source) in self._changed_by:
            name, operation = self._changed_by[_key(source)]
            raise UnsupportedModelError(f"the engine's loader puts {operation} of {name} into {storage}")
        if not self._known(source):
            raise UnsupportedModelError(f"the engine's loader puts values of its own into {storage}")
        if source.dtype is not target.dtype:
            raise UnsupportedModelError(
                f"{self._name(source)} is {source.dtype} and the engine keeps {storage} as {target.dtype}"
            )
        name, region = self._origin(source.expand(target.shape))
        self.recording.copies.append(CopyRecord(name, region, storage, _region(target)))
        return target

    def _name(self, tensor: torch.Tensor) -> str:
        return self._origin(tensor)[0]

    def _origin(self, tensor: torch.Tensor) -> tuple[str, Region]:
        """The source's name, and which of its elements ``tensor`` shows."""
        name = self._source_of.get(_key(tensor))
        if name is not None:
            return name, _region(tensor)
        name, region, whole = self._image_of[_key(tensor)]
        if _region(tensor) != whole:
            raise UnsupportedModelError(f"the engine's loader cuts a copy of {name}, where a view was expected")
        return name, region

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes results that depend on a source but are no views of it."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origin = next((leaf for leaf in inputs if self._known(leaf) or _key(leaf) in self._changed_by), None)
        if origin is None:
            return
        changed = self._changed_by.get(_key(origin))
        name, before = changed if changed is not None else (self._name(origin), "")
        operation = f"{before}, {func}" if before else str(func)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self._known(leaf) and _key(leaf) not in self._parameter_of:
                self._changed_by.setdefault(_key(leaf), (name, operation))
                self._alive.append(leaf)


def module_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of every module, by module path and attribute; shared ones under each of their names."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found[f"{path}.{name}".lstrip(".")] = tensor
    return found
