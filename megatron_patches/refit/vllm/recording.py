"""Records where vLLM's own weight loaders put every element, by running them on tensors without memory.

The model's parameters are returned to the form in which its loaders know them, by vLLM's layerwise reloading. Then its
``load_weights`` runs on meta tensors with the trainer's names, shapes and dtypes, while a dispatch mode records each
copy instead of making it. This needs no model-specific rules and touches no weights.

[Note: operations] Between checkpoint and parameter, a loader may convert elements and apply operations that torch tags
as pointwise, whose other operands are numbers. These are recorded with the copy, in order, to be replayed on real
elements. A loader may also read back what it has copied into a parameter, as ``composed_weight_loader`` does. All
other operations (sums, products of two tensors, random numbers, changes in place) are refused as soon as their result
would reach a parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp
from megatron_patches.refit.target.recorded import CopyRecord, FillRecord, RecordedParameter, Recording, Strided

_aten = torch.ops.aten
# Operations that copy elements to new memory without changing their place or value.
_SAME_ELEMENTS = frozenset({_aten._to_copy.default, _aten.clone.default})


def record_loading(load: Any, parameters: Mapping[str, torch.Tensor], tensors: Iterable[TensorSpec]) -> Recording:
    """Runs ``load`` on meta tensors and records its copies into ``parameters``.

    Args:
        load: takes an iterator of (name, tensor), like ``load_weights`` of a vLLM model.
        parameters: tensors it may copy to, by name. None is written.
        tensors: the model's tensors.

    Raises:
        UnsupportedModelError: if an element that would reach a parameter was changed by anything but elementwise
            operations; names the operation and the parameter.
    """
    sources = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in tensors}
    recorder = _Recorder(sources, parameters)
    with torch.no_grad(), recorder:
        load(iter(sources.items()))
    recording = recorder.recording
    written = {record.storage for record in recording.copies} | {record.storage for record in recording.fills}
    recording.parameters = [
        RecordedParameter(name, _dtype_name(tensor.dtype), _storage_numel(tensor))
        for name, tensor in parameters.items()
        if name in written
    ]
    return recording


def _storage_numel(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _region(tensor: torch.Tensor) -> Strided:
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Origin:
    """Where a tensor's elements come from.

    Attributes:
        tensor: name of the source tensor.
        region: the elements of the source, in order.
        steps: operations applied to each element.
    """

    tensor: str
    region: Strided
    steps: tuple[ElementOp, ...] = ()

    def then(self, step: ElementOp) -> _Origin:
        return replace(self, steps=(*self.steps, step))


class _Recorder(TorchDispatchMode):
    """Tracks memory by the identity of its storage. Views share the storage, so they need no special handling."""

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.recording = Recording()
        self._source_of = {_key(tensor): name for name, tensor in sources.items()}
        self._parameter_of: dict[int, str] = {}
        for name, tensor in parameters.items():
            self._parameter_of.setdefault(_key(tensor), name)
        self._copied: dict[int, list[tuple[Strided, _Origin]]] = defaultdict(list)  # into each parameter, in order
        self._filled: dict[int, list[Strided]] = defaultdict(list)  # of each parameter
        # Intermediate tensors: the origin and region of their elements, or the source's name and all operations on it.
        self._image_of: dict[int, tuple[_Origin, Strided]] = {}
        self._changed_by: dict[int, tuple[str, str]] = {}
        # Storage identities are valid only while their tensors live.
        self._alive: list[torch.Tensor] = [*sources.values(), *parameters.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        for tensor in _written(func, args, kwargs):
            if _key(tensor) in self._parameter_of:
                return self._write(func, tensor, args)
        if func in _SAME_ELEMENTS and first is not None and self._is_traced(first):
            return self._image(first, kwargs.get("dtype"))
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements come from, or depend on, those of a source."""
        key = _key(tensor)
        return key in self._source_of or key in self._image_of or key in self._changed_by or key in self._copied

    def _write(self, func: Any, parameter: torch.Tensor, args: Any) -> torch.Tensor:
        name = self._parameter_of[_key(parameter)]
        if func is _aten.copy_.default:
            return self._copy(parameter, args[1])
        if func in (_aten.fill_.Scalar, _aten.zero_.default):
            value = float(args[1]) if len(args) > 1 else 0.0
            self.recording.fills.append(FillRecord(name, _region(parameter), value))
            if parameter.numel():  # padding may be empty
                self._filled[_key(parameter)].append(_region(parameter))
            return parameter
        raise UnsupportedModelError(f"the engine's loader changes {name} with {func}, which is no copy")

    def _image(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """New memory for the same elements. The requested device is ignored, as there is nothing to move."""
        image = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        self._alive.append(image)
        if _key(tensor) in self._changed_by:
            self._changed_by[_key(image)] = self._changed_by[_key(tensor)]
        else:
            self._image_of[_key(image)] = _converted(self._origin(tensor), tensor, image), _region(image)
        return image

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        storage = self._parameter_of[_key(target)]
        if _key(source) in self._changed_by:
            name, operations = self._changed_by[_key(source)]
            raise UnsupportedModelError(f"the engine's loader puts {operations} of {name} into {storage}")
        if not self._is_traced(source):
            raise UnsupportedModelError(f"the engine's loader puts values of its own into {storage}")
        origin = _converted(self._origin(source.expand(target.shape)), source, target)
        write = _region(target)
        if self._is_filled(target):  # fills are made only after all weights have arrived
            raise UnsupportedModelError(f"the engine's loader fills elements of {storage} before it copies to them")
        if target.numel():  # a part of the vocabulary may be only padding
            self._copied[_key(target)].append((write, origin))
        self.recording.copies.append(CopyRecord(origin.tensor, origin.region, storage, write, origin.steps))
        return target

    def _origin(self, tensor: torch.Tensor) -> _Origin:
        """The origin of a traced tensor's elements, if only recorded steps were applied to them."""
        name = self._source_of.get(_key(tensor))
        if name is not None:
            return _Origin(name, _region(tensor))
        if _key(tensor) in self._copied:
            return self._read_back(tensor)
        origin, whole = self._image_of[_key(tensor)]
        if _region(tensor) != whole:
            raise UnsupportedModelError(
                f"the engine's loader cuts a copy of {origin.tensor}, where a view was expected"
            )
        return origin

    def _read_back(self, parameter: torch.Tensor) -> _Origin:
        """The origin of what was last copied to these elements of a parameter."""
        region = _region(parameter)
        for written, origin in reversed(() if self._is_filled(parameter) else self._copied[_key(parameter)]):
            if written == region:
                return origin
            if _overlap(written, region):
                break
        raise UnsupportedModelError(
            f"the engine's loader reads elements of {self._parameter_of[_key(parameter)]} back (offset "
            f"{region.offset}, shape {region.shape}) other than it has copied them there"
        )

    def _is_filled(self, parameter: torch.Tensor) -> bool:
        """Whether the loader has filled any element in the span of a parameter's region."""
        return any(_overlap(filled, _region(parameter)) for filled in self._filled[_key(parameter)])

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records results that depend on a source without being views of it, and changes in place."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        traced = next((leaf for leaf in inputs if self._is_traced(leaf)), None)
        if traced is None:
            return
        before = self._changed_by.get(_key(traced))
        step = None if before is not None else _elementwise(func, args, kwargs, result)
        known = {_key(leaf) for leaf in inputs}
        changed = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _key(leaf) not in known]
        if step is not None and changed:
            self._image_of[_key(result)] = self._origin(args[0]).then(step), _region(result)
        else:
            changed += _written(func, args, kwargs)
            name, operations = before or self._history(traced)
            for leaf in changed:
                self._changed_by[_key(leaf)] = name, f"{operations}, {func}" if operations else str(func)
        self._alive.extend(changed)

    def _history(self, tensor: torch.Tensor) -> tuple[str, str]:
        """Name of the source, and the operations applied to its elements."""
        key = _key(tensor)
        if key in self._source_of:
            return self._source_of[key], ""
        origin = self._image_of[key][0] if key in self._image_of else self._copied[key][-1][1]
        return origin.tensor, ", ".join(map(str, origin.steps))


