"""Content of a ``config.json``: what the family writes, the weights' dtype, and the tokenizer's special tokens."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_patches.refit.models.family import ModelFamily


def build_config(
    family: ModelFamily, dtype: str, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> Mapping[str, object]:
    """Content of ``config.json``.

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
