"""The formats in which weights are sent and exported, and the names and shapes that block FP8 has in a checkpoint.

[Note: block FP8] A matrix ``X.weight`` of shape [N, K] becomes E4M3 numbers, and beside it there is
``X.weight_scale_inv``, fp32 [N / 128, K / 128] rounded up: a weight is its number times the scale of its block of
128 x 128 elements. These names and shapes, and ``quantization_config`` in ``config.json``, are those of the FP8
checkpoints that DeepSeek and Qwen publish, which vLLM loads. All linear layers within decoder layers are quantized,
experts included. Embeddings, the head, routers, norms, biases and the projection that joins the inputs of an MTP layer
keep their type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from megatron_patches.refit.errors import UnsupportedModelError

BLOCK = 128
"""Rows and columns of a block."""

QUANTIZED = "float8_e4m3fn"
"""Dtype of quantized weights."""

_SCALES = "_scale_inv"
_IN_A_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\.(?:.+\.)?([^.]+)\.weight")
_KEPT = frozenset({"gate", "shared_expert_gate", "eh_proj", "embed_tokens", "head"})

Shape = tuple[int, ...]


class WeightFormat(StrEnum):
    """The format in which weights are sent or exported."""

    TRAINED = "trained"
    """Every tensor has the type that it is trained in."""
    FP8_BLOCK = "fp8_block"
    """Linear layers in block FP8, with scales that are powers of two, as Transformer Engine's ``Float8BlockScaling``
    computes them by default. See [Note: block FP8]."""
    FP8_BLOCK_FP32_SCALES = "fp8_block_fp32_scales"
    """Linear layers in block FP8, with fp32 scales that map the largest weight of each block to 448, as DeepSeek's."""

    @property
    def is_quantized(self) -> bool:
        """Whether linear layers are quantized."""
        return self is not WeightFormat.TRAINED

    @property
    def has_powers_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self is not WeightFormat.FP8_BLOCK_FP32_SCALES


def scales_of(weight: str) -> str:
    """Name of the scales of a quantized weight."""
    return weight + _SCALES


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of a quantized weight."""
    return name.endswith(f".weight{_SCALES}")


def blocks_of(shape: Iterable[int]) -> Shape:
    """How many blocks a tensor has in each dimension."""
    return tuple(-(-extent // BLOCK) for extent in shape)


def is_block_fp8(method: object) -> bool:
    """Whether the ``quantization_config`` of a ``config.json`` is block FP8."""
    return (
        isinstance(method, Mapping)
        and method.get("quant_method") == "fp8"
        and method.get("weight_block_size") == [BLOCK, BLOCK]
        and method.get("fmt", "e4m3") == "e4m3"
    )


def quantized_weights(shapes: Mapping[str, Shape]) -> list[str]:
    """The weights that are quantized; see [Note: block FP8].

    Args:
        shapes: shape of every tensor of the model, by Hugging Face name. Weights that already have scales stay as they
            are.

    Raises:
        UnsupportedModelError: if the model has layers that vLLM does not load in block FP8.
    """
    mixer = next((name for name in shapes if name.endswith(".A_log")), None)
    if mixer is not None:
        raise UnsupportedModelError(
            f"{mixer} belongs to a Mamba mixer, which vLLM does not load in block FP8; choose the format "
            f"{WeightFormat.TRAINED}"
        )
    return [name for name, shape in shapes.items() if _is_quantized(name, shape) and scales_of(name) not in shapes]


def with_scales(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of a model in block FP8.

    Raises:
        UnsupportedModelError: as :func:`quantized_weights`.
    """
    quantized = frozenset(quantized_weights(shapes))
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        found[name] = shape
        if name in quantized:
            found[scales_of(name)] = blocks_of(shape)
    return found


def quantization_config(shapes: Mapping[str, Shape]) -> dict[str, object]:
    """``quantization_config`` of a model in block FP8.

    Args:
        shapes: shapes before quantization.

    Raises:
        UnsupportedModelError: as :func:`quantized_weights`.
    """
    quantized = frozenset(quantized_weights(shapes))
    kept = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) > 1 and name.endswith(".weight") and name not in quantized
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*kept, *([] if "lm_head" in kept else ["lm_head"])],
    }


def _is_quantized(name: str, shape: Shape) -> bool:
    found = _IN_A_LAYER.fullmatch(name)
    return found is not None and len(shape) == 2 and found[1] not in _KEPT
