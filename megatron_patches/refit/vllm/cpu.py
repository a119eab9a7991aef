"""What vLLM 0.26.0 needs on a CPU so that weights can be replaced. Nothing of it applies elsewhere."""

from __future__ import annotations


def apply() -> None:
    """Keeps linear weights where they are.

    With oneDNN a linear layer packs its weight into memory of oneDNN's own and empties the parameter, so that no
    later weight could reach it.
    """
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
