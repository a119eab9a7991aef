"""Scales of KV caches in FP8, which a trainer publishes with a version, and the tensors in which they travel.

[Note: KV scales] vLLM stores ``key / k_scale`` and ``value / v_scale`` in FP8. Each scale travels as a tensor of one
fp32 number, planned, proved and verified like a weight. No checkpoint has these tensors. Their names,
``kv_scales/LAYER/k_scale``, contain the trainer's name or number of the layer, by which engines find the layer.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_patches.refit.errors import RefitError

_PREFIX = "kv_scales"
_LAYER = re.compile(r"[0-9A-Za-z_.]+")


@dataclass(frozen=True, kw_only=True)
class KVScales:
    """Scales of one attention layer, as vLLM names them.

    Attributes:
        k_scale: what keys are divided by before they are stored; positive.
        v_scale: what values are divided by before they are stored; positive.
        q_scale: scale of queries, in engines that compute attention in FP8; None leaves the engine's own.
        prob_scale: scale of the attention probabilities, in such engines; None leaves the engine's own.
    """

    k_scale: float
    v_scale: float
    q_scale: float | None = None
    prob_scale: float | None = None


KVScalesOfLayers = Mapping[int | str, KVScales]
"""Scales by attention layer: its number, or its name in the engine (``model.layers.0.self_attn``, with or without the
``.attn`` that vLLM appends)."""

KINDS = tuple(field.name for field in fields(KVScales))


def scale_values(kv_scales: KVScalesOfLayers) -> dict[str, float]:
    """The scales by name of the tensor as which they travel.

    Raises:
        RefitError: naming a layer or a scale that cannot be one.
    """
    found: dict[str, float] = {}
    for layer, scales in kv_scales.items():
        if isinstance(layer, bool) or not _LAYER.fullmatch(str(layer)):
            raise RefitError(f"kv_scales: {layer!r} is neither the number nor the name of an attention layer")
        if f"{_PREFIX}/{layer}/{KINDS[0]}" in found:
            raise RefitError(f"kv_scales: layer {layer} is given twice, as a number and as a text; give it once")
        for kind in KINDS:
            value = getattr(scales, kind)
            if value is None and kind not in ("k_scale", "v_scale"):
                continue
            try:
                (rounded,) = struct.unpack("f", struct.pack("f", value))
            except (struct.error, OverflowError):
                rounded = math.nan
            if not 0.0 < rounded < math.inf:
                raise RefitError(f"kv_scales: {kind} of layer {layer} is {value!r}; it must be positive and finite")
            found[f"{_PREFIX}/{layer}/{kind}"] = rounded
    if not found:
        raise RefitError("kv_scales is empty; give the scales of all attention layers, or None to send none")
    return found


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a scale of a KV cache."""
    return name.startswith(f"{_PREFIX}/")


def split_scale_name(name: str) -> tuple[str, str]:
    """Layer and kind of a tensor for which :func:`is_kv_scale` holds."""
    _, layer, kind = name.split("/")
    return layer, kind