def _converted(origin: _Origin, tensor: torch.Tensor, into: torch.Tensor) -> _Origin:
    return origin if tensor.dtype is into.dtype else origin.then(ElementOp(CONVERT, _dtype_name(into.dtype)))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes to in place."""
    if not func._schema.is_mutable:
        return []
    schema = func._schema.arguments
    by_name = {**dict(zip((item.name for item in schema), args, strict=False)), **kwargs}
    names = [item.name for item in schema if item.alias_info is not None and item.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(by_name.get(name)) if isinstance(leaf, torch.Tensor)]


def _elementwise(func: Any, args: Any, kwargs: Any, result: Any) -> ElementOp | None:
    """The operation as a step, if it is elementwise in its first argument and all others are plain values."""
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if func._schema.is_mutable or not isinstance(result, torch.Tensor) or not isinstance(args[0], torch.Tensor):
        return None
    if not all(isinstance(value, bool | int | float | str | None) for value in (*args[1:], *kwargs.values())):
        return None
    if result.shape != args[0].shape:
        return None
    operation = str(func).removeprefix("aten.")
    return ElementOp(operation, _dtype_name(result.dtype), tuple(args[1:]), tuple(sorted(kwargs.items())))


def _overlap(one: Strided, other: Strided) -> bool:
    """Whether the memory spans of two regions overlap."""

    def span(region: Strided) -> tuple[int, int]:
        reach = sum((extent - 1) * step for extent, step in zip(region.shape, region.strides, strict=True))
        return region.offset, region.offset + reach

    return span(one)[0] <= span(other)[1] and span(other)[0] <= span(one)[1]
