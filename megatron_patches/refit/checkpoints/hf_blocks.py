"""Weights of a checkpoint in block FP8: which they are, and what slices of them are worth.

See [Note: block FP8] in ``refit/layout/weight_format.py``. A slice need not begin or end where a block does. A weight
is its E4M3 number times its scale, multiplied in fp32, and is then rounded once to the model's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles
from megatron_patches.refit.errors import LoadError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.layout.dtypes import FLOAT_DTYPES
from megatron_patches.refit.layout.weight_format import BLOCK, QUANTIZED, blocks_of, is_block_fp8, scales_of


def check_blocks(files: HuggingFaceFiles, names: Iterable[str]) -> frozenset[str]:
    """Checks the scales of the weights in FP8.

    Args:
        files: the checkpoint.
        names: tensors of the model, which the checkpoint has.

    Returns:
        The names of the scales.

    Raises:
        LoadError: if scales are missing or of another shape or type, or ``config.json`` does not say what FP8 means.
    """
    found = set[str]()
    for name in names:
        spec = files.tensors[name].spec
        if spec.dtype != QUANTIZED:
            continue
        if not is_block_fp8(files.config.get("quantization_config")):
            raise LoadError(
                f"{name} is {QUANTIZED}, and config.json has no quantization_config of block FP8 (quant_method fp8, "
                f"weight_block_size [{BLOCK}, {BLOCK}]) that says what it stands for"
            )
        stored = files.tensors.get(scales_of(name))
        if len(spec.shape) != 2 or stored is None:
            raise LoadError(
                f"{name} is {QUANTIZED} of shape {spec.shape} {'with' if stored else 'without'} {scales_of(name)} in "
                f"{files.directory}; only matrices with scales can be loaded"
            )
        if stored.spec.shape != blocks_of(spec.shape) or stored.spec.dtype not in FLOAT_DTYPES:
            raise LoadError(
                f"{stored.spec.name} in {files.directory / stored.file} is {stored.spec.dtype} of shape "
                f"{stored.spec.shape}; the blocks of {name} need {' or '.join(FLOAT_DTYPES)} of shape "
                f"{blocks_of(spec.shape)}"
            )
        found.add(stored.spec.name)
    return frozenset(found)


def scales_box(box: Box) -> Box:
    """The scales of all blocks that a box of a matrix has a part of."""
    return Box(
        scales_of(box.tensor),
        tuple(low // BLOCK for low in box.start),
        tuple(-(-high // BLOCK) for high in box.stop),
    )


def dequantize(values: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
    """The weights of a box, fp32.

    Args:
        values: its E4M3 numbers, [rows, columns].
        scales: those of :func:`scales_box`.
        box: where the values lie in their tensor.
    """
    rows, columns = (
        torch.arange(low, high) // BLOCK - low // BLOCK for low, high in zip(box.start, box.stop, strict=True)
    )
    return values.float().mul_(scales.float()[rows[:, None], columns])


def dequantize_by_block(values: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
    """The same as :func:`dequantize`, computed in another way, for comparison."""
    found = values.to(torch.float32)
    for row, (top, bottom) in enumerate(_cuts(box, 0)):
        for column, (left, right) in enumerate(_cuts(box, 1)):
            found[top:bottom, left:right] *= float(scales[row, column])
    return found


def _cuts(box: Box, dim: int) -> Iterator[tuple[int, int]]:
    """Where each block's part of a box begins and ends in one dimension, counted from the box's first element."""
    low, high = box.start[dim], box.stop[dim]
    for block in range(low // BLOCK, -(-high // BLOCK)):
        yield max(block * BLOCK, low) - low, min((block + 1) * BLOCK, high) - low
