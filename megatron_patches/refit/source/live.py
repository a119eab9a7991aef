"""A rank's live model: the description of what it holds, and its bytes."""

from __future__ import annotations

import operator
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.models.families import family_of
from megatron_patches.refit.models.family import ModelFamily, build_config
from megatron_patches.refit.models.shard import ParamShard, placements
from megatron_patches.refit.source.describe import (
    describe_model,
    float32_keepers,
    held_tensors,
    unwrapped_chunk,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_NAMED = 3  # parameters named in a message


@dataclass(frozen=True)
class Holdings:
    """This rank's part of a model.

    Attributes:
        family: the model.
        manifest: where its boxes lie.
        memory: the manifest's storages by name, one-dimensional tensors that share the parameters' memory.
        shards: the parameters and buffers, in the order of the manifest's storages.
    """

    family: ModelFamily
    manifest: Manifest
    memory: Mapping[str, torch.Tensor]
    shards: tuple[ParamShard, ...]


def describe_rank(
    chunks: Sequence[torch.nn.Module], vocab_size: int, rank: int, tp_group: ProcessGroup | None
) -> Holdings:
    """Describes this rank's part.

    Args:
        chunks: the model, one module per virtual pipeline stage, wrapped or not.
        vocab_size: number of tokens; embedding rows beyond it are padding and are left out.
        rank: this rank's source rank.
        tp_group: tensor-parallel group; None for Megatron's own.

    Raises:
        RefitError: if the model has no Hugging Face form, or a parameter has no counterpart in it.
    """
    family = family_of(unwrapped_chunk(chunks[0]), vocab_size)
    shards: list[ParamShard] = []
    storages: list[Storage] = []
    held: list[Placement] = []
    memory: dict[str, torch.Tensor] = {}
    for live in describe_model(chunks, tp_group):
        shards.append(live.shard)
        storages.append(live.shard.as_storage())
        held.extend(placements(live.shard, family.pieces(live.shard)))
        memory[live.shard.storage] = live.memory
    manifest = Manifest(rank, socket.gethostname(), tuple(storages), tuple(held))
    return Holdings(family, manifest, memory, tuple(shards))


class MegatronSource:
    """A rank's chunks of a Megatron model; a :class:`megatron_patches.refit.source.weight_source.WeightSource`.

    Args:
        chunks: as for :func:`describe_rank`.
        vocab_size: as for :func:`describe_rank`.
        tp_group: as for :func:`describe_rank`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], vocab_size: int, tp_group: ProcessGroup | None) -> None:
        self._chunks, self._vocab_size, self._tp_group = chunks, vocab_size, tp_group
        self._live: LiveMemory | None = None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        import torch

        weights = (weight for chunk in self._chunks for weight in chunk.parameters())
        return next((weight.device for weight in weights), torch.device("cpu"))

    @property
    def trained(self) -> object:
        """Megatron's configuration of the model, which says how it is trained."""
        return unwrapped_chunk(self._chunks[0]).config

    def describe(self, rank: int) -> Held:
        """See :func:`describe_rank`."""
        found = describe_rank(self._chunks, self._vocab_size, rank, self._tp_group)
        self._live = LiveMemory(self._chunks, self._tp_group)
        config = build_config(found.family, found.manifest.storages[0].dtype)
        return Held(dict(config), dict(found.family.shapes()), found.manifest)

    def settle(self) -> None:
        """See :func:`finish_parameter_gather`."""
        finish_parameter_gather(self._chunks)

    def look_up(self) -> FlatMemory:
        """See :meth:`LiveMemory.look_up`. An optimizer may have moved the weights since they were described."""
        if self._live is None:
            raise RefitError("prepare() has not succeeded")
        return self._live.look_up()


class LiveMemory:
    """Looks up the memory of a model's parameters for each push.

    Describing thousands of experts takes longer than moving them. So a later lookup reuses the description if the model
    consists of the same tensors, with the same shapes and dtypes; their memory may differ.

    Args:
        chunks: as for :func:`describe_rank`.
        tp_group: as for :func:`describe_rank`.

    Raises:
        RefitError: as :func:`megatron_patches.refit.source.describe.describe_model`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], tp_group: ProcessGroup | None) -> None:
        self._chunks, self._tp_group = chunks, tp_group
        self._describe()
        self._prepared = self._described()

    def look_up(self) -> FlatMemory:
        """The storages of the description, by name: flat tensors, in the host's memory or on one device.

        Raises:
            RefitError: if the model's parameters have changed, or one has no memory now or lies on another device.
        """
        for restore in self._restores:
            restore()
        if not self._same():
            self._describe()
            if self._described() != self._prepared:
                self._held.clear()  # otherwise the next lookup would accept the changed model
                changes = _changes(self._prepared, self._described())
                raise RefitError(
                    f"the model's parameters are others than at prepare(): {changes}; call prepare() again"
                )
        return memory_of((live.shard.storage, live.shard.name, live.memory) for live in self._shards)

    def _describe(self) -> None:
        models = [unwrapped_chunk(chunk) for chunk in self._chunks]
        self._restores = [restore for model in models for restore in float32_keepers(model)]
        self._shards = list(describe_model(self._chunks, self._tp_group))
        self._held = [held_tensors(model) for model in models]

    def _described(self) -> tuple[ParamShard, ...]:
        return tuple(live.shard for live in self._shards)

    def _same(self) -> bool:
        """Whether the description is still valid."""
        found = [held_tensors(unwrapped_chunk(chunk)) for chunk in self._chunks]
        if list(map(len, found)) != list(map(len, self._held)):
            return False
        if not all(map(operator.is_, chain.from_iterable(found), chain.from_iterable(self._held))):
            return False
        return all(
            live.tensor.shape == live.shard.held_shape
            and live.tensor.dtype == live.dtype
            and live.tensor.is_contiguous()
            for live in self._shards
        )


def _changes(before: Sequence[ParamShard], after: Sequence[ParamShard]) -> str:
    """Which parameters have changed, for a message."""
    old, new = ({shard.storage: shard for shard in shards} for shards in (before, after))
    found = [f"{old[storage].name} is gone" for storage in old.keys() - new.keys()]
    found += [f"{new[storage].name} is new" for storage in new.keys() - old.keys()]
    both = [(old[storage], new[storage]) for storage in old.keys() & new.keys()]
    found += [
        f"{was.name} was {was.dtype} {was.held_shape} and is {now.dtype} {now.held_shape}"
        for was, now in both
        if was != now
    ]
    if not found:
        return "they come in another order"
    more = len(found) - _NAMED
    return ", ".join(sorted(found)[:_NAMED]) + (f", and {more} more" if more > 0 else "")


def finish_parameter_gather(chunks: Sequence[torch.nn.Module]) -> None:
    """Completes the distributed optimizer's parameter gather, which otherwise waits for the next forward."""
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def memory_of(parts: Iterable[tuple[str, str, torch.Tensor]]) -> FlatMemory:
    """Storages by name: flat tensors, all in the host's memory or all on a device.

    Args:
        parts: for each storage its name, the name of its parameter, and its one-dimensional tensor.

    Raises:
        RefitError: if some are in the host's memory and others on a device.
    """
    found: dict[str, torch.Tensor] = {}
    on_host: list[str] = []
    for storage, name, memory in parts:
        found[storage] = memory
        if memory.is_cpu:
            on_host.append(name)
    if 0 < len(on_host) < len(found):
        raise RefitError(
            f"{on_host[0]} (and {len(on_host) - 1} more) is in the host's memory, and others are on a device; bring "
            "all to one before a push"
        )
    return found
