"""The protocol of a model family: everything needed to add a model, in one file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_patches.refit.source.shard import ParamShard, Piece
from megatron_patches.refit.source.traits import ModelTraits


class ModelFamily(Protocol):
    """Maps the Megatron parameters of one kind of model to the tensors of one Hugging Face architecture."""

    @property
    def traits(self) -> ModelTraits:
        """The model."""

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor of the checkpoint, in the order of the file."""

    def pieces(self, shard: ParamShard) -> Sequence[Piece]:
        """Which rows of the TP-local weight are which box.

        Raises:
            UnmappedParameterError: if the family does not know the parameter.
        """

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
