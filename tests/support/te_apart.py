"""Transformer Engine's MXFP8 on a CPU: what its kernels do, from the definition of the format in fp64, and in no hurry.

Independent of the engine's own quantization, which is compared with it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

_BLOCK = 32
_LARGEST = 448.0
_BLACKWELL = (10, 0)


def mxfp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes ``[rows, columns]`` and exponents ``[rows, columns / 32]`` of a matrix in blocks along its rows."""
    blocks = values.double().unflatten(1, (-1, _BLOCK))
    mantissa, exponent = torch.frexp(blocks.abs().amax(2) / _LARGEST)
    # The least power of two that is not less: of a power of two itself, frexp's mantissa is a half.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(mantissa == 0, -127, exponent)
    scaled = blocks / torch.exp2(exponent.double())[:, :, None]
    return scaled.float().to(torch.float8_e4m3fn).view(torch.uint8).flatten(1), (exponent + 127).to(torch.uint8)


def from_mxfp8(data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers, in fp64, that bytes and exponents as of :func:`mxfp8` stand for."""
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(_BLOCK, 1)
    return data.view(torch.float8_e4m3fn).double() * scales


def _store(place: torch.Tensor, scales: torch.Tensor) -> None:
    """Write scales into their padded tensor, with something arbitrary in its padding."""
    place.fill_(255)
    place[: scales.shape[0], : scales.shape[1]] = scales


def _quantize(tensor: torch.Tensor, into: Any) -> None:
    matrix = tensor.detach().reshape(-1, tensor.shape[-1])
    if into._rowwise_data is not None:
        data, scales = mxfp8(matrix)
        into._rowwise_data.copy_(data.view(into._rowwise_data.shape))
        _store(into._rowwise_scale_inv, scales)
    if into._columnwise_data is not None:
        data, scales = mxfp8(matrix.t())
        into._columnwise_data.copy_(data.t().reshape(into._columnwise_data.shape))
        _store(into._columnwise_scale_inv, scales.t())


def read(tensor: Any, *, rows: bool) -> torch.Tensor:
    """The numbers in fp64, ``[rows, columns]``, that a GEMM takes from an ``MXFP8Tensor``."""
    data = tensor._rowwise_data if rows else tensor._columnwise_data
    scales = tensor._rowwise_scale_inv if rows else tensor._columnwise_scale_inv
    matrix = data.reshape(-1, data.shape[-1])
    down, across = matrix.shape
    assert scales.dtype is torch.uint8
    assert not tensor._with_gemm_swizzled_scales
    edges = (128, 4) if rows else (4, 128)
    blocks = (down, across // _BLOCK) if rows else (down // _BLOCK, across)
    assert scales.shape == tuple(-(-size // edge) * edge for size, edge in zip(blocks, edges, strict=True))
    scales = scales[: blocks[0], : blocks[1]]
    return from_mxfp8(matrix, scales) if rows else from_mxfp8(matrix.t(), scales.t()).t()


def add_kernels(shim: Any) -> None:
    """Let the shim's process be one with a GPU that has MXFP8. Nothing is undone."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import cpp_extensions
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    properties = SimpleNamespace(**{**vars(shim._c.get_device_properties()), "major": 10})
    shim._c.get_device_capability, shim._c.get_device_properties = lambda *_: _BLACKWELL, lambda *_: properties
    others, multiply = tex.quantize, shim._mm

    def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        if not isinstance(quantizer, MXFP8Quantizer):
            return others(tensor, quantizer, output, noop)
        into = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device="cpu") if output is None else output
        into._with_gemm_swizzled_scales = False
        _quantize(tensor, into)
        return into

    def operand(tensor: Any, *, rows: bool) -> Any:
        return read(tensor, rows=rows).float() if isinstance(tensor, MXFP8TensorStorage) else tensor

    def product(first: Any, first_is_transposed: bool, second: Any, second_is_transposed: bool) -> torch.Tensor:
        # A GEMM sums along what both operands have their blocks along.
        left, right = operand(first, rows=first_is_transposed), operand(second, rows=not second_is_transposed)
        result: torch.Tensor = multiply(left, first_is_transposed, right, second_is_transposed)
        return result

    tex.quantize = cpp_extensions.quantize = quantize
    shim._mm = product
