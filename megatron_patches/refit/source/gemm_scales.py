"""Compares the format in which weights are sent with that in which a Megatron trainer's own GEMMs multiply them."""

from __future__ import annotations

from etp.te import FP32_SCALES_VARIABLE, block_scales_are_powers_of_two
from megatron_patches.refit.layout.weight_format import WeightFormat

_BLOCKWISE = "fp8_recipe blockwise"


def why_other_scales(trained: object, sent: WeightFormat, option: str) -> str:
    """Why engines would get other scales than those of a trainer's GEMMs in block FP8; empty if they would not.

    Layers that such a trainer leaves in bf16 do not matter: either kind of scales is right for them.

    Args:
        trained: Megatron's configuration of the model, or its arguments, which have fields of the same names.
        sent: the format in which weights are sent.
        option: what its option or flag is called, for the message.
    """
    powers = block_scales_are_powers_of_two
    if not sent.is_quantized or _recipe(trained) != _BLOCKWISE or powers() is sent.has_powers_of_two:
        return ""
    kind, other, train = "fp32 scales", WeightFormat.FP8_BLOCK_FP32_SCALES, "without"
    if powers():
        kind, other, train = "scales that are powers of two", WeightFormat.FP8_BLOCK, "with"
    return (
        f"{option} is {sent}, and with {_BLOCKWISE} the trainer's GEMMs have {kind}: engines would compute with other "
        f"weights than the trainer; use {other}, or train {train} {FP32_SCALES_VARIABLE}=1 in every rank's environment"
    )


def why_other_numbers(trained: object, sent: WeightFormat, option: str) -> str:
    """What to know where a trainer's GEMMs quantize weights, but not in blocks as those that are sent; or empty.

    Arguments are those of :func:`why_other_scales`.
    """
    recipe = _recipe(trained)
    if not sent.is_quantized or recipe in ("", _BLOCKWISE):
        return ""
    return (
        f"{option} is {sent}, and with {recipe} the trainer's GEMMs quantize weights otherwise; engines compute with "
        "slightly different weights"
    )


def _recipe(trained: object) -> str:
    """The field with the recipe of the GEMMs and its value; empty if they do not quantize."""
    for kind in ("fp8", "fp4"):
        if getattr(trained, kind, None):
            recipe = getattr(trained, f"{kind}_recipe", None)
            return f"{kind}_recipe {getattr(recipe, 'value', recipe)}"
    return ""
