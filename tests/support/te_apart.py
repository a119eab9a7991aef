"""Transformer Engine's MXFP8 and NVFP4 on a CPU: what its kernels do, by definitions in fp64 or its own reference.

Independent of the engine's own quantization, which is compared with it.
"""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 32
_FP4_BLOCK = 16
_LARGEST = 448.0
_BLACKWELL = (10, 0)
_PARTS = (
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
    "_amax_rowwise",
    "_amax_columnwise",
)


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


def _padded(blocks: tuple[int, int], *, rows: bool) -> tuple[int, ...]:
    edges = (128, 4) if rows else (4, 128)
    return tuple(-(-size // edge) * edge for size, edge in zip(blocks, edges, strict=True))


def _store(place: torch.Tensor, scales: torch.Tensor) -> None:
    """Write scales into their padded tensor, with something arbitrary in its padding."""
    place.fill_(255)
    place[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)


def _quantize_mxfp8(matrix: torch.Tensor, into: Any) -> None:
    if into._rowwise_data is not None:
        data, scales = mxfp8(matrix)
        into._rowwise_data.copy_(data.view(into._rowwise_data.shape))
        _store(into._rowwise_scale_inv, scales)
    if into._columnwise_data is not None:
        data, scales = mxfp8(matrix.t())
        into._columnwise_data.copy_(data.t().reshape(into._columnwise_data.shape))
        _store(into._columnwise_scale_inv, scales.t())


def reference_nvfp4(matrix: torch.Tensor, *, square: bool) -> tuple[torch.Tensor, ...]:
    """Transformer Engine's own reference: numbers and scales of the rows, of the columns, and the largest magnitude.

    Those of the columns are of the transposed matrix.
    """
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    shape = (_FP4_BLOCK if square else 1, _FP4_BLOCK)
    quantizer = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=shape)
    data, scales, column_data, column_scales, amax, _ = quantizer._quantize(matrix)
    return data, scales.view(torch.uint8), column_data, column_scales.view(torch.uint8), amax


def _quantize_nvfp4(matrix: torch.Tensor, into: Any, *, square: bool) -> None:
    if not matrix.numel():  # no token came to an expert, and the reference would take the largest of nothing
        return
    data, scales, column_data, column_scales, amax = reference_nvfp4(matrix, square=square)
    if into._rowwise_data is not None:
        into._rowwise_data.copy_(data.view(into._rowwise_data.shape))
        into._amax_rowwise.copy_(amax)
        _store(into._rowwise_scale_inv, scales)
    if into._columnwise_data is not None:
        into._columnwise_data.copy_(column_data.reshape(into._columnwise_data.shape))
        into._amax_columnwise.copy_(amax)
        _store(into._columnwise_scale_inv, column_scales)


def from_nvfp4(data: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The numbers, in fp64, that ``[rows, columns / 2]`` bytes and ``[rows, columns / 16]`` scales stand for."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    numbers = torch.cat([sizes, -sizes])[torch.stack([data & 15, data >> 4], dim=2).flatten(1).long()]
    factors = scales.view(torch.float8_e4m3fn).double().repeat_interleave(_FP4_BLOCK, 1)
    return numbers * factors * (amax.double() / (6 * _LARGEST))


def read(tensor: Any, *, rows: bool) -> torch.Tensor:
    """The numbers in fp64, ``[rows, columns]``, that a GEMM takes from an ``MXFP8Tensor`` or an ``NVFP4Tensor``."""
    data = tensor._rowwise_data if rows else tensor._columnwise_data
    scales = tensor._rowwise_scale_inv if rows else tensor._columnwise_scale_inv
    fp4 = hasattr(tensor, "_amax_rowwise")
    # Columns of FP4 are those of the transposed matrix.
    matrix = data.reshape(len(data), -1) if fp4 and not rows else data.reshape(-1, data.shape[-1])
    down, across = matrix.shape
    assert matrix.is_contiguous()
    assert scales.is_contiguous()
    assert scales.dtype is torch.uint8
    assert not tensor._with_gemm_swizzled_scales
    if fp4:
        blocks = down, 2 * across // _FP4_BLOCK
        assert scales.shape == _padded(blocks, rows=True)
        amax = tensor._amax_rowwise if rows else tensor._amax_columnwise
        assert amax.shape == (1,)
        found = from_nvfp4(matrix, scales[: blocks[0], : blocks[1]].contiguous(), amax)
        return found if rows else found.t()
    blocks = (down, across // _BLOCK) if rows else (down // _BLOCK, across)
    assert scales.shape == _padded(blocks, rows=rows)
    scales = scales[: blocks[0], : blocks[1]]
    return from_mxfp8(matrix, scales) if rows else from_mxfp8(matrix.t(), scales.t()).t()


def _empty(quantizer: Any, like: torch.Tensor) -> Any:
    """A tensor of the quantizer's, without the extension, which would ask a driver."""
    specs = quantizer.inner_tensor_specs(like.shape)
    parts = {name: torch.empty(specs[name][0], dtype=torch.uint8) if name in specs else None for name in _PARTS[:4]}
    made = quantizer.storage_metadata(like.dtype)
    options = made["nontensor_kwargs"]
    if hasattr(quantizer, "row_scaled_nvfp4"):
        parts |= {name: torch.empty(1) if name in specs else None for name in _PARTS[4:]}
    if not quantizer.internal:
        options = {**options, "shape": like.shape, "dtype": options.pop("fake_dtype"), "device": like.device}
    return made["cls"](**{name.removeprefix("_"): part for name, part in parts.items()}, **options)


def add_kernels(shim: Any) -> None:
    """Let the shim's process be one with a GPU that has MXFP8 and NVFP4. Nothing is undone.

    Activations and gradients in NVFP4 are quantized as without rotations and without random rounding.
    """
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import cpp_extensions, quantization
    from transformer_engine.pytorch.tensor import nvfp4_tensor
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    shim._c.get_device_capability = lambda *_: _BLACKWELL
    quantization._MXFP8_SUPPORT = quantization._NVFP4_SUPPORT = True, ""
    nvfp4_tensor.get_rht_matrix = lambda *_: torch.eye(_FP4_BLOCK, dtype=torch.bfloat16)
    nvfp4_tensor.get_random_sign_mask_for_rht = lambda *_: 0
    others, multiply = tex.quantize, shim._mm

    def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        if not isinstance(quantizer, MXFP8Quantizer | nvfp4_tensor.NVFP4Quantizer):
            return others(tensor, quantizer, output, noop)
        into = _empty(quantizer, tensor) if output is None else output
        into._with_gemm_swizzled_scales = False
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        if isinstance(quantizer, MXFP8Quantizer):
            _quantize_mxfp8(matrix, into)
        else:
            _quantize_nvfp4(matrix, into, square=quantizer.with_2d_quantization)
        return into

    def operand(tensor: Any, *, rows: bool) -> Any:
        apart = isinstance(tensor, MXFP8TensorStorage | NVFP4TensorStorage)
        return read(tensor, rows=rows).float() if apart else tensor

    def product(first: Any, first_is_transposed: bool, second: Any, second_is_transposed: bool) -> torch.Tensor:
        # A GEMM sums along what both operands have their blocks along.
        left, right = operand(first, rows=first_is_transposed), operand(second, rows=not second_is_transposed)
        result: torch.Tensor = multiply(left, first_is_transposed, right, second_is_transposed)
        return result

    tex.quantize = cpp_extensions.quantize = quantize
    shim._mm = product
