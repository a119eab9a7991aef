"""The model that a sweep is about, read from a Hugging Face ``config.json``, and Megatron's flags for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.train_shapes import Shape
from megatron_patches.refit.checkpoints.hf_flags import model_flags
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config, read_config
from megatron_patches.refit.models.traits import ModelTraits


@dataclass(frozen=True)
class Model:
    """A decoder with grouped-query attention and a gated MLP or experts in every layer.

    Attributes:
        shape: its matrices; the microbatch is that of a configuration, see :meth:`microbatch`.
        tied: whether the output layer is the embedding.
        qkv_bias: bias on query, key and value.
        qk_norm: RMSNorm over each head of query and key.
        flags: Megatron's for the architecture, as ``refit flags`` prints them, one word each.
    """

    shape: Shape
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    flags: tuple[str, ...]

    def microbatch(self, size: int) -> Shape:
        """The shape with microbatches of ``size`` sequences."""
        return replace(self.shape, micro_batch=size)

    def qkv_rows(self) -> int:
        """Rows of query, key and value together."""
        return (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_elements()

    def layer_replicated(self) -> int:
        """Elements of one layer that no axis cuts: norms and the router."""
        shape = self.shape
        norms = 2 * shape.hidden + (2 * shape.head_elements() if self.qk_norm else 0)
        return norms + shape.experts * shape.hidden


def read_model(path: Path, sequence: int) -> Model:
    """The model of a ``config.json``, trained on sequences of ``sequence`` tokens.

    Raises:
        UnsupportedModelError: if the file cannot be read, Megatron cannot build the model, it has no memory model here,
            or its positions end before ``sequence``.
    """
    config = read_config(path)
    family = family_from_config(config)
    traits = family.traits
    _refuse(family.architecture, traits)
    if sequence > traits.max_positions:
        raise UnsupportedModelError(
            f"--sequence is {sequence}, and the model's max_position_embeddings is {traits.max_positions}"
        )
    shape = Shape(
        layers=traits.num_layers,
        hidden=traits.hidden_size,
        ffn=traits.moe_ffn_hidden_size if traits.num_experts else traits.ffn_hidden_size,
        heads=traits.num_heads,
        kv_heads=traits.num_kv_heads,
        vocabulary=traits.vocab_size,
        sequence=sequence,
        micro_batch=1,
        experts=traits.num_experts,
        top_k=traits.experts_per_token,
        head=traits.head_dim,
    )
    return Model(shape, traits.tied_embeddings, traits.qkv_bias, traits.qk_norm, tuple(_flags(config, traits)))


def _refuse(architecture: str, traits: ModelTraits) -> None:
    features = {
        "multi-latent attention": traits.latent,
        "Mamba layers": traits.mamba,
        "a layer pattern": traits.layer_kinds,
        "dense layers before its experts": traits.first_dense_layers,
        "shared experts": traits.shared_ffn_hidden_size,
        "multi-token prediction": traits.mtp_layers,
        "biases on all linear layers": traits.linear_bias,
    }
    found = [name for name, present in features.items() if present]
    if found:
        raise UnsupportedModelError(
            f"this {architecture} has {', '.join(found)}, which the memory model does not count; it covers decoders "
            "whose layers are all attention and a gated MLP or routed experts (Llama, Qwen2, Qwen3, Qwen3-MoE)"
        )


def _flags(config: Mapping[str, object], traits: ModelTraits) -> Iterator[str]:
    yield from model_flags(config)
    yield from ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(traits.vocab_size))
    if traits.num_experts:
        yield from ("--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "aux_loss")
        yield from ("--moe-aux-loss-coeff", "0.001")
