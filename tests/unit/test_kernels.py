"""Triton's kernels under its interpreter: equal to PyTorch, bit for bit, at any size."""

from __future__ import annotations

import importlib.util
import itertools
import os

import pytest
import torch

from etp.collectives.sums import accumulate_parts
from etp.formats.fp8_block import quantize_blocks
from etp.stack import Stack
from tests.support.e4m3 import is_near
from tests.support.launch import run_distributed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PARTS = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter truncates to bf16, where a GPU rounds.
SUMS = (torch.float32, torch.float16)


def equals_pytorch(rank: int, world_size: int) -> int:
    """Under the interpreter, which is chosen when the kernel's module is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from etp.collectives import kernels

    torch.manual_seed(0)
    compared = 0
    cases = itertools.product(PARTS, SUMS, (1, 17, 4096, 5000), (False, True), (None, 0, 2), (1, 3))
    for dtype, target, numel, accumulate, place, divisor in cases:
        rows = torch.randn(3, 3, numel).to(dtype)
        # A part's sign survives where all parts are negative zeros.
        rows[:, :, 0] = -0.0
        own = None if place is None else Stack(rows.transpose(0, 1).contiguous().unbind(0))
        parts = rows if place is None else torch.cat([rows[:place], rows[place + 1 :]])
        memory = torch.randn(4, numel).to(target)
        out = memory.clone()
        # From the last to the first, and one further on.
        expected, sinks = (Stack([place[2], place[1], place[3]]) for place in (memory, out))
        accumulate_parts(parts, expected, divisor, accumulate=accumulate, own=own, rank=place or 0)
        kernels.accumulate_parts(parts, sinks, divisor, own, place or 0, accumulate=accumulate)
        assert torch.equal(out, memory)
        assert torch.equal(out.signbit(), memory.signbit())
        compared += 1
    return compared


def test_the_kernel_equals_pytorch() -> None:
    assert run_distributed(equals_pytorch, 1, None, fresh=True) == [3 * 2 * 4 * 2 * 3 * 2]


def sums_parts_far_apart(rank: int, world_size: int) -> list[float]:
    """One block of three parts of 2^30 elements each: the last begins at element 2^31."""
    os.environ["TRITON_INTERPRET"] = "1"
    from etp.collectives.kernels import _BLOCK, _accumulate_parts

    numel, ranks = 1 << 30, 3
    # Address space: only the blocks that are written take memory.
    parts = torch.empty((ranks - 1) * numel + _BLOCK, dtype=torch.int8)
    for index in range(ranks):
        parts[index * numel : index * numel + _BLOCK] = 10**index
    out = torch.zeros(_BLOCK)
    own = torch.full((_BLOCK,), 50, dtype=torch.int8)
    sums = []
    for has_own in (False, True):
        # Without its own row, parts hold one rank's row less, so that there is one more rank.
        _accumulate_parts[(1,)](
            parts,
            own,
            out,
            numel,
            numel,
            0,
            0,
            1.0,
            rank=0,
            world=ranks + has_own,
            has_own=has_own,
            divide=False,
            accumulate=False,
            block=_BLOCK,
        )
        assert (out == out[0]).all()
        sums.append(out[0].item())
    return sums


def test_a_weight_may_have_more_elements_than_32_bits_count() -> None:
    assert run_distributed(sums_parts_far_apart, 1, None, fresh=True) == [[111.0, 161.0]]


def quantizes_tiles(rank: int, world_size: int) -> int:
    """The numbers of all tiles, and that each byte comes from its element: the interpreter does not round to E4M3."""
    os.environ["TRITON_INTERPRET"] = "1"
    from etp.formats import kernels

    torch.manual_seed(0)
    compared = 0
    for dtype, power_of_two in ((torch.bfloat16, True), (torch.float32, False)):
        weights = [torch.randn(shape).to(dtype) for shape in ((128, 128), (150, 130), (1, 7))]
        # One more row, which no tile may touch.
        memory = [torch.full((len(w) + 1, w.shape[1]), 7, dtype=torch.uint8) for w in weights]
        pairs = [(weight, copy[:-1]) for weight, copy in zip(weights, memory, strict=True)]
        expected = [quantize_blocks(weight, power_of_two=power_of_two) for weight in weights]
        places = [0, *itertools.accumulate(scales.numel() for _, scales in expected)]
        steps = [(scales.shape[1], 1) for _, scales in expected]
        numbers = torch.full((places.pop(),), float("nan"))
        table = kernels.TileTable(
            [kernels.Tiled(*pair, place, step) for pair, place, step in zip(pairs, places, steps, strict=True)]
        )
        kernels.quantize_blocks(table, numbers, power_of_two=power_of_two, epsilon=0.0)
        assert torch.equal(numbers, torch.cat([scales.flatten() for _, scales in expected]))
        largest = torch.zeros(len(weights))
        whole = kernels.TileTable([kernels.Tiled(*pair, place) for place, pair in enumerate(pairs)])
        kernels.largest_magnitudes(whole, largest)
        assert torch.equal(largest, torch.stack([weight.float().abs().max() for weight in weights]))
        for (bytes_, _), copy in zip(expected, memory, strict=True):
            assert (copy[-1] == 7).all()
            assert is_near(copy[:-1], bytes_)
            compared += bytes_.numel()
        kernels.cast(whole, 448.0 / largest)
        for weight, copy, magnitude in zip(weights, memory, largest, strict=True):
            cast = (weight.float() * (448.0 / magnitude)).to(torch.float8_e4m3fn).view(torch.uint8)
            assert is_near(copy[:-1], cast)
    return compared


def test_tiles_of_any_size_are_quantized() -> None:
    elements = 128 * 128 + 150 * 130 + 7
    assert run_distributed(quantizes_tiles, 1, None, fresh=True) == [2 * elements]
