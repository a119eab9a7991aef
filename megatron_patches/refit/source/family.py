"""The content of a mapping file: the mapping of one kind of model, and a declaration of that kind.

To add a model, add such a file; :mod:`megatron_patches.refit.source.families` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_patches.refit.source.params import Cut, Param
from megatron_patches.refit.source.shard import ParamShard, RowSpan
from megatron_patches.refit.source.traits import ModelTraits

if TYPE_CHECKING:
    import torch


class ModelFamily(Protocol):
    """Maps the Megatron parameters of one kind of model to the tensors of one Hugging Face architecture."""

    @property
    def traits(self) -> ModelTraits:
        """Traits of the model."""

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor of the checkpoint, in the order of the file."""

    def pieces(self, shard: ParamShard) -> Sequence[RowSpan]:
        """The box of each range of rows of the TP-local weight.

        Raises:
            UnmappedParameterError: if the family does not know the parameter.
        """

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""


class PlannableFamily(ModelFamily, Protocol):
    """A family that also knows Megatron's parameters without a model, for plans without a trainer.

    The embedding, the output layer, and the parts of a multi-token prediction layer around its inner layer follow from
    the traits.
    """

    @property
    def final_norm(self) -> str:
        """Megatron's name of the norm after the last layer."""

    def layer_params(self, layer: int, fused_norms: bool) -> Iterator[Param]:
        """Parameters of a layer, except those of routed experts, by name within it.

        Args:
            layer: number of the layer, from 0. Multi-token prediction layers follow the last layer.
            fused_norms: whether layers are Transformer Engine's.
        """

    def expert_params(self) -> Sequence[Param]:
        """Parameters of one routed expert, by name within it."""

    def cuts(self, fused_norms: bool) -> Iterator[Cut]:
        """Dimensions that tensor parallelism must divide in a layer, besides heads, experts and feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a mapping file supports; its constant ``FAMILY``.

    Attributes:
        architecture: name of the class in ``transformers``.
        claims: whether a Megatron model (any pipeline stage, without wrappers) is of this kind. If several families
            claim a model, the one that refuses nothing in it is taken.
        refusals: for a claimed model and its number of tokens, one clause per feature that the architecture cannot
            express, with the flag that sets it. Without refusal, such a model would load and silently compute something
            else.
        read: the mapping of a model without refusals, given its number of tokens.
        from_config: the mapping of the model of a ``config.json`` of this architecture; raises UnsupportedModelError if
            fields are missing or describe what Megatron cannot build. None for a family that cannot be planned from
            configurations.
    """

    architecture: str
    claims: Callable[[torch.nn.Module], bool]
    refusals: Callable[[torch.nn.Module, int], Iterator[str]]
    read: Callable[[torch.nn.Module, int], ModelFamily]
    from_config: Callable[[Mapping[str, object]], PlannableFamily] | None = None
