"""On a GPU, formats with rows and columns apart have the bytes that they have on a CPU, and gathers move them.

Nothing is multiplied: GPUs before Blackwell cannot.
"""

from __future__ import annotations

import pytest
import torch

from etp.formats import MXFP8, NVFP4, ApartFormat, amax_of, quantize_mxfp8
from etp.formats.apart import ApartQuantization
from etp.layout import ShardLayout
from etp.stack import Stack
from tests.gpu.devices import needs_fp8, needs_gpus, needs_te
from tests.gpu.launch import run_on_gpus
from tests.multiproc.bodies_readings import rows_and_columns

FORMATS: list[ApartFormat] = [MXFP8(), NVFP4(), NVFP4(square=False)]


def drawn(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many sizes, blocks of zeros, and largest ones at powers of two."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp2()
    weight[-rows // 4 :] *= 1e-4
    weight[:32, : columns // 2] = 0
    weight[1, ::32] = 448.0
    return weight.to(dtype)


@needs_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_the_kernels_have_the_bytes_of_the_cpu(format_: ApartFormat, dtype: torch.dtype) -> None:
    shapes = [(32, 32), (160, 288), (1024, 768)]
    layouts = [ShardLayout(shape, 1, 1) for shape in shapes]
    weights = [[drawn(*shape, dtype) * (1 + number) for number in range(2)] for shape in shapes]

    def quantized(device: str) -> list[torch.Tensor]:
        shards = [Stack([weight.to(device) for weight in group]) for group in weights]
        numel = sum(2 * format_.copied(layout) for layout in layouts)
        memory = torch.full((numel,), 255, dtype=torch.uint8, device=device)
        quantization = format_.quantization(shards, layouts, memory)
        assert isinstance(quantization, ApartQuantization)
        quantization.cast(quantization.measure().clone().view(1, -1))
        return [part.cpu() for index in range(len(shapes)) for stack in quantization.published(index) for part in stack]

    found, wanted = quantized("cuda"), quantized("cpu")
    assert len(found) == len(wanted) == 3 * 4 * 2
    for part, other in zip(found, wanted, strict=True):
        assert torch.equal(part, other), f"{(part != other).sum()} of {part.numel()} bytes differ"


@needs_gpus(1)
def test_largest_magnitudes_are_those_of_the_cpu() -> None:
    dtypes = torch.bfloat16, torch.float32, torch.float16, torch.bfloat16
    shapes = (32, 32), (131, 272), (5, 16), (1000, 129)
    weights = [-drawn(*shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    assert amax_of([weight.cuda() for weight in weights]).tolist() == amax_of(weights).tolist()


# Odd numbers of blocks along either side, and as many as Transformer Engine's padding and tiles.
MXFP8_SHAPES = [(32, 32), (96, 160), (160, 288), (128, 128), (352, 96)]


def partial_casts(rank: int, world_size: int, rows: int, columns: int) -> list[bool]:
    """Whether data and scales of rows, and those of columns, have the bytes of Transformer Engine's partial casts.

    Unlike its quantizer, these run on Hopper. They take pieces of a weight, which may end in the middle of a block.
    """
    import transformer_engine.pytorch  # noqa: F401  loads the library that the extension is linked to
    import transformer_engine_torch as tex

    weight = drawn(rows, columns, torch.bfloat16).cuda()
    flat, cut = weight.view(-1), weight.numel() // 3 + 1
    pieces = [(0, flat[:cut]), (cut, flat[cut:].clone())]
    # Scales of rows lie in tiles of 128 x 4, those of columns in tiles of 4 x 128.
    places = [(_up(rows, 128), _up(columns // 32, 4)), (_up(rows // 32, 4), _up(columns, 128))]

    amax = [torch.zeros(place, dtype=weight.dtype, device="cuda") for place in places]
    for start, piece in pieces:
        found = [torch.zeros_like(part) for part in amax]
        tex.mxfp8_scaling_compute_partial_amax(piece, *found, rows, columns, start)
        amax = [torch.maximum(part, other) for part, other in zip(amax, found, strict=True)]
    scales = [torch.zeros(place, dtype=torch.uint8, device="cuda") for place in places]
    tex.multi_tensor_compute_scale_inv_e8m0(65536, None, [amax, scales])
    data = [torch.zeros(weight.numel(), dtype=torch.uint8, device="cuda") for _ in places]
    for start, piece in pieces:
        outputs = [part[start : start + piece.numel()] for part in data]
        tex.mxfp8_scaling_partial_cast(piece, *outputs, *scales, rows, columns, start)

    row_scales, column_scales = scales[0][:rows, : columns // 32], scales[1][: rows // 32, :columns]
    theirs = data[0].view(rows, columns), row_scales, data[1].view(rows, columns), column_scales
    return [torch.equal(part, other) for part, other in zip(theirs, quantize_mxfp8(weight), strict=True)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@needs_te()
@needs_gpus(1)
@pytest.mark.parametrize(("rows", "columns"), MXFP8_SHAPES)
def test_mxfp8_has_the_bytes_of_transformer_engine(rows: int, columns: int) -> None:
    assert run_on_gpus(partial_casts, 1, args=(rows, columns)) == [[True] * 4]


@needs_te()
@needs_fp8()
@needs_gpus(2)
@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_rows_and_columns_are_read_in_any_order(format_: ApartFormat, transport: str) -> None:
    assert run_on_gpus(rows_and_columns, 2, args=("", format_, transport)) == [2 * 3 * (2 * 3 + 6)] * 2
