"""Properties that all Megatron models expose in the same way, whatever their family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def common_traits(model: torch.nn.Module, vocab_size: int) -> dict[str, Any]:
    """Fields of :class:`megatron_patches.refit.models.traits.ModelTraits`, by name.

    Args:
        model: the model, or any pipeline stage of it, without wrappers.
        vocab_size: number of embedding rows that belong to tokens.
    """
    config: Any = model.config
    return {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_heads": config.num_attention_heads,
        "vocab_size": vocab_size,
        "max_positions": int(model.max_sequence_length),  # type: ignore[arg-type]
        "tied_embeddings": bool(model.share_embeddings_and_output_weights),
        "norm_eps": config.layernorm_epsilon,
        "init_std": config.init_method_std,
    }
