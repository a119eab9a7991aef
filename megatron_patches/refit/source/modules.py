"""Describes a torch module whose parameters have Hugging Face names: plain, sharded by ETP, or sharded by FSDP2.

Each rank describes the block that it holds of each parameter. A parameter that is not sharded is held whole, by every
rank. Nothing is gathered: the block of a ``DTensor`` is its local tensor, that of a shard its rows without padding.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import RefitError, UnsupportedModelError
from megatron_patches.refit.layout.boxes import Box, View, row_major_strides
from megatron_patches.refit.layout.dtypes import ITEMSIZE
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.source.describe import RowShardedWeight
from megatron_patches.refit.source.live_memory import LiveMemory, LiveTensor, local_elements

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # of torch.compile and checkpoint_wrapper
_OF_PEFT = ".base_layer."  # in the names of weights that have an adapter


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """The block of one tensor that this rank holds, row-major at the beginning of its memory.

    Attributes:
        name: Hugging Face name of the tensor.
        shape: shape of the whole tensor.
        start: index of the block's first element in the whole tensor.
        extent: shape of the block; a rank may hold nothing.
        held_shape: shape in memory, padding included.
        dtype: torch's name of the dtype.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    held_shape: tuple[int, ...]
    dtype: str

    @property
    def storage(self) -> str:
        """Name of its memory; empty if the rank holds nothing."""
        return self.name if math.prod(self.extent) else ""

    @property
    def form(self) -> str:
        """Dtype, and shapes of block and tensor, for messages."""
        return f"{self.dtype} {self.extent} of {self.shape}"

    def as_storage(self) -> Storage:
        """The memory. Everything after the block is padding."""
        return Storage(self.name, self.dtype, math.prod(self.held_shape), math.prod(self.extent))

    @property
    def placement(self) -> Placement:
        """Where the block lies."""
        stop = tuple(low + size for low, size in zip(self.start, self.extent, strict=True))
        return Placement(
            Box(self.name, self.start, stop), View(self.name, 0, self.extent, row_major_strides(self.extent))
        )


