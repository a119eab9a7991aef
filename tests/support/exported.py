"""Exported checkpoints as transformers opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def open_export(path: Path, architecture: str) -> Any:
    """The model in float32, for evaluation; fails if a tensor is missing, left over or of another shape.

    Args:
        path: the checkpoint's folder.
        architecture: the class in transformers that its configuration has to name.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert {name: len(keys) for name, keys in info.items() if keys} == {}
    assert type(model).__name__ == architecture
    return model.eval()


def shapes_written_by(model: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers writes for ``model``."""
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
