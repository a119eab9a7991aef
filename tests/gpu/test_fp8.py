"""Weights gathered in FP8 under Transformer Engine's own modules and kernels, bit by bit."""

from __future__ import annotations

import pytest

from tests.gpu.devices import needs_fp8, needs_gpus, needs_te
from tests.gpu.launch import run_on_gpus
from tests.multiproc import bodies_fp8 as bodies

pytestmark = [needs_te(), needs_fp8()]
WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (1, 2, 4)]
TRANSPORTS = ["c10d", "copy_engine"]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("recipe", [*bodies.RECIPES, *bodies.DEQUANTIZED])
@pytest.mark.parametrize("kind", bodies.KINDS)
def test_modules_equal_whole_ones(world_size: int, transport: str, recipe: str, kind: str) -> None:
    arguments = ("", recipe, (kind,), transport)
    assert run_on_gpus(bodies.modules_equal_whole, world_size, args=arguments) == [4] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("recipe", bodies.RECIPES)
def test_quantized_shards_are_slices_of_the_quantized_weight(world_size: int, transport: str, recipe: str) -> None:
    for answers in run_on_gpus(bodies.copies_equal_slices, world_size, args=("", recipe, transport)):
        assert len(answers) == 3 * 4
        assert all(answers.values()), answers


@needs_gpus(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layers_in_and_out_of_fp8(transport: str) -> None:
    stored, block = "NoneType", "Float8Block"
    for formats in run_on_gpus(bodies.layers_of_many_recipes, 2, args=("", transport)):
        assert formats[0] == formats[1] == f"{stored} {stored} {block} {block} {stored} {stored}"
        assert formats[2] == f"{stored} {block} {block} Float8PerTensor {stored} {stored}"
        assert formats[3] == " ".join([stored] * 6)
        assert formats[4] == f"{stored} {block} {block} {block} {block} {stored}"


@needs_gpus(2)
def test_what_cannot_be_gathered_in_fp8_is_refused() -> None:
    for answers in run_on_gpus(bodies.refused, 2, args=("",)):
        assert set(answers) == {"alignment", "delayed", "one-dimensional"}
        assert answers["delayed"].startswith("weight is used with a DelayedScaling recipe: its scales come from")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("recipe", bodies.EMULATED)
@pytest.mark.parametrize("kind", bodies.KINDS)
def test_modules_in_nvfp4_equal_whole_ones_in_the_emulation(
    world_size: int, transport: str, recipe: str, kind: str
) -> None:
    """NVFP4, which Hopper cannot multiply: the GEMMs are Transformer Engine's emulation in PyTorch, which loops."""
    arguments = ("", recipe, kind, transport, 80)
    found = run_on_gpus(bodies.emulated_modules_equal_whole, world_size, args=arguments, timeout_s=240)
    assert found == [bodies.multiplied(kind)] * world_size
