"""The layers of a vLLM model: the form of their serving weights, and how vLLM processes newly loaded ones.

vLLM's layerwise reloading keeps the form that weight loaders know, the *loader form*. How to drive it depends on the
vLLM release; see :mod:`megatron_patches.refit.vllm.releases`.

[Note: plain layers] Most layers serve from the loader form, and vLLM's processing leaves it unchanged. For a layer
without a processing method this is known. Other layers are watched during the first replacement: a layer is plain if
processing ran no torch operation, left its weights where they were, changed no other attribute of layer or method, and
added no reference to the weights' memory. From then on its new weights need no processing. These do not count, because
the serving tensors and kernel are put back afterwards: a copy of a tensor onto itself, by which unquantized experts
keep their memory; a new parameter for the same memory, as for block FP8; and a new kernel for quantized experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.releases.release import CACHE_SCALES, PROCESSED, Release, tensors_of
from megatron_patches.refit.vllm.swap import Pair, Users, is_dense, overlapping, same_memory, span_of


def join(path: str, name: str) -> str:
    """Full name of a module's attribute."""
    return f"{path}.{name}" if path else name


class Layer:
    """One module.

    Attributes:
        path: its path in the model.
        module: the module.
        vllm: the installed release.
        is_plain: whether processing is known to leave the loader form as it is; see [Note: plain layers].
    """

    def __init__(self, path: str, module: nn.Module, vllm: Release) -> None:
        self.path, self.module, self._vllm = path, module, vllm
        self._method = vllm.method(module)
        self.is_plain = self._method is None or vllm.leaves_alone(self._method)

    def running(self) -> dict[str, torch.Tensor]:
        """The serving parameters and buffers."""
        return tensors_of(self.module)

    def beside(self) -> dict[str, torch.Tensor]:
        """Serving tensors that are neither, in which processing may keep something, such as Marlin's workspace."""
        if self._method is None or self._vllm.is_deferred(self.module):  # attention has its KV cache there
            return {}
        return {name: value for name, value in vars(self.module).items() if isinstance(value, torch.Tensor)}

    def loader_form(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as weight loaders know them: without memory, except those that vLLM never changes."""
        parameters, buffers = self._vllm.known_to_loaders(self.module)
        running = self.running()
        return {**parameters, **buffers, **{name: running[name] for name in running if self._keeps(name)}}

    def views(self) -> dict[str, torch.Tensor]:
        """Buffers that were views of weights when the model was built, such as Mamba's ``conv_weights``."""
        if not self.module._buffers:
            return {}
        known = self._vllm.known_to_loaders(self.module)[1]
        return {
            name: buffer
            for name, buffer in self.module._buffers.items()
            if buffer is not None and name not in known and not self._keeps(name)
        }

    def has_loader_form(self) -> bool:
        """Whether the layer serves from exactly the tensors that weight loaders know."""
        running, form = self.running(), self.loader_form()
        return all(name in running and _same_form(running[name], tensor) for name, tensor in form.items()) and (
            len(running) == len(form) or len(running) == len(form) + len(self.views())
        )

    def as_loaded(self, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
        """Serving memory of some weights, flat, by full name, if new ones need no processing; otherwise None."""
        as_they_came = self.is_plain and self.has_loader_form()
        if not as_they_came and not CACHE_SCALES.issuperset(names):  # vLLM does not process these
            return None
        running = self.running()
        if not all(is_dense(running[name]) for name in names):
            return None
        return {join(self.path, name): _flat(running[name]) for name in names}

    def process(self, staged: Mapping[str, torch.Tensor]) -> list[Pair]:
        """Runs vLLM's processing of newly loaded weights.

        Args:
            staged: flat memory in loader form, by attribute. Processing may change it.

        Returns:
            Pairs of serving memory, which is not changed, and its new content.

        Raises:
            TransferError: if a weight of the layer is missing, or processing changed its shape or dtype.
        """
        module, running, buffers = self.module, self.running(), set(self.module._buffers)
        is_plain, users, beside = self.has_loader_form(), Users(staged.values()), self.beside()
        pairs: list[Pair] = []
        try:
            self._vllm.take_to_loader_form(module)
            for name, tensor in self.running().items():
                if not self._keeps(name):
                    setattr(module, name, self._materialized(name, tensor, staged.get(name), running.get(name)))
            is_plain &= self._process()
            for name, target in running.items():
                if self._keeps(name):
                    new = staged[name].view(target.shape) if name in staged else None
                elif name in buffers and name not in staged and self._is_derived(name):
                    new = None
                else:
                    new = getattr(module, name).data
                if new is not None:
                    check_form(join(self.path, name), new, target)
                    pairs.append((target.data, new))
            for name, new in self.beside().items():
                if name in beside and new is not beside[name]:
                    check_form(join(self.path, name), new, beside[name])
                    pairs.append((beside[name], new))
        finally:
            self._vllm.put_back(module)
            vars(module).update(beside)
        storages = {int(tensor.untyped_storage()._cdata) for tensor in staged.values()}
        self.is_plain = is_plain and storages <= users.joined_only_by(chain.from_iterable(pairs))
        return pairs

    def _keeps(self, name: str) -> bool:
        """Whether vLLM never moves a tensor to the meta device; processing does not change such tensors."""
        return self._vllm.keeps(self.module, name)

    def _is_derived(self, name: str) -> bool:
        """Whether a buffer is computed by the layer, not loaded. Processing may have dropped it."""
        return name not in self.module._buffers or name in self._vllm.non_persistent(self.module)

    def _process(self) -> bool:
        """Runs vLLM's processing of a loaded layer. Returns whether it did nothing; see [Note: plain layers]."""
        module, method = self.module, self._method
        self._vllm.make_ready(module)
        if method is None:
            return True
        before = _look_at(module, method)
        kernel = self._vllm.kernel_of(method)  # refers to the serving scales, and must keep doing so
        try:
            with self._vllm.device(module), _Watch() as watch:
                self._vllm.process(module, method)
        finally:
            for name, value in kernel.items():
                setattr(method, name, value)
        untouched = not watch.operations and before.same(_look_at(module, method))
        self._vllm.after_processing(module)
        return untouched

    def _materialized(
        self, name: str, meta: torch.Tensor, staged: torch.Tensor | None, kernel: torch.Tensor | None
    ) -> torch.Tensor:
        """A tensor in loader form: the staged one, or a copy of the running model's if none was staged."""
        if staged is not None:
            tensor = staged.as_strided(meta.shape, meta.stride())
        elif kernel is not None and kernel.shape == meta.shape and kernel.dtype == meta.dtype:
            tensor = kernel.detach().clone()
        else:
            raise TransferError(
                f"no weights came for {join(self.path, name)}, whose layer's other weights are replaced"
            )
        tensor.__class__ = meta.__class__
        tensor.__dict__ = meta.__dict__.copy()
        return tensor


def check_form(name: str, new: torch.Tensor, target: torch.Tensor) -> None:
    """Checks that new content of a weight fits the serving memory.

    Raises:
        TransferError: if its shape or dtype differs.
    """
    if new.shape != target.shape or new.dtype != target.dtype:
        raise TransferError(
            f"{name} came out as {new.dtype} of shape {tuple(new.shape)}; the running model has {target.dtype} of "
            f"shape {tuple(target.shape)}"
        )


@dataclass(frozen=True)
class AsLoaded:
    """Where some weights serve, by what must be done to newly loaded ones.

    Attributes:
        memory: those that serve as they are loaded: their serving memory, flat, by module path and attribute.
        processed: the layers of the others, with attributes.
    """

    memory: Mapping[str, torch.Tensor]
    processed: Sequence[tuple[Layer, Sequence[str]]]


class Layers:
    """All layers of a model.

    Args:
        model: the model.

    Attributes:
        has_derived: whether a layer derives something from the weights of others, as attention may.
    """

    def __init__(self, model: nn.Module) -> None:
        vllm = installed_release()
        self._layers = [Layer(path, module, vllm) for path, module in model.named_modules()]
        self._of = {join(layer.path, name): (layer, name) for layer in self._layers for name in layer.loader_form()}
        self.has_derived = any(vllm.derives(layer.module) for layer in self._layers)
        self._as_loaded = AsLoaded({}, ())
        self._seen: tuple[object, ...] = ()  # what the last examination was of

    def of(self, names: Collection[str]) -> list[tuple[Layer, list[str]]]:
        """The layers that have weights of these names, with the weights' attribute names.

        Raises:
            TransferError: if the model's loaders do not know a name.
        """
        missing = sorted(name for name in names if name not in self._of)
        if missing:
            raise TransferError(f"the model has no {missing[0]} (and {len(missing) - 1} more) that weights came for")
        found: dict[int, tuple[Layer, list[str]]] = {}
        for full in names:
            layer, name = self._of[full]
            found.setdefault(id(layer), (layer, []))[1].append(name)
        return list(found.values())

    def as_loaded(self, names: Collection[str]) -> AsLoaded:
        """Sorts weights by whether they serve as they are loaded.

        Examined again only if other weights are asked for, a layer is found to be plain, or a tensor has moved:
        examining them takes longer than what arrives last of a version.

        Raises:
            TransferError: as :meth:`of`.
        """
        layers = self.of(names)
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters would pass each look through Python
            seen = (set(names), [(layer.is_plain, _places(layer.running())) for layer, _ in layers])
        if seen != self._seen:
            memory: dict[str, torch.Tensor] = {}
            processed = []
            for layer, attributes in layers:
                flat = layer.as_loaded(attributes)
                if flat is None:
                    processed.append((layer, attributes))
                else:
                    memory |= flat
            self._as_loaded, self._seen = AsLoaded(memory, processed), seen
        return self._as_loaded

    def check_views(self) -> None:
        """Checks that buffers that were views of weights when the model was built still are.

        vLLM does not update these buffers when weights are replaced. If processing moved a weight to other memory, the
        buffer would keep the old values.

        Raises:
            TransferError: with the name of such a buffer.
        """
        for layer in self._layers:
            views = layer.views()
            weights = {tensor.untyped_storage().data_ptr() for tensor in (layer.module.parameters() if views else ())}
            for name, buffer in views.items():
                if buffer.untyped_storage().data_ptr() not in weights:
                    raise TransferError(
                        f"{join(layer.path, name)} was a view of a weight when the model was built and has memory of "
                        "its own now; new weights would not reach it"
                    )

    def serving(self, names: Collection[str]) -> list[torch.Tensor]:
        """All serving tensors of the layers that have weights of these names."""
        layers = [layer for layer, _ in self.of(names)]
        return [tensor.data for layer in layers for tensor in (*layer.running().values(), *layer.beside().values())]

    def is_plain(self, name: str) -> bool:
        """Whether a weight serves as it was loaded; see [Note: plain layers]."""
        return self._of[name][0].is_plain

    def in_loader_form(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The weights that serve in exactly the loader form, as flat memory, by name.

        Weights that share memory with another of ``names`` are left out.
        """
        running = {join(layer.path, name): (layer, name) for layer, found in self.of(names) for name in found}
        tensors = [*(layer.running()[name] for layer, name in running.values() if name in layer.running())]
        shared = {span_of(tensors[index]) for index in overlapping(tensors)}
        return {name: flat for name, flat in self.readable(names).items() if span_of(flat) not in shared}

    def readable(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The weights that serve in exactly the loader form, as flat memory, by name. They may share memory."""
        kept: dict[str, torch.Tensor] = {}
        for layer, found in self.of(names):
            for name in found:
                tensor, form = layer.running().get(name), layer.loader_form()[name]
                if tensor is not None and _same_form(tensor, form) and is_dense(tensor) and tensor.numel():
                    kept[join(layer.path, name)] = _flat(tensor)
        return kept


class _Watch(TorchDispatchMode):
    """Counts operations that may leave something behind; see [Note: plain layers]."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not _leaves_nothing(func, args)
        return func(*args, **(kwargs or {}))


def _leaves_nothing(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is the detach that reading ``data`` does, or a copy of a tensor onto itself."""
    if func is torch.ops.aten.detach.default:
        return True
    if func is not torch.ops.aten.copy_.default:
        return False
    return _same_form(args[0], args[1]) and same_memory(args[0], args[1])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return tensor.data.as_strided((tensor.numel(),), (1,))


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


@dataclass(frozen=True)
class _Seen:
    """What processing could change of a layer, besides the content of its tensors.

    Attributes:
        objects: attributes of the layer and of its method, without the layer's parameters and buffers.
        places: for each of those, its name, its memory and its form.
    """

    objects: Mapping[str, object]
    places: Sequence[tuple[object, ...]]

    def same(self, other: _Seen) -> bool:
        """Whether nothing has changed: the objects must be identical, not only equal."""
        return (
            self.places == other.places
            and self.objects.keys() == other.objects.keys()
            and all(value is other.objects[name] for name, value in self.objects.items())
        )


def _look_at(module: nn.Module, method: object) -> _Seen:
    left_out = {"_parameters", "_buffers", "_modules", PROCESSED}
    objects = {
        f"{owner} {name}": value
        for owner, attributes in (("layer", vars(module)), ("method", vars(method)))
        for name, value in attributes.items()
        if name not in left_out
    }
    return _Seen(objects, _places(tensors_of(module)))


def _places(tensors: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """Where tensors are, and their form."""
    return [(name, it.data_ptr(), it.shape, it.stride(), it.dtype) for name, it in tensors.items()]
