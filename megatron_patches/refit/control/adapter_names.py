"""Names of LoRA adapters, of their tensors, and of the folders of their versions.

[Note: adapter tensors] An adapter is three tensors for each module that it changes: the factors, under the names that
they have in the files of PEFT's ``save_pretrained`` (``base_model.model.PATH.lora_A.weight`` of shape [rank, inputs]
and ``...lora_B.weight`` of shape [outputs, rank]), and the scale of their product, a number in float64 of shape [1]
(``...lora_scale``). With it, patterns of ranks and alphas, rank-stabilized scales and ``set_scale`` need no rules at
the engine.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FACTOR_A, FACTOR_B, SCALE = ".lora_A.weight", ".lora_B.weight", ".lora_scale"
"""Ends of the tensors' names; see [Note: adapter tensors]."""
PREFIX = "base_model.model."
"""Their beginning."""
ADAPTER_ROUTE = "refit/adapters"
"""Route of a server's guard that adds a version of an adapter."""
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Regular expression of names of adapters."""


def version_name(adapter: str, version: int) -> str:
    """The name by which requests choose a version."""
    return f"{adapter}@{version}"


def session_folder(folder: str, token: str) -> Path:
    """Where the workers of a session write its versions.

    Args:
        folder: the folder that the trainer names.
        token: token of the session. The path has only a hash of it, because anyone who has the token may join.
    """
    return Path(folder) / f"etp-adapters-{hashlib.sha256(token.encode()).hexdigest()[:32]}"
