"""What this rank's live model holds, described and as bytes."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patches.refit.hf_config import family_for, read_traits
from megatron_patches.refit.manifest import Manifest, Placement, Storage
from megatron_patches.refit.ports import Bits
from megatron_patches.refit.source.describe import describe_model, unwrapped
from megatron_patches.refit.source.family import ModelFamily
from megatron_patches.refit.source.shard import placements

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Holdings:
    """This rank's part of a model.

    Attributes:
        family: the model.
        manifest: which boxes of it lie where.
        memory: the manifest's storages by name, tensors of one dimension that share the parameters' memory.
    """

    family: ModelFamily
    manifest: Manifest
    memory: Mapping[str, torch.Tensor]


def describe_rank(
    chunks: Sequence[torch.nn.Module], vocab_size: int, rank: int, tp_group: ProcessGroup | None
) -> Holdings:
    """Describes this rank's part.

    Args:
        chunks: the model, one module a virtual pipeline stage, wrapped or not.
        vocab_size: number of tokens; rows of the embedding beyond it are padding and are left out.
        rank: this rank's number as a source.
        tp_group: tensor-parallel group; None for Megatron's own.

    Raises:
        RefitError: if the model has no Hugging Face form, or a parameter no counterpart in it.
    """
    family = family_for(read_traits(unwrapped(chunks[0]), vocab_size))
    storages: list[Storage] = []
    held: list[Placement] = []
    memory: dict[str, torch.Tensor] = {}
    for live in describe_model(chunks, tp_group):
        storages.append(live.shard.as_storage())
        held.extend(placements(live.shard, family.pieces(live.shard)))
        memory[live.shard.storage] = live.memory
    return Holdings(family, Manifest(rank, socket.gethostname(), tuple(storages), tuple(held)), memory)


def finish_parameter_gather(chunks: Sequence[torch.nn.Module]) -> None:
    """Completes the distributed optimizer's parameter gather, which otherwise waits for the next forward."""
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def bits_of(memory: torch.Tensor) -> Bits:
    """A parameter's memory as unsigned integers of the elements' width, shared where it is on the CPU, else copied.

    Args:
        memory: a contiguous tensor of one dimension.
    """
    import torch

    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    bits: Bits = memory.detach().view(unsigned[memory.element_size()]).cpu().numpy()
    return bits