class ModuleSource(LiveMemory[HeldBlock]):
    """A module's parameters, and the buffers that its ``state_dict()`` has, under the names that they have there.

    A tensor with several names has the first. Names of wrappers (DDP, ``torch.compile``, ``checkpoint_wrapper``) are
    left out.

    Args:
        module: the module.
        config: content of the model's ``config.json``, which engines compare with theirs. None for the module's own
            ``config``, as models of transformers have it; empty for no comparison but of names, shapes and dtypes.

    Raises:
        UnsupportedModelError: if the module has no configuration and none is given.
    """

    changed = "the model's tensors are others than when it was described: {}"

    def __init__(self, module: torch.nn.Module, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._module = unwrapped_module(module)
        self._config = config_of(self._module) if config is None else dict(config)

    @property
    def device(self) -> torch.device:
        """See :class:`megatron_patches.refit.source.weight_source.WeightSource`."""
        import torch

        return next((tensor.device for _, tensor in self._named()), torch.device("cpu"))

    def describe(self, rank: int) -> Held:
        """See :class:`megatron_patches.refit.source.weight_source.WeightSource`.

        Raises:
            UnsupportedModelError: naming a tensor that cannot be described.
            RefitError: naming a tensor whose memory is not contiguous, or that has none.
        """
        self.settle()
        self.prepare()
        blocks = [live.shard for live in self.tensors]
        held = [block for block in blocks if block.storage]
        manifest = Manifest(
            rank,
            socket.gethostname(),
            tuple(block.as_storage() for block in held),
            tuple(block.placement for block in held),
        )
        return Held(self._config, {block.name: block.shape for block in blocks}, manifest)

    def settle(self) -> None:
        """Frees the gathered parameters that FSDP2 keeps after a forward pass without a backward pass.

        They stand in for the sharded ones, and would be stale once an optimizer has changed those.
        """
        from torch.distributed.fsdp import FSDPModule

        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _models(self) -> list[torch.nn.Module]:
        return [self._module]

    def _described(self) -> list[LiveTensor[HeldBlock]]:
        wrapped = next((name for name, _ in self._named() if _OF_PEFT in name), None)
        if wrapped is not None:
            raise UnsupportedModelError(
                f"{wrapped} is a weight beside an adapter of PEFT; publish the adapter with AdapterPublisher, or the "
                "weights of a model into which it is merged for good (merge_and_unload)"
            )
        return [LiveTensor(describe_tensor(name, tensor), tensor, tensor.dtype) for name, tensor in self._named()]

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors to publish, and their names."""
        return named_tensors(self._module)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer once, under its first name, without names of wrappers."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        kept = [
            (name, buffer) for name, buffer in part._buffers.items() if name not in part._non_persistent_buffers_set
        ]
        for name, tensor in [*part._parameters.items(), *kept]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{plain_path(path)}.{name}".removeprefix("."), tensor


def plain_path(path: str) -> str:
    """A module's path without the names of wrappers."""
    return ".".join(segment for segment in path.split(".") if segment not in _WRAPPERS)


def describe_tensor(name: str, tensor: torch.Tensor) -> HeldBlock:
    """Describes the block of a tensor that this rank holds.

    Raises:
        UnsupportedModelError: if it is of an unknown kind, or is cut in a way that is no single block.
        RefitError: if its shape differs from that of its layout, or its memory is not contiguous.
    """
    local = _local(name, tensor)
    shape, start, extent = _extent_of(name, tensor)
    dtype = str(local.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise UnsupportedModelError(f"{name} is {dtype}, which no checkpoint can hold")
    if not math.prod(shape):
        raise UnsupportedModelError(f"{name} has shape {shape}, and so no elements to publish")
    if not local.is_contiguous():
        raise RefitError(f"{name} is not contiguous in memory (strides {local.stride()}); make it so with contiguous()")
    return HeldBlock(name, shape, start, extent, tuple(local.shape), dtype)


def _extent_of(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole tensor, and first index and shape of the block that this rank holds."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return _extent_of_dtensor(name, tensor)
    if isinstance(tensor, RowShardedWeight):
        shape, held = tuple(tensor.layout.shape), tuple(tensor.shape)
        if held != tuple(tensor.layout.shard_shape):
            raise RefitError(f"{name} has shape {held}; its layout's shards have {tuple(tensor.layout.shard_shape)}")
        low, high = tensor.layout.logical_range(tensor.group.rank())
        return shape, (low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])
    shape = tuple(tensor.shape)
    return shape, (0,) * len(shape), shape


def _extent_of_dtensor(name: str, tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """As :func:`_extent_of`. Each mesh dimension replicates the tensor, or cuts what others have cut before it."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedModelError(f"{name} is a DTensor over {mesh}, of which this rank is no part")
    start, extent = cut_out(shape, [(dim, mesh.size(axis), coordinate[axis]) for axis, dim in _cuts(name, tensor)])
    held = tuple(tensor.to_local().shape)
    if held != extent:
        raise RefitError(f"{name} has a local tensor of shape {held}; its placements {tensor.placements} say {extent}")
    return shape, start, extent


def cut_out(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First index and shape of what cuts leave of a tensor, each of which cuts what is left as torch.chunk does.

    Args:
        shape: of the whole tensor.
        cuts: the dimension that each cuts, the number of its pieces, and which of them is kept. A piece may be empty.
    """
    start, extent = [0] * len(shape), list(shape)
    for dim, pieces, kept in cuts:
        each = -(-extent[dim] // pieces)
        low = min(kept * each, extent[dim])
        start[dim] += low
        extent[dim] = min(each, extent[dim] - low)
    return tuple(start), tuple(extent)


def _cuts(name: str, tensor: DTensor) -> list[tuple[int, int]]:
    """The mesh dimensions that cut a tensor, in order, and the dimension that each cuts.

    They cut from the first to the last, except that FSDP2 on top of tensor parallelism, whose mesh dimension is the
    later one, cuts what that has left. torch calls this a strided shard: its blocks are no neighbours in the order of
    ranks, but each is in one piece.
    """
    from torch.distributed.tensor import Replicate, Shard

    cuts: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    pieces = [1] * tensor.dim()  # into which later mesh dimensions cut each dimension
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if isinstance(placement, Replicate):
            continue
        dim, split = getattr(placement, "dim", 0), getattr(placement, "split_factor", 1)
        known = type(placement) is Shard or type(placement).__name__ == "_StridedShard"
        if not known or split not in {1, pieces[dim]} or dim in {other for _, other in strided}:
            raise UnsupportedModelError(
                f"{name} is a DTensor with placements {tensor.placements}; each mesh dimension must replicate it, or "
                "cut it into blocks of neighbouring elements"
            )
        if split > 1:
            strided.append((axis, dim))
        else:
            cuts.insert(0, (axis, dim))
        pieces[dim] *= tensor.device_mesh.size(axis)
    return cuts + strided


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has in memory.

    Raises:
        UnsupportedModelError: if it is not plain memory, or its elements may not be the weights' values.
    """
    import torch
    from torch.distributed.tensor import DTensor

    kind = type(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    if not isinstance(tensor, RowShardedWeight) and kind not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        raise UnsupportedModelError(f"{name} is of type {kind.__name__}, neither a plain tensor nor a known shard")
    local = local_elements(tensor)
    if local.device.type == "meta" or local.layout is not torch.strided:
        what = "on the meta device" if local.device.type == "meta" else f"a tensor of layout {local.layout}"
        raise UnsupportedModelError(f"{name} is {what}, so there is no memory to publish")
    return local


def unwrapped_module(module: torch.nn.Module) -> torch.nn.Module:
    """The model in wrappers that hold all of it.

    Raises:
        UnsupportedModelError: if a part of it is in FSDP1, which keeps no parameter as such.
    """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else module._modules.get("_orig_mod")
        if not isinstance(inner, torch.nn.Module):
            break
        module = inner
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UnsupportedModelError(
                f"{name or 'the model'} is in FullyShardedDataParallel, whose flat parameters have no names; use "
                "torch.distributed.fsdp.fully_shard"
            )
    return module


def config_of(module: torch.nn.Module) -> dict[str, Any]:
    """What ``save_pretrained`` of transformers would write to ``config.json``.

    Raises:
        UnsupportedModelError: if the module has no such configuration.
    """
    from torch.distributed.fsdp import FSDPModule

    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_json_string"):
        raise UnsupportedModelError(
            f"{type(module).__name__} has no configuration of transformers in its attribute config; pass config=, the "
            "content of the config.json of its engines, or {} to compare only names, shapes and dtypes; for a model of "
            "Megatron, pass vocab_size="
        )
    # fully_shard gives a module a class of its own, derived from the model's.
    architecture = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    content: dict[str, Any] = json.loads(config.to_json_string())
    return content | {"architectures": [architecture.__name__]}
