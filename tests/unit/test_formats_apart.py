"""Formats whose rows and columns are quantized apart: bytes against definitions in fp64, shards against wholes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from etp.formats import MXFP8, NVFP4, ApartFormat, quantize_mxfp8, quantize_nvfp4
from etp.formats.apart import ApartQuantization, padded_scales
from etp.layout import ShardLayout
from etp.stack import Stack
from etp.te import too_old_for
from tests.support import te_apart
from tests.support.launch import run_distributed

FORMATS: list[ApartFormat] = [MXFP8(), NVFP4(), NVFP4(square=False)]
SHAPES = [(32, 32), (96, 64), (160, 288), (64, 416)]


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, among them zeros, blocks of zeros, negative zeros, and largest ones at powers of two."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp2()
    weight[: rows // 3] *= 1e4
    weight[-rows // 3 :, columns // 2 :] *= 1e-30
    weight[:, : columns // 4] = 0
    weight[0], weight[1, ::32] = -0.0, 448.0
    weight[2, ::32] = 448.0 * 2.0**-20
    return weight.bfloat16()


def short(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Numbers of three bits and few sizes, which are exact in E4M3 whatever the scale; and blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(8, 16, (rows, columns), generator=generator)
    exponent = torch.randint(-3, 4, (rows, columns), generator=generator)
    weight = torch.ldexp(mantissa.float(), exponent) * (1 - 2 * torch.randint(2, (rows, columns), generator=generator))
    weight[:, :32] = 0
    weight[:32, -1:] = 0
    return weight


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8_is_its_definition(shape: tuple[int, int]) -> None:
    weight = drawn(*shape)
    data, scales, column_data, column_scales = quantize_mxfp8(weight)
    for found, wanted in zip((data, scales), te_apart.mxfp8(weight), strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip((column_data, column_scales), te_apart.mxfp8(weight.t()), strict=True):
        assert torch.equal(found, wanted.t())


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8_errs_within_half_a_step(shape: tuple[int, int]) -> None:
    weight = drawn(*shape, seed=1)
    data, scales, column_data, column_scales = quantize_mxfp8(weight)
    rows = te_apart.from_mxfp8(data, scales)
    columns = te_apart.from_mxfp8(column_data.t(), column_scales.t()).t()
    along = weight.double().unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1)
    down = weight.double().unflatten(0, (-1, 32)).abs().amax(1).repeat_interleave(32, 0)
    for found, largest in ((rows, along), (columns, down)):
        # Half a unit of three bits; below the least normal number of E4M3, of which the block's largest is at least
        # 224 / 2^-6 times, of that number.
        bound = torch.maximum(weight.double().abs() * 2.0**-4, largest * (2.0**-10 / 224))
        assert ((found - weight.double()).abs() <= bound).all()


def test_scales_are_rounded_up_and_stay_in_range() -> None:
    weight = torch.zeros(32, 160)
    # Inverse scales of the five blocks: a power of two, a little more, the least, none, infinite.
    weight[0, ::32] = torch.tensor([448.0, 449.0, 448.0 * 2.0**-130, 0.0, torch.inf])
    data, scales, _, _ = quantize_mxfp8(weight)
    assert scales[0].tolist() == [127, 128, 0, 0, 254]
    assert data[0, ::32].view(torch.float8_e4m3fn).tolist() == [448.0, 224.0, 56.0, 0.0, 448.0]


def _shards(layout: ShardLayout, weights: Sequence[torch.Tensor], rank: int) -> Stack:
    start, stop = layout.logical_range(rank)
    padded = [weights[0].new_zeros(layout.shard_shape) for _ in weights]
    for shard, weight in zip(padded, weights, strict=True):
        shard[: stop - start] = weight[start:stop]
    return Stack(padded)


def _cast(quantizations: Sequence[ApartQuantization[Any]]) -> None:
    numbers = torch.stack([quantization.measure().clone() for quantization in quantizations])
    for quantization in quantizations:
        quantization.cast(numbers)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [False, True])
def test_gathered_shards_are_the_quantized_whole(format_: ApartFormat, ranks: int, columns: bool) -> None:
    shapes = [(96, 64), (160, 288), (160, 288), (64, 416)]
    groups = [[0], [1, 2], [3]]
    weights = [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    layouts = [ShardLayout(shapes[group[0]], ranks, 32) for group in groups]

    def quantization(layouts: Sequence[ShardLayout], shards: Sequence[Stack]) -> ApartQuantization[Any]:
        sizes = [len(stack) * format_.copied(layout) for stack, layout in zip(shards, layouts, strict=True)]
        made = format_.quantization(shards, layouts, torch.full((sum(sizes),), 255, dtype=torch.uint8))
        assert isinstance(made, ApartQuantization)
        return made

    members = [[[weights[i] for i in group] for group in groups] for _ in range(ranks)]
    quantizations = [
        quantization(
            layouts, [_shards(layout, each, rank) for layout, each in zip(layouts, members[rank], strict=True)]
        )
        for rank in range(ranks)
    ]
    _cast(quantizations)
    wholes = [ShardLayout(shape, 1, 1) for shape in shapes]
    whole = quantization(wholes, [Stack([weight]) for weight in weights])
    _cast([whole])
    for index, (layout, group) in enumerate(zip(layouts, groups, strict=True)):
        (size,) = format_.gathered_shape(layout)
        slot = Stack(torch.full((len(group), size), 255, dtype=torch.uint8).unbind(0))
        for rank, own in enumerate(quantizations):
            for place, copies in own.moved(index, slot, columns=columns):
                for output, copy in zip(place, copies, strict=True):
                    output.view(ranks, -1)[rank] = copy.view(-1)
        logical = format_.parts(layout.shape, columns=columns)
        for part, shape, of_whole in zip(
            quantizations[0].within(index, slot, columns=columns), logical, (2, 3) if columns else (0, 1), strict=True
        ):
            for found, number in zip(part, group, strict=True):
                assert torch.equal(found[: shape[0]], whole.published(number)[of_whole][0])
                assert not found[shape[0] :].any(), "zeros have the scale of zero"
        assert slot[0].numel() == sum(part[0].numel() for part in quantizations[0].within(index, slot, columns=columns))


def test_scales_are_copied_only_where_the_gathered_ones_are_too_few() -> None:
    scales = torch.randint(256, (3, 256, 8), dtype=torch.uint8)
    assert padded_scales(scales, (130, 8), (128, 4)).data_ptr() == scales.data_ptr()
    assert padded_scales(scales, (130, 8), (128, 4)).shape == (3, 256, 8)
    for logical in ((257, 8), (130, 7)):
        few = scales.repeat(1, 2, 1)[:, : logical[0], : logical[1]].contiguous()
        padded = padded_scales(few, logical, (128, 4))
        assert padded.shape == (3, -(-logical[0] // 128) * 128, 8)
        assert torch.equal(padded[:, : logical[0], : logical[1]], few)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_what_cannot_be_quantized_is_told(format_: ApartFormat) -> None:
    assert format_.obstacle(ShardLayout((320, 64), 2, 32)) == ""
    assert "rows and columns must be multiples of 32" in format_.obstacle(ShardLayout((320, 72), 2, 32))
    assert "rows and columns must be multiples of 32" in format_.obstacle(ShardLayout((328, 64), 2, 32))
    assert "only matrices" in format_.obstacle(ShardLayout((320,), 2, 32))


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_a_gpu_that_is_too_old_is_told(format_: ApartFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_old_for(type(format_)) == "", "there is none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, told in (((9, 0), True), ((10, 0), False), ((10, 3), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        wanted = f"{format_.name} needs GPUs of compute capability 10.0 (Blackwell), and this one has 9.0"
        assert too_old_for(type(format_)) == (wanted if told else "")


def test_mxfp8_shards_are_whole_blocks() -> None:
    assert "pass pad_for_alignment=32" in MXFP8().obstacle(ShardLayout((288, 64), 2, 16))


def kernels_equal_pytorch(rank: int, world_size: int) -> int:
    """Under the interpreter, which is chosen when the kernels' module is imported.

    It does not round to E4M3 as GPUs do: these are numbers that need no rounding.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from etp.formats import kernels_apart

    compared = 0
    for dtype in (torch.float32, torch.float16):
        weights = [short(*shape, seed=seed).to(dtype) for seed, shape in enumerate(SHAPES)]
        amaxes = torch.zeros(len(weights), 4)
        for kind in (None, True, False):
            if kind is None:
                wanted = [quantize_mxfp8(weight) for weight in weights]
            else:
                wanted = [
                    quantize_nvfp4(weight, amax, square=kind)
                    for weight, amax in zip(weights, amaxes[:, 0], strict=True)
                ]
            found = [tuple(torch.full(part.shape, 77, dtype=torch.uint8) for part in parts) for parts in wanted]
            rows = [(index, (weight, *parts)) for index, (weight, parts) in enumerate(zip(weights, found, strict=True))]
            table = kernels_apart.ApartTable(rows)
            if kind is None:
                kernels_apart.quantize_mxfp8(table)
                # So that scales are multiples of the weights' largest magnitudes, which need no rounding either.
                amaxes[:, 0] = 2688.0
            else:
                kernels_apart.quantize_nvfp4(table, amaxes, square=kind)
            for parts, others in zip(found, wanted, strict=True):
                for part, other in zip(parts, others, strict=True):
                    assert torch.equal(part, other)
                    compared += 1
    return compared


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_equal_pytorch() -> None:
    assert run_distributed(kernels_equal_pytorch, 1, None, fresh=True) == [2 * 3 * 4 * 4]
