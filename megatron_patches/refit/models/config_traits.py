"""Derives a model's family, with its tensors and their shapes, from a Hugging Face ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.dtypes import ITEMSIZE
from megatron_patches.refit.models.families import declared
from megatron_patches.refit.models.family import ModelFamily

# Why there is no mapping, for architectures whose layers Megatron has.
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "GptOssForCausalLM": ", whose experts are stored transposed and with the rows of gate and up projection in "
        "turn, so that a mapping would need a box for every row"
    }
)


def read_config(path: Path) -> Mapping[str, object]:
    """The content of a ``config.json``.

    Args:
        path: the file, or the directory of a checkpoint.

    Raises:
        UnsupportedModelError: if there is no such file, or it is no configuration.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the latter if it is nested too deeply
        raise UnsupportedModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file} is not the configuration of a model")
    return content


def family_from_config(config: Mapping[str, object]) -> ModelFamily:
    """The family, with its traits.

    Rotary scaling is ignored, because it affects no tensor of the checkpoint, except YaRN.

    Raises:
        UnsupportedModelError: if the architecture is unknown, a field is missing or invalid, or layers differ in kind.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "not given"
    known = {item.architecture: item.from_config for item in declared() if item.from_config is not None}
    if name not in known:
        raise UnsupportedModelError(f"the architecture is {name}{_WHY_NOT.get(name, '')}; known are {', '.join(known)}")
    family = known[name](config)
    traits = family.traits
    if traits.num_heads % traits.num_kv_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads is {traits.num_kv_heads} and num_attention_heads is {traits.num_heads} in the "
            "configuration; the first must divide the second"
        )
    return family


def dtype_of(config: Mapping[str, object]) -> str:
    """Dtype of the weights: ``torch_dtype``, which later releases of transformers call ``dtype``.

    Raises:
        UnsupportedModelError: if the configuration has neither, or the value is not a dtype, such as "auto".
    """
    value = config.get("torch_dtype") or config.get("dtype")
    if not isinstance(value, str):
        raise UnsupportedModelError("the configuration has neither torch_dtype nor dtype")
    if value not in ITEMSIZE:
        raise UnsupportedModelError(
            f"the weights' type is {value!r} (torch_dtype or dtype); write one of torch's names, such as bfloat16"
        )
    return value
