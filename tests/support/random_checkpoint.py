"""Random Hugging Face checkpoints of any family, written without Megatron and without an export."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_patches.refit.layout.weight_format import blocks_of, quantized_weights, scales_of
from megatron_patches.refit.models.config_traits import family_from_config

_COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
_ORIGINALS = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}


def random_tensors(config: Mapping[str, object], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor of the family, with other random values in each; copies of the embedding are copies."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in family_from_config(config).shapes().items():
        copy = _COPY.fullmatch(name)
        seed = zlib.crc32((_ORIGINALS[copy[1]] if copy else name).encode())
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        found[name] = values if name.endswith("e_score_correction_bias") else values.to(dtype)
    return found


def quantized(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint in block FP8, and what it stands for in fp32. Scales are random and in fp32.

    Args:
        tensors: name and shape of every tensor; those that stay as they are.
    """
    stored, meant = dict(tensors), dict(tensors)
    for name in quantized_weights({name: tuple(values.shape) for name, values in tensors.items()}):
        numbers = tensors[name].to(torch.float8_e4m3fn)
        rows, columns = numbers.shape
        scales = torch.rand(blocks_of(numbers.shape), generator=torch.Generator().manual_seed(rows)) + 0.01
        stored |= {name: numbers, scales_of(name): scales}
        whole = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        meant[name] = numbers.float() * whole
    return stored, meant


def write_checkpoint(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], files: int = 1
) -> None:
    """Write a checkpoint of one file, or of several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return
    where = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: values for file in sorted(folder.glob("*.safetensors")) for name, values in load_file(file).items()}
