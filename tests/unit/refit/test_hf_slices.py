"""Slices of safetensors files are read to their places, and whatever else lies there is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles, open_checkpoint
from megatron_patches.refit.checkpoints.hf_slices import read_slices, verify_slices
from megatron_patches.refit.errors import DigestError, RefitError
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.planning.plan import PartOf, PlanOptions, make_part
from megatron_patches.refit.planning.proof import prove
from tests.support.random_checkpoint import write_checkpoint

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
