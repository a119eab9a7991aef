"""Transformer Engine's own Python code drives sharded weights through its DistributedWeight protocol, without a GPU.

Its files are unpacked for the processes of these tests alone: see :mod:`tests.support.te_site`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc import bodies_te_protocol as bodies
from tests.support.launch import run_distributed
from tests.support.prepared import te_on_cpu
from tests.support.te_site import MARKS, SHARED, on_path

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.cpu_only("tests/gpu/test_te.py runs the real kernels"),
    *MARKS,
]


@pytest.fixture(scope="module", autouse=True)
def transformer_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformer Engine where fresh processes find it."""
    with on_path(tmp_path_factory.mktemp("site")):
        yield


def test_te_modules_equal_whole() -> None:
    counts = run_distributed(bodies.te_modules_equal_whole, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu)
    assert counts == [20, 20]


def test_hooks_run_once_behind_the_last_use() -> None:
    for answers in run_distributed(bodies.hooks_of_two_uses, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu):
        assert len(answers) == len(bodies.KINDS)
        for counts in answers.values():
            assert set(counts.values()) == {3}


def test_backward_for_chosen_inputs_gives_no_others_gradients() -> None:
    for answers in run_distributed(bodies.chosen_inputs, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu):
        assert answers == {
            "Linear": [["weight"], ["weight"], []],
            "LayerNormLinear": [["layer_norm_bias", "layer_norm_weight", "weight"], ["weight"], []],
            "GroupedLinear": [["weight0", "weight1", "weight2"], ["weight1"], []],
        }


def test_weights_are_cast_under_autocast_in_both_passes() -> None:
    for answers in run_distributed(bodies.under_autocast, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu):
        assert answers == dict.fromkeys(bodies.KINDS, [True] * 6)


def test_a_first_microbatch_overwrites_the_gradients_of_the_last_iteration() -> None:
    for answers in run_distributed(bodies.first_microbatches, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu):
        assert len(answers) == 4 * len(bodies.KINDS)
        assert all(answers.values()), answers


@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_a_debug_feature_that_modifies_weights_for_the_backward_pass_is_refused(tmp_path: Path, gemm: str) -> None:
    for answers in run_distributed(
        bodies.debug_features, 2, args=(str(SHARED), str(tmp_path), gemm), fresh=True, prepared=te_on_cpu
    ):
        assert set(answers) == set(bodies.KINDS)
        for kind, message in answers.items():
            name = "weight0" if kind == "GroupedLinear" else "weight"
            wanted = f"a debug feature of Transformer Engine modifies {name} for the gradient of the input (dgrad)"
            assert message.startswith(wanted) if gemm == "dgrad" else not message


def test_paths_of_transformer_engine_that_leave_the_protocol_out_are_refused() -> None:
    for answers in run_distributed(
        bodies.paths_past_the_protocol, 2, args=(str(SHARED),), fresh=True, prepared=te_on_cpu
    ):
        grouped = (
            "the module: with use_grouped_tensor=True its experts would silently not train; build it with "
            "use_grouped_tensor=False and without NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM in the environment"
        )
        assert answers.pop("argument") == answers.pop("variable") == grouped
        assert answers.pop("override variable").startswith("the module: NVTE_BACKWARD_OVERRIDE=high_precision makes")
        # That of a linear is inside of it.
        for case, path in (("operation", "1.basic_ops.0"), ("operations of experts", "1")):
            message = f"{path}: accumulate_into_main_grad hides the gradients of replicated weights, which would not be"
            assert answers.pop(f"{case} into main_grad").startswith(message)
        assert answers.pop("operations of experts later").startswith("1: delay_wgrad_compute computes gradients after")
        refused = (
            "weight is a Float8BlockwiseQTensor, and its shards would be torch.bfloat16: build the model without "
            "quantized_model_init; under te.autocast, weights are gathered as its recipe quantizes them"
        )
        assert answers.pop("quantized model") == f"0.{refused}"
        assert answers.pop("quantized layer") == refused
        assert set(answers) == {"Linear in FP8", "LayerNormLinear in FP8", "GroupedLinear in FP8"}
        for case, message in answers.items():
            name = "weight0" if case.startswith("Grouped") else "weight"
            assert message.startswith(f"{name} is used with a Float8BlockScaling recipe of backward_override='high_")
            assert "leave backward_override out, and NVTE_BACKWARD_OVERRIDE out of the environment" in message
