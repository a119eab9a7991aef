"""The content of a mapping file: the mapping of one kind of model, and a declaration of that kind.

To add a model, add such a file; :mod:`megatron_patches.refit.models.families` finds it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_patches.refit.errors import UnmappedParameterError
from megatron_patches.refit.models import rules
from megatron_patches.refit.models.params import TpDim, Weight, two_layers
from megatron_patches.refit.models.shard import ParamShard, RowSpan
from megatron_patches.refit.models.traits import ModelTraits

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.mtp_model_layer\.(?:layers\.(\d+)\.)?(.+)")
# One module per expert (SequentialMLP), or one weight per expert in a grouped module (TEGroupedMLP). Numbers are those
# of the whole model.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))")


class ModelFamily(ABC):
    """Maps the Megatron parameters of one kind of model to the tensors of one Hugging Face architecture.

    Each layer is a table of weights, and what is outside of layers is one more; all else follows from these.

    Args:
        traits: the model.

    Attributes:
        architecture: name of the class in ``transformers``.
        final_norm: Megatron's name of the norm after the last layer.
        embedding: tensor of the embedding.
        norm: tensor of the norm after the last layer.
        feed_forward: prefix of the tensors of a feed-forward within its layer.
        gated: whether feed-forwards have a gate projection.
    """

    architecture: str
    final_norm = "decoder.final_layernorm.weight"
    embedding = "model.embed_tokens.weight"
    norm = "model.norm.weight"
    feed_forward = "mlp."
    gated = True

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    @abstractmethod
    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""

    @abstractmethod
    def weights(self, layer: int, fused_norms: bool) -> Iterator[Weight]:
        """The weights of a layer, except those of routed experts, by names within it.

        Args:
            layer: number of the layer, from 0. Those of multi-token prediction follow the last layer.
            fused_norms: whether layers are Transformer Engine's, which keep a norm in the linear layer after it.
        """

    def file_refusals(self) -> Iterator[str]:
        """One clause per feature with which transformers computes something else, though engines do not."""
        yield from ()

    def outer(self) -> Iterator[Weight]:
        """The weights outside of layers, by full names, the embedding first."""
        t = self.traits
        table, head = (t.vocab_size, t.hidden_size), self.embedding if t.tied_embeddings else "lm_head.weight"
        yield Weight("embedding.word_embeddings.weight", table, {self.embedding: table}, 0, self._table)
        yield Weight(self.final_norm, (t.hidden_size,), {self.norm: (t.hidden_size,)})
        yield Weight("output_layer.weight", table, {head: table}, 0, self._table)

    def prefix(self, layer: int) -> str:
        """Prefix of the names of a layer's tensors."""
        return f"model.layers.{layer}."

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of every tensor of the checkpoint, in the order of the file."""
        embedding, *others = self.outer()
        shapes = dict(embedding.tensors)
        for layer in range(self.traits.num_layers + self.traits.mtp_layers * self._mtp_width):
            shapes |= self._layer_shapes(layer)
        for weight in others:
            shapes |= weight.tensors
        return shapes

    def pieces(self, shard: ParamShard) -> Sequence[RowSpan]:
        """The box of each range of rows of the TP-local weight.

        Raises:
            UnmappedParameterError: if such a model has no such parameter, layer or expert.
        """
        layer, name = self._place(shard.name)
        if layer is None:
            weights, prefix = list(self.outer()), ""
        else:
            prefix = self.prefix(layer)
            match = _EXPERT.fullmatch(name) if self.traits.has_experts(layer) else None
            if match is not None and (expert := int(match[1] or match[4])) < self.traits.num_experts:
                return self.expert_weights[match[2] or match[3]].pieces(shard, self._expert_prefix(layer, expert))
            weights = [*self.weights(layer, False), *self.weights(layer, True)]
        for weight in weights:
            if weight.name == name:
                return weight.pieces(shard, prefix)
        raise UnmappedParameterError(
            f"no tensor of {self.architecture} corresponds to the Megatron parameter {shard.name} of shape "
            f"{shard.shape}; add it to the family's mapping, or train without the feature that it belongs to"
        )

    @cached_property
    def expert_weights(self) -> Mapping[str, Weight]:
        """The weights of one routed expert, by names within it, which are those of its tensors, too."""
        t = self.traits
        layers = two_layers("", "", t.expert_hidden_size, t.moe_ffn_hidden_size, gated=self.gated, bias=False)
        return {weight.name: replace(weight, expert=True) for weight in layers}

    def tp_dims(self, fused_norms: bool) -> Iterator[TpDim]:  # noqa: ARG002 - unused: other families need it
        """Dimensions that tensor parallelism must divide in a layer, besides heads, experts and feed-forward."""
        t = self.traits
        yield "rows of query, key and value", (t.num_heads + 2 * t.num_kv_heads) * t.head_dim

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the names of the tensors of multi-token prediction layers."""
        t = self.traits
        return tuple(self.prefix(t.num_layers + index) for index in range(t.mtp_layers * self._mtp_width))

    @property
    def _mtp_width(self) -> int:
        """Number of layers of which a multi-token prediction layer consists."""
        return len(self.traits.mtp_layer_kinds) or 1

    def _table(self, shard: ParamShard, *tensors: str) -> Sequence[RowSpan]:
        """A table with one row per token, and its copies."""
        return [span for tensor in tensors for span in rules.vocabulary(shard, tensor, self.traits.vocab_size)]

    def _place(self, name: str) -> tuple[int | None, str]:
        """The layer of a parameter, and its name there; None and the full name if it is in none."""
        t = self.traits
        if (match := _LAYER.fullmatch(name)) is not None and int(match[1]) < t.num_layers:
            return int(match[1]), match[2]
        if (match := _MTP_LAYER.fullmatch(name)) is not None and (match[2] is None) == (not t.mtp_layer_kinds):
            number, inner = int(match[1]), int(match[2] or 0)
            if number < t.mtp_layers and inner < self._mtp_width:
                return t.num_layers + number * self._mtp_width + inner, match[3]
        return None, name

    def _expert_prefix(self, layer: int, expert: int) -> str:
        """Prefix of the names of an expert's tensors."""
        return f"{self.prefix(layer)}{self.feed_forward}experts.{expert}."

    def _layer_shapes(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        prefix = self.prefix(layer)
        tensors = (item for weight in self.weights(layer, fused_norms=False) for item in weight.tensors.items())
        shapes = {prefix + name: shape for name, shape in tensors}
        if self.traits.has_experts(layer):
            of_one = [item for weight in self.expert_weights.values() for item in weight.tensors.items()]
            for expert in range(self.traits.num_experts):
                prefix = self._expert_prefix(layer, expert)
                shapes |= {prefix + name: shape for name, shape in of_one}
        return shapes


def build_config(
    family: ModelFamily, dtype: str, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> Mapping[str, object]:
    """Content of ``config.json``: what the family writes, the weights' dtype, and the tokenizer's special tokens.

    Args:
        family: the architecture, with its traits.
        dtype: torch's name of the weights' dtype.
        bos_token_id: token that begins a text, if the tokenizer has one.
        eos_token_id: token that ends a text, if the tokenizer has one.
    """
    return {
        **family.config(),
        "torch_dtype": dtype,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }


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
    from_config: Callable[[Mapping[str, object]], ModelFamily] | None = None
