"""On a GPU, formats with rows and columns apart have the bytes that they have on a CPU, and gathers move them.

Nothing is multiplied: GPUs before Blackwell cannot.
"""

from __future__ import annotations

import pytest
import torch

from etp.formats import MXFP8, NVFP4, ApartFormat
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


@needs_te()
@needs_fp8()
@needs_gpus(2)
@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_rows_and_columns_are_read_in_any_order(format_: ApartFormat, transport: str) -> None:
    assert run_on_gpus(rows_and_columns, 2, args=("", format_, transport)) == [2 * 3 * (2 * 3 + 6)] * 2
