"""Refuses to push if trainer and engine do not have the same quantized weights, or a scale would corrupt some.

An E4M3 number without its scale is a different number. Its conversion to the type of an engine's weight would be exact,
so the check for narrowing would let it pass. The same holds for other encodings (E5M2, INT8).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_patches.refit.errors import ModelMismatchError, TransferError
from megatron_patches.refit.layout.boxes import Box, TensorSpec
from megatron_patches.refit.layout.dtypes import FLOAT_DTYPES, are_encoded_apart
from megatron_patches.refit.layout.manifest import Manifest, Placement
from megatron_patches.refit.layout.weight_format import BLOCK, QUANTIZED, blocks_of, is_scale, scales_of
from megatron_patches.refit.target.recorded import Recording
from megatron_patches.refit.vllm.recording import record_loading

_ANY_SCALE = re.compile(r"(.+\.weight)_scale.*")


def check_scales(tensors: Sequence[TensorSpec]) -> None:
    """Checks that each quantized weight has scales for blocks of 128 x 128, and that no other weight has scales.

    Some loaders leave out a scale that they do not know, and would take its weight as it is.

    Raises:
        ModelMismatchError: with the name of a weight that has none, or of scales that belong to no such weight.
    """
    by_name = {spec.name: spec for spec in tensors}
    for spec in tensors:
        _check_is_scaled(spec, by_name)
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


def _check_is_scaled(spec: TensorSpec, by_name: Mapping[str, TensorSpec]) -> None:
    """Checks that a tensor, if its name says that it holds scales, holds those of a weight in block FP8."""
    scaled = _ANY_SCALE.fullmatch(spec.name)
    if scaled is None:
        return
    weight = by_name.get(scaled[1])
    if not is_scale(spec.name) or weight is None or weight.dtype != QUANTIZED:
        what = "is missing" if weight is None else f"is {weight.dtype}"
        raise ModelMismatchError(
            f"the trainer has {spec.name}, and {scaled[1]} {what}; engines take scales only as {scales_of(scaled[1])} "
            f"of {QUANTIZED} in blocks of {BLOCK} x {BLOCK}, and other weights as plain numbers without scales"
        )


def check_weight_values(manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> None:
    """Checks that weights are finite, for an engine that quantizes them: another one would make its scale useless.

    Args:
        manifest: what the worker wants.
        parameters: flat memory of every parameter, by name, in the engine's types, which may have a smaller range.

    Raises:
        TransferError: with the box of a weight that is not.
    """
    placements = [place for place in manifest.placements if manifest.storage[place.view.storage].dtype in FLOAT_DTYPES]
    memory = {storage.name: parameters[storage.target] for storage in manifest.storages}
    for box, value in _unusable(placements, memory, -math.inf):
        raise TransferError(f"{box} has a weight of {value}; this engine quantizes weights, which must be finite")


def check_scale_values(manifest: Manifest, arrived: Mapping[str, torch.Tensor]) -> None:
    """Checks that scales are positive and finite. Any other scale would corrupt the weights of its block.

    Args:
        manifest: what the worker wants.
        arrived: flat memory of what came, by storage.

    Raises:
        TransferError: with the box of a scale that is not.
    """
    placements = [place for place in manifest.placements if is_scale(place.box.tensor)]
    if not placements or _are_all_good(dict.fromkeys(place.view.storage for place in placements), arrived):
        return
    for box, value in _unusable(placements, arrived, 0.0):
        raise TransferError(f"{box} has a scale of {value}; it must be positive and finite")


def _are_all_good(names: Iterable[str], arrived: Mapping[str, torch.Tensor]) -> bool:
    """Whether all numbers of storages of scales are positive and finite, as nearly always, in three operations."""
    low, high = torch.stack(torch.aminmax(torch.cat([arrived[name] for name in names]))).tolist()
    return bool(0.0 < low <= high < math.inf)


def _unusable(
    placements: Sequence[Placement], arrived: Mapping[str, torch.Tensor], above: float
) -> Iterator[tuple[Box, float]]:
    """Boxes with a number that is not finite or not above a bound, and the first such number of each."""
    if not placements:
        return
    # All experts of a layer have one storage, and most storages have nothing but scales: few operations, one wait.
    names = dict.fromkeys(place.view.storage for place in placements)
    lowest_and_highest = [torch.stack(torch.aminmax(arrived[name])).float() for name in names]
    bounds = torch.stack(lowest_and_highest).tolist()
    found = {name for name, (low, high) in zip(names, bounds, strict=True) if not above < low <= high < math.inf}
    for place in placements:
        if place.view.storage in found:  # perhaps because of another box
            values = place.view.tensor(arrived[place.view.storage])
            usable = (values > above) & values.isfinite()
            if not usable.all():
                yield place.box, float(values[~usable][0])


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
        if are_encoded_apart(sent, kept):
            raise ModelMismatchError(
                f"{record.tensor} is {sent} in the trainer and {kept} in the engine ({record.storage}); choose the "
                "weight format of the push by the engine's checkpoint, or start the engine from what `refit export` "
                "writes with the same --weight-format"
            )
