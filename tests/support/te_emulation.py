"""NVFP4 on GPUs that cannot multiply it, and on CPUs: Transformer Engine's own emulation of the recipe.

The emulation is a ``CustomRecipe`` whose quantizers and GEMMs are plain PyTorch. Sharded weights refuse custom recipes.
Here they are gathered as under ``NVFP4BlockScaling``, and the emulation multiplies the tensors that a GEMM on Blackwell
would get.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from etp import param
from etp.formats import NVFP4

_BLOCK = 16


def recipe(*, square: bool) -> Any:
    """Weights in blocks of 16 x 16 or of 16; inputs and gradients in blocks of 16, rotated where wgrad reads them."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, nvfp4_ref_rht_2d_factory
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    def quantizer(role: Any) -> Any:
        if square or role is None or role.tensor_type != "weight":
            return nvfp4_ref_rht_2d_factory(role)
        return NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=(1, _BLOCK))

    return CustomRecipe(qfactory=quantizer)


def _as_reference(tensor: Any, multiplied: list[str]) -> Any:
    """A gathered weight as the emulation's own class, around the same memory. Other operands as they are."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4TensorRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
    from transformer_engine.pytorch.tensor import NVFP4Tensor

    if not isinstance(tensor, NVFP4Tensor):
        return tensor
    rows, columns = tensor.shape

    def scales(held: torch.Tensor | None, down: int, across: int) -> torch.Tensor | None:
        return None if held is None else held[:down, : across // _BLOCK].view(torch.float8_e4m3fn)

    by_rows = tensor._rowwise_data is not None
    assert by_rows == (tensor._columnwise_data is None)
    multiplied.append("rows" if by_rows else "columns")
    amax = tensor._amax_rowwise if by_rows else tensor._amax_columnwise
    return NVFP4TensorRef(
        data=tensor._rowwise_data,
        scale=scales(tensor._rowwise_scale_inv, rows, columns),
        data_t=tensor._columnwise_data,
        scale_t=scales(tensor._columnwise_scale_inv, columns, rows),
        global_amax_row=amax,
        global_amax_col=amax,
        dtype=tensor.dtype,
        device=tensor.device,
        quant_dtype=Fp4Formats.E2M1,
        original_shape=tensor.shape,
    )


@contextmanager
def emulating(*, square: bool) -> Iterator[list[str]]:
    """Let sharded modules run under the :func:`recipe` of the same blocks.

    Three things that the emulation lacks are added for whole modules as well: it ignores the tensor that a result is
    to be written or added to, its tensors ignore the argument of ``size``, and it has no grouped GEMM.

    Yields:
        "rows" or "columns" for each gathered weight that was multiplied, by what was gathered.
    """
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4TensorRef
    from transformer_engine.pytorch.module import grouped_linear

    def size(self: Any, dim: int | None = None) -> Any:
        shape = torch.Size(self.original_shape)
        return shape if dim is None else shape[dim]

    format_, multiply, multiplied = NVFP4(square), gemm.custom_gemm, list[str]()

    def custom_gemm(first: Any, second: Any, *args: Any, **options: Any) -> Any:
        # In the order of TE's only call: workspace, out_dtype, quantization_params, gelu, gelu_in, accumulate, layout,
        # out.
        accumulate, out = args[5], args[7]
        result, *others = multiply(_as_reference(first, multiplied), second, *args, **options)
        if out is None:
            return result, *others
        (out.add_ if accumulate else out.copy_)(result)
        return out, *others

    def general_grouped_gemm(
        first: Sequence[Any],
        second: Sequence[Any],
        out: Sequence[torch.Tensor],
        *_: Any,
        single_output: bool = False,
        m_splits: list[int] | None = None,
        use_bias: bool | None = False,
        bias: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        assert not use_bias
        places = out[0].split(m_splits or []) if single_output else out
        options.pop("quantization_params", None)
        for one, other, place in zip(first, second, places, strict=True):
            gemm.general_gemm(one, other, **{**options, "out": place, "out_dtype": place.dtype})
        return out, [None] * len(places), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(param, "active_format", lambda *_: format_)
        patch.setattr(NVFP4TensorRef, "size", size)
        patch.setattr(gemm, "custom_gemm", custom_gemm)
        patch.setattr(grouped_linear, "general_grouped_gemm", general_grouped_gemm)
        yield multiplied
