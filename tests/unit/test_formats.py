"""Formats of gathered weights: bytes and scales, against definitions in fp64, and the order of the ranks' numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from etp.formats import Float8Block, Float8PerTensor, WeightFormat, amax_of, quantize_blocks, scale_of
from etp.layout import ShardLayout
from etp.stack import Stack

FORMATS: list[WeightFormat] = [Float8Block(), Float8Block(power_of_two=False), Float8PerTensor()]


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[: rows // 3] *= 1e4
    weight[-rows // 3 :, columns // 2 :] *= 1e-30
    weight[:, : columns // 4] = 0
    return weight.bfloat16()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_bring_the_largest_magnitude_to_the_end_of_the_range(power_of_two: bool) -> None:
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(1)).exp2().mul(torch.logspace(-36, 36, 1000))
    scale = scale_of(amax, power_of_two=power_of_two, epsilon=0.0).double()
    exact = 448.0 / amax.double()
    if power_of_two:
        assert torch.equal(scale, exact.log2().floor().exp2())
    else:
        assert ((scale / exact - 1).abs() <= 2.0**-24).all()


def test_scales_of_what_has_no_range() -> None:
    amax = torch.tensor([0.0, math.inf, math.nan, 1e-45])
    assert scale_of(amax, power_of_two=False, epsilon=0.0)[:3].tolist() == [1.0, 1.0, 1.0]
    # 448 / 1e-45 is infinite in fp32.
    assert scale_of(amax, power_of_two=False, epsilon=0.0)[3] == torch.finfo(torch.float32).max
    assert scale_of(amax, power_of_two=True, epsilon=0.0)[3] == 2.0**127
    assert scale_of(amax, power_of_two=False, epsilon=1.0)[0] == 448.0


def test_largest_magnitudes_of_matrices_of_many_sizes_and_types() -> None:
    weights = [_weight(5, 16), -_weight(131, 272, 1).float(), torch.zeros(2, 1), _weight(64, 8, 2)[:, 3:]]
    found = amax_of(weights)
    assert (found.dtype, found.tolist()) == (torch.float32, [max(map(abs, w.flatten().tolist())) for w in weights])


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (131, 272), (5, 16)])
def test_blocks_are_quantized_apart(rows: int, columns: int) -> None:
    weight = _weight(rows, columns)
    quantized, inverse = quantize_blocks(weight)
    assert quantized.shape == weight.shape
    assert inverse.shape == (-(-rows // 128), -(-columns // 128))
    values = quantized.view(torch.float8_e4m3fn).double()
    for (row, column), found in np.ndenumerate(inverse.double().numpy()):
        down, right = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        block, scale = weight[down, right].double(), 1 / found
        amax = block.abs().max()
        assert scale == (1.0 if amax == 0 else (448 / amax).log2().floor().exp2())
        # Half an ulp of three bits, or of the smallest subnormal number.
        error = (values[down, right] - block * scale).abs()
        assert (error <= torch.maximum((block * scale).abs() * 2.0**-4, torch.tensor(2.0**-10))).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_shards_of_quantized_weights_are_quantized_shards(format_: WeightFormat, ranks: int) -> None:
    """The ranks' numbers, of groups of one weight and of several, end where they belong; copies are slices."""
    shapes = [(200, 272), (384, 128), (384, 128), (130, 16)]
    groups = [[0], [1, 2], [3]]
    weights = [_weight(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    layouts = [ShardLayout(shapes[group[0]], ranks, 128) for group in groups]

    def shards(rank: int) -> list[Stack]:
        found = []
        for layout, group in zip(layouts, groups, strict=True):
            start, stop = layout.logical_range(rank)
            padded = [weights[0].new_zeros(layout.shard_shape) for _ in group]
            for shard, index in zip(padded, group, strict=True):
                shard[: stop - start] = weights[index][start:stop]
            found.append(Stack(padded))
        return found

    quantizations = [format_.quantization(shards(rank), layouts) for rank in range(ranks)]
    for quantization in quantizations:
        for copies in quantization.copies:
            for copy in copies:
                copy.fill_(255)
    everyone = torch.stack([quantization.measure().clone() for quantization in quantizations])
    for quantization in quantizations:
        quantization.cast(everyone)
    whole = format_.quantization([Stack([weight]) for weight in weights], [ShardLayout(s, 1, 1) for s in shapes])
    whole.cast(whole.measure().clone().view(1, -1))
    for rank, quantization in enumerate(quantizations):
        for layout, group, copies in zip(layouts, groups, quantization.copies, strict=True):
            start, stop = layout.logical_range(rank)
            for index, copy in zip(group, copies, strict=True):
                assert torch.equal(copy[: stop - start], whole.copies[index][0][start:stop])
                assert not copy[stop - start :].any()


def test_copies_lie_where_the_caller_says() -> None:
    memory = torch.full((3 * 128 * 32,), 7, dtype=torch.uint8)
    shards = [Stack([_weight(128, 32)]), Stack([_weight(128, 32, 1), _weight(128, 32, 2)])]
    quantization = Float8Block().quantization(shards, [ShardLayout((128, 32), 1, 128)] * 2, memory)
    quantization.cast(quantization.measure().view(1, -1))
    assert torch.equal(torch.cat([copy.view(-1) for copies in quantization.copies for copy in copies]), memory)
    assert not (memory == 7).all()


def test_what_cannot_be_cut_is_told() -> None:
    layout = ShardLayout((300, 64), 2, 16)
    assert "cut into shards of 160 rows, which are not multiples of 128" in Float8Block().obstacle(layout)
    assert Float8PerTensor().obstacle(layout) == Float8Block().obstacle(ShardLayout((300, 64), 2, 128)) == ""
    assert "only matrices" in Float8PerTensor().obstacle(ShardLayout((300,), 2, 128))
