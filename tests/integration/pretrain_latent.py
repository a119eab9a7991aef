"""A training script whose models may have multi-latent attention on a CPU.

Its values are narrower than its keys. Megatron's own attention computes that as it is, but does not take the widths as
arguments, because only Transformer Engine's attention is meant to be used for it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from megatron.core.transformer.dot_product_attention import DotProductAttention

from examples import pretrain_gpt

_build = DotProductAttention.__init__


def _build_with_widths(
    self: DotProductAttention, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
) -> None:
    del k_channels  # read off the keys
    _build(self, *args, **kwargs)
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def main() -> None:
    """Train as the command line says."""
    with mock.patch.object(DotProductAttention, "__init__", _build_with_widths):
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
