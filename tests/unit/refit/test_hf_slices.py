"""Slices of safetensors files are read to their places, and whatever else lies there is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_patches.refit.checkpoints.hf_blocks import check_blocks
from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles, open_checkpoint
from megatron_patches.refit.checkpoints.hf_slices import read_slices, verify_slices
from megatron_patches.refit.errors import DigestError, LoadError, RefitError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.plan import PartOf, PlanOptions, make_part
from megatron_patches.refit.planning.proof import prove
from tests.support.random_checkpoint import quantized, write_checkpoint

TENSORS = {"a": torch.randn(12, 10), "b": torch.randn(9), "c": torch.randn(4, 3, 5).bfloat16()}
# Rows and columns of a matrix, part of a vector, and all of a smaller matrix, one after another in memory.
PLACES = (
    Placement(Box("a", (3, 2), (11, 7)), View("first", 0, (8, 5), (5, 1))),
    Placement(Box("b", (4,), (9,)), View("first", 40, (5,), (1,))),
    Placement(Box("c", (1, 0, 0), (4, 3, 5)), View("second", 0, (3, 3, 5), (15, 5, 1))),
)


@pytest.fixture
def files(tmp_path: Path) -> HuggingFaceFiles:
    write_checkpoint(tmp_path / "model", {}, TENSORS, files=2)
    return open_checkpoint(tmp_path / "model")


def loaded(files: HuggingFaceFiles, dtype: torch.dtype, staging_bytes: int) -> tuple[dict[str, torch.Tensor], int]:
    """Memory that the places were read into, and the bytes read."""
    name = str(dtype).removeprefix("torch.")
    storages = (Storage("first", name, 45, 45), Storage("second", "float32", 45, 45))
    wanted, source = Manifest(0, "", storages, PLACES), files.manifest(TENSORS)
    options = PlanOptions(conversions=frozenset({("float32", "bfloat16"), ("bfloat16", "float32")}))
    specs = [files.tensors[name].spec for name in TENSORS]
    plan = make_part(specs, [source], [wanted], PartOf("destination", 0), options)
    assert prove(plan, [source], [wanted], options).elements == 90
    memory = {"first": torch.full((45,), torch.nan, dtype=dtype), "second": torch.full((45,), torch.nan)}
    return memory, read_slices(plan.transfers, files, memory, staging_bytes, lambda _: None)


@pytest.mark.parametrize("staging_bytes", [8, 50, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slice_arrives_converted(files: HuggingFaceFiles, dtype: torch.dtype, staging_bytes: int) -> None:
    memory, nbytes = loaded(files, dtype, staging_bytes)
    assert nbytes == 45 * 4 + 45 * 2
    expected = torch.cat([TENSORS["a"][3:11, 2:7].flatten(), TENSORS["b"][4:]]).to(dtype)
    assert torch.equal(memory["first"], expected)
    assert torch.equal(memory["second"], TENSORS["c"][1:].flatten().float())
    verify_slices(PLACES, files, memory, staging_bytes, lambda _: None)


BLOCK_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MATRIX = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("box", [((0, 0), (300, 200)), ((127, 100), (257, 129)), ((5, 130), (6, 200))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_in_block_fp8_begin_and_end_anywhere(
    tmp_path: Path, box: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype
) -> None:
    """The scales are in another file than their weights."""
    stored, meant = quantized({MATRIX: torch.randn(300, 200)})
    write_checkpoint(tmp_path / "model", BLOCK_FP8, stored, files=2)
    files = open_checkpoint(tmp_path / "model")
    assert check_blocks(files, [MATRIX]) == {f"{MATRIX}_scale_inv"}
    (top, left), (bottom, right) = box
    shape, name = (bottom - top, right - left), str(dtype).removeprefix("torch.")
    size = shape[0] * shape[1]
    place = Placement(Box(MATRIX, *box), View("s", 0, shape, (shape[1], 1)))
    wanted = Manifest(0, "", (Storage("s", name, size, size),), (place,))
    options = PlanOptions(conversions=frozenset({("float8_e4m3fn", name)}))
    plan = make_part(
        [files.tensors[MATRIX].spec], [files.manifest([MATRIX])], [wanted], PartOf("destination", 0), options
    )
    prove(plan, [files.manifest([MATRIX])], [wanted], options)
    for staging in (8 * 150, 1 << 20):
        memory = {"s": torch.full((size,), torch.nan, dtype=dtype)}
        assert read_slices(plan.transfers, files, memory, staging, lambda _: None) == size
        assert torch.equal(memory["s"].view(shape), meant[MATRIX][top:bottom, left:right].to(dtype))
        verify_slices([place], files, memory, 8 * 170, lambda _: None)
    damaged = stored[f"{MATRIX}_scale_inv"].clone()
    damaged[bottom // 128, right // 128 - (right % 128 == 0)] *= 1.5
    write_checkpoint(tmp_path / "other", BLOCK_FP8, stored | {f"{MATRIX}_scale_inv": damaged}, files=2)
    with pytest.raises(DigestError, match=r"s does not hold what model-0000.* has of model.layers.0.mlp.up_proj.wei"):
        verify_slices([place], open_checkpoint(tmp_path / "other"), memory, 1 << 20, lambda _: None)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, {}, "is float8_e4m3fn, and config.json has no quantization_config of block FP8"),
        (BLOCK_FP8, {f"{MATRIX}_scale_inv": None}, r"without model.layers.0.mlp.up_proj.weight_scale_inv in "),
        (BLOCK_FP8, {f"{MATRIX}_scale_inv": torch.ones(3, 1)}, r"is float32 of shape \(3, 1\); .* of shape \(3, 2\)"),
        (BLOCK_FP8, {f"{MATRIX}_scale_inv": torch.ones(3, 2).double()}, "is float64 of shape"),
        (BLOCK_FP8, {MATRIX: torch.ones(2, 2, 2).to(torch.float8_e4m3fn)}, "only matrices with scales can be loaded"),
    ],
)
def test_fp8_without_the_scales_of_its_blocks_is_refused(
    tmp_path: Path, config: dict[str, object], change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {**quantized({MATRIX: torch.randn(300, 200)})[0], **change}
    given = {name: values for name, values in tensors.items() if values is not None}
    write_checkpoint(tmp_path / "model", config, given)
    with pytest.raises(LoadError, match=message):
        check_blocks(open_checkpoint(tmp_path / "model"), [MATRIX])


def test_a_number_too_large_for_the_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", {}, {"w": torch.tensor([1.0, 2.0, 1e5, float("inf")])})
    files = open_checkpoint(tmp_path / "model")
    box = Box("w", (1,), (4,))
    wanted = Manifest(0, "", (Storage("s", "float16", 3, 3),), (Placement(box, View("s", 0, (3,), (1,))),))
    options = PlanOptions(conversions=frozenset({("float32", "float16")}))
    plan = make_part([files.tensors["w"].spec], [files.manifest(["w"])], [wanted], PartOf("destination", 0), options)
    with pytest.raises(RefitError, match=r"w\[1:4\] has a weight of 100000.0, .* float16; .* bfloat16 or float32"):
        read_slices(plan.transfers, files, {"s": torch.zeros(3).half()}, 1 << 20, lambda _: None)


def _flip(memory: dict[str, torch.Tensor]) -> None:
    memory["first"].view(torch.int32)[17] ^= 1


def _swap(memory: dict[str, torch.Tensor]) -> None:
    memory["first"][[3, 8]] = memory["first"][[8, 3]]


def _shift(memory: dict[str, torch.Tensor]) -> None:
    memory["second"].copy_(memory["second"].roll(1))


@pytest.mark.parametrize("damage", [_flip, _swap, _shift])
def test_other_values_in_memory_are_found(
    files: HuggingFaceFiles, damage: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    memory, _ = loaded(files, torch.float32, 1 << 20)
    damage(memory)
    with pytest.raises(DigestError, match=r"(first|second) does not hold what model-0000.* has of [ac]\["):
        verify_slices(PLACES, files, memory, 64, lambda _: None)
