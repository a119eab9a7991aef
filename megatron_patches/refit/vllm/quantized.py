"""Refuses to push if trainer and engine do not have the same weights in block FP8.

An E4M3 number without its scale is a different number. Its conversion to the type of an engine's weight would be exact,
so the check for narrowing would let it pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_patches.refit.errors import ModelMismatchError, TransferError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest, Placement
from megatron_patches.refit.layout.weight_format import BLOCK, QUANTIZED, blocks_of, is_scale, scales_of
from megatron_patches.refit.vllm.recording import Recording, record_loading


def check_scales(tensors: Sequence[TensorSpec]) -> None:
    """Checks that each quantized weight has scales for blocks of 128 x 128.

    Raises:
        ModelMismatchError: with the name of a weight that has none.
    """
    by_name = {spec.name: spec for spec in tensors}
    for spec in tensors:
        if spec.dtype != QUANTIZED:
            continue
        scales, wanted = by_name.get(scales_of(spec.name)), blocks_of(spec.shape)
        if scales is None:
            raise ModelMismatchError(f"{spec.name} is {spec.dtype}, and the trainer has no {scales_of(spec.name)}")
        if scales.shape != wanted or scales.dtype != "float32":
            raise ModelMismatchError(
                f"{scales.name} is {scales.dtype} of shape {scales.shape}; {spec.name} of shape {spec.shape} needs "
                f"float32 of shape {wanted}, for blocks of {BLOCK} x {BLOCK}"
            )


def check_scale_values(manifest: Manifest, arrived: Mapping[str, torch.Tensor]) -> None:
    """Checks that scales are positive and finite. Any other scale would corrupt the weights of its block.

    Args:
        manifest: what the worker wants.
        arrived: flat memory of what came, by storage.

    Raises:
        TransferError: with the box of a scale that is not.
    """
    placements = [place for place in manifest.placements if is_scale(place.box.tensor)]
    if not placements:
        return
    # Most storages have nothing but scales, and most scales are good: few operations, one wait.
    names = dict.fromkeys(place.view.storage for place in placements)
    low, high = torch.stack(torch.aminmax(torch.cat([arrived[name] for name in names]))).tolist()
    if 0.0 < low <= high < math.inf:
        return
    lowest_and_highest = [torch.stack(torch.aminmax(arrived[name])) for name in names]
    bounds = torch.stack(lowest_and_highest).tolist()
    suspects = {name for name, (low, high) in zip(names, bounds, strict=True) if not 0.0 < low <= high < math.inf}
    for place in placements:
        if place.view.storage in suspects:
            _check_scales_in(place, arrived)


def _check_scales_in(place: Placement, arrived: Mapping[str, torch.Tensor]) -> None:
    values = place.view.tensor(arrived[place.view.storage])
    usable = (values > 0.0) & values.isfinite()
    if not usable.all():
        raise TransferError(f"{place.box} has a scale of {float(values[~usable][0])}; it must be positive and finite")


def record_in_one_format(load: Any, parameters: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]) -> Recording:
    """:func:`record_loading` of weights that are quantized on both sides or on neither.

    Raises:
        ModelMismatchError: with the name of a weight that is quantized on one side alone.
        UnsupportedModelError: as :func:`record_loading`.
    """
    try:
        recording = record_loading(load, parameters, tensors)
    except Exception:
        # A loader fails at a scale that its layer does not have, in many ways. Without scales, types tell which it is.
        weights = [spec for spec in tensors if not is_scale(spec.name)]
        if len(weights) < len(tensors):
            _check_formats(record_loading(load, parameters, weights), parameters, tensors)
        raise
    _check_formats(recording, parameters, tensors)
    return recording


def _check_formats(recording: Recording, parameters: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]) -> None:
    trained = {spec.name: spec.dtype for spec in tensors}
    for record in recording.copies:
        sent, kept = trained[record.tensor], str(parameters[record.storage].dtype).removeprefix("torch.")
        if (sent == QUANTIZED) != (kept == QUANTIZED):
            raise ModelMismatchError(
                f"{record.tensor} is {sent} in the trainer and {kept} in the engine ({record.storage}); choose the "
                "weight format of the push by the engine's checkpoint, or start the engine from what `refit export` "
                "writes with the same --weight-format"
            )
