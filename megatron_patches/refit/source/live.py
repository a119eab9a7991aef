"""A rank's live model: the description of what it holds, and its bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.models.families import family_of
from megatron_patches.refit.models.family import ModelFamily, build_config
from megatron_patches.refit.models.shard import ParamShard, placements
from megatron_patches.refit.source.describe import describe_model, float32_keepers, unwrapped_chunk
from megatron_patches.refit.source.live_memory import LiveMemory, LiveTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


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


class MegatronSource(LiveMemory[ParamShard]):
    """A rank's chunks of a Megatron model; a :class:`megatron_patches.refit.source.weight_source.WeightSource`.

    Args:
        chunks: as for :func:`describe_rank`.
        vocab_size: as for :func:`describe_rank`.
        tp_group: as for :func:`describe_rank`.
    """

    changed = "the model's parameters are others than at prepare(): {}; call prepare() again"

    def __init__(self, chunks: Sequence[torch.nn.Module], vocab_size: int, tp_group: ProcessGroup | None) -> None:
        super().__init__()
        self._chunks, self._vocab_size, self._tp_group = chunks, vocab_size, tp_group
        self._restores: list[Callable[[], None]] = []

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
        self.prepare()
        config = build_config(found.family, found.manifest.storages[0].dtype)
        return Held(dict(config), dict(found.family.shapes()), found.manifest)

    def settle(self) -> None:
        """See :func:`finish_parameter_gather`."""
        finish_parameter_gather(self._chunks)

    def look_up(self) -> FlatMemory:
        """See :meth:`LiveMemory.look_up`. An optimizer may have moved the weights since they were described."""
        for restore in self._restores:
            restore()
        return super().look_up()

    def _models(self) -> list[torch.nn.Module]:
        return [unwrapped_chunk(chunk) for chunk in self._chunks]

    def _described(self) -> list[LiveTensor[ParamShard]]:
        self._restores = [restore for model in self._models() for restore in float32_keepers(model)]
        return list(describe_model(self._chunks, self._tp_group))


def finish_parameter_gather(chunks: Sequence[torch.nn.Module]) -> None:
    """Completes the distributed optimizer's parameter gather, which otherwise waits for the next forward."""
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
