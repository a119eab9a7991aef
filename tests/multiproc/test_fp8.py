"""Weights gathered in FP8 under Transformer Engine's own modules, without a GPU: bytes, scales, and who asks for what.

The arithmetic of FP8 is that of a stand-in; tests/gpu/test_fp8.py has the real kernels. Transformer Engine's files are
unpacked for the processes of these tests alone: see :mod:`tests.support.te_site`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from etp.formats import MXFP8, NVFP4, ApartFormat
from tests.multiproc import bodies_fp8 as bodies
from tests.multiproc.bodies_readings import rows_and_columns
from tests.support.launch import run_distributed
from tests.support.prepared import te_on_cpu
from tests.support.te_site import MARKS, SHARED, on_path

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("tests/gpu/test_fp8.py runs the real kernels"), *MARKS]


@pytest.fixture(scope="module", autouse=True)
def transformer_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformer Engine where fresh processes find it."""
    with on_path(tmp_path_factory.mktemp("site")):
        yield


def test_modules_equal_whole_ones() -> None:
    arguments = (str(SHARED), "Float8BlockScaling", bodies.KINDS, "c10d")
    assert run_distributed(bodies.modules_equal_whole, 2, args=arguments, fresh=True, prepared=te_on_cpu) == [12, 12]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "GroupedLinear" else [pytest.mark.slow]) for kind in bodies.KINDS]
)
def test_a_backward_pass_may_multiply_dequantized_weights(kind: str) -> None:
    """With ``backward_override="dequantized"``, of the columns, which stand for the numbers of the rows."""
    arguments = (str(SHARED), bodies.DEQUANTIZED[0], (kind,), "c10d")
    assert run_distributed(bodies.modules_equal_whole, 2, args=arguments, fresh=True, prepared=te_on_cpu) == [4, 4]


def test_quantized_shards_are_slices_of_the_quantized_weight() -> None:
    for answers in run_distributed(
        bodies.copies_equal_slices, 2, args=(str(SHARED), "Float8BlockScaling", "c10d"), fresh=True, prepared=te_on_cpu
    ):
        assert len(answers) == 3 * 4
        assert all(answers.values()), answers


def test_layers_in_and_out_of_fp8() -> None:
    stored, block = "NoneType", "Float8Block"
    for formats in run_distributed(
        bodies.layers_of_many_recipes, 2, args=(str(SHARED), "c10d"), fresh=True, prepared=te_on_cpu
    ):
        assert formats[0] == formats[1] == f"{stored} {stored} {block} {block} {stored} {stored}"
        assert formats[3] == " ".join([stored] * 6)
        assert formats[4] == " ".join([stored, *[block] * 4, stored])


@pytest.mark.parametrize("recipe", ["Float8BlockScaling", pytest.param("NVFP4BlockScaling", marks=pytest.mark.slow)])
def test_a_training_may_begin_with_an_evaluation_in_inference_mode(recipe: str) -> None:
    answers = run_distributed(
        bodies.trained_after_inference, 2, args=(str(SHARED), recipe), fresh=True, prepared=te_on_cpu
    )
    assert answers == [[True] * 2 * len(bodies.KINDS)] * 2


@pytest.mark.parametrize("recipe", ["Float8BlockScaling", pytest.param("MXFP8BlockScaling", marks=pytest.mark.slow)])
def test_each_backward_pass_has_the_precision_of_its_forward_pass(recipe: str) -> None:
    for answers in run_distributed(
        bodies.used_in_two_precisions, 2, args=(str(SHARED), recipe), fresh=True, prepared=te_on_cpu
    ):
        assert len(answers) == 6 * len(bodies.KINDS)
        assert all(answers.values()), answers


def test_what_cannot_be_gathered_in_fp8_is_refused() -> None:
    for answers in run_distributed(bodies.refused, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu):
        assert set(answers) == {"alignment", "one-dimensional"}
        assert answers["alignment"] == (
            "weight is used under a recipe for block-scaled FP8, but it is cut into shards of 192 rows, which are not "
            "multiples of 128: pass pad_for_alignment=128 in etp.EtpConfig (in Megatron, --etp-pad-for-alignment 128)"
        )
        assert "blocks of 1 x 128" in answers["one-dimensional"]


def test_formats_follow_the_variables_of_transformer_engine() -> None:
    arguments = (str(SHARED),)
    (found,) = run_distributed(bodies.formats_of_variables, 1, args=arguments, fresh=True, prepared=te_on_cpu)
    for (variable, expected), one in zip(bodies.VARIABLES.items(), found, strict=True):
        assert one.startswith(expected), variable


@pytest.mark.parametrize(
    ("recipe", "ranks", "alignment", "kinds"),
    [
        ("MXFP8BlockScaling", 2, 32, bodies.KINDS),
        pytest.param("NVFP4BlockScaling", 2, 32, bodies.KINDS, marks=pytest.mark.slow),
        *(pytest.param(recipe, 4, 128, bodies.KINDS[:1], marks=pytest.mark.slow) for recipe in bodies.APART),
    ],
)
def test_modules_with_rows_and_columns_apart_equal_whole_ones(
    recipe: str, ranks: int, alignment: int, kinds: tuple[str, ...]
) -> None:
    arguments = (str(SHARED), recipe, kinds, "c10d", alignment)
    assert (
        run_distributed(bodies.modules_equal_whole, ranks, args=arguments, fresh=True, prepared=te_on_cpu)
        == [4 * len(kinds)] * ranks
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", bodies.KINDS)
@pytest.mark.parametrize("recipe", bodies.EMULATED)
def test_modules_in_nvfp4_equal_whole_ones_in_the_emulation(recipe: str, kind: str) -> None:
    arguments = (str(SHARED), recipe, kind, "c10d", 80)
    found = run_distributed(bodies.emulated_modules_equal_whole, 2, args=arguments, fresh=True, prepared=te_on_cpu)
    assert found == [bodies.multiplied(kind)] * 2


def test_nvfp4_equals_the_reference() -> None:
    assert run_distributed(bodies.nvfp4_equals_reference, 1, args=(str(SHARED),), fresh=True, prepared=te_on_cpu) == [
        2 * 3 * 2 * 4
    ]


@pytest.mark.parametrize(
    "format_", [MXFP8(), *(pytest.param(NVFP4(square), marks=pytest.mark.slow) for square in (True, False))], ids=str
)
def test_rows_and_columns_are_read_in_any_order(format_: ApartFormat) -> None:
    answers = run_distributed(rows_and_columns, 3, args=(str(SHARED), format_, "c10d"), fresh=True, prepared=te_on_cpu)
    # Of three experts and of two other layers.
    assert answers == [2 * 3 * (2 * 3 + 6)] * 3


@pytest.mark.slow
def test_formats_move_as_many_bytes_as_they_should() -> None:
    """What docs/performance.md has in a table, for 4 layers."""
    layers = 4
    # The backward pass finds the weights of the last two layers in their slots, unless it reads other bytes: columns.
    held = 2 / layers
    expected = {
        "": 2 + 2 * (1 - held) + 2,
        "Float8BlockScaling": 1 + (1 - held) + 2,
        "MXFP8BlockScaling": 2 * (1 + 1 / 32) + 2,
        "NVFP4BlockScaling": 2 * (1 / 2 + 1 / 16) + 2,
    }
    assert (
        run_distributed(bodies.bytes_of_formats, 2, args=(str(SHARED), layers), fresh=True, prepared=te_on_cpu)
        == [expected] * 2
    )


CALLS = {
    "Float8BlockScaling": {"forward": 6, "backward": 8, "end": 3},
    "Float8CurrentScaling": {"forward": 8, "backward": 10, "end": 3},
    "MXFP8BlockScaling": {"forward": 20, "backward": 16, "end": 3},
    "NVFP4BlockScaling": {"forward": 22, "backward": 41, "end": 4},
}


@pytest.mark.parametrize(
    "recipe", ["Float8BlockScaling", *(pytest.param(r, marks=pytest.mark.slow) for r in [*CALLS][1:])]
)
def test_python_calls_of_a_format_do_not_grow(recipe: str) -> None:
    """Nor with the number of experts; whoever makes them fewer lowers the limits."""
    (found,) = run_distributed(bodies.calls_of_visits, 1, args=(str(SHARED), recipe), fresh=True, prepared=te_on_cpu)
    few, many = found.values()
    assert few == many
    for part, calls in few.items():
        assert 0 < calls <= CALLS[recipe][part], (part, calls)


@pytest.mark.slow
def test_what_is_refused_of_formats_with_rows_and_columns_apart() -> None:
    for answers in run_distributed(bodies.refused_on_blackwell, 5, args=(str(SHARED),), fresh=True, prepared=te_on_cpu):
        assert set(answers) == {"square", "dequantized", "dequantized in FP4", "4 over 6", "alignment", "too old"}
        assert "enable_2d_quantization and backward_override are not implemented" in answers["square"]
        assert "enable_2d_quantization and backward_override are not implemented" in answers["dequantized"]
        assert "nvfp4_4over6 of weights and backward_override are not" in answers["dequantized in FP4"]
        assert "nvfp4_4over6 of weights and backward_override are not" in answers["4 over 6"]
        assert "shards of 80 rows, which are not multiples of 32: pass pad_for_alignment=32" in answers["alignment"]
        assert answers["too old"] == (
            "weight is used with a MXFP8BlockScaling recipe: MXFP8 needs GPUs of compute capability 10.0 (Blackwell), "
            "and this one has 9.0. Use Float8BlockScaling or Float8CurrentScaling"
        )
