"""Submodules in ``replicated_modules`` train like the unsharded model's, and a choice that cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiproc import bodies_checkpoint as checkpoints
from tests.multiproc import bodies_replicated_modules as bodies
from tests.support.launch import on_gpus, run_distributed

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", bodies.MODELS)
def test_two_ranks_match_the_unsharded_model(model: str, training: bool) -> None:
    run_distributed(bodies.matches_oracle, 2, args=(model, training, {}))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(3, {}), (2, {"grad_reduction": "sum"}), (2, {"prefetch_depth": 3}), (2, {"reduce_once_per_iteration": True})],
    ids=str,
)
def test_other_sizes_and_options_match(world_size: int, options: dict[str, Any]) -> None:
    # The sum of the microbatches is rounded elsewhere, and so is that of an all-reduce over three ranks.
    exact = world_size == 2 and "reduce_once_per_iteration" not in options
    run_distributed(bodies.matches_oracle, world_size, args=("tied", True, {"exact": exact, **options}))


def test_frozen_ones_and_hooks_match() -> None:
    run_distributed(bodies.frozen, 2)


@pytest.mark.parametrize("model", ["reads", "tied to a replicated one"])
def test_clipping_by_norm_matches(model: str) -> None:
    run_distributed(bodies.clipping, 2, args=(model,))


def test_second_derivatives_of_activations_match_and_those_of_weights_are_refused() -> None:
    for answers in run_distributed(bodies.gradient_penalty, 2):
        assert len(answers) == 2
        for answer in answers:
            assert answer.startswith("create_graph=True with products."), answer
            assert "ask torch.autograd.grad for gradients of inputs only" in answer


def test_complex_weights_match() -> None:
    run_distributed(bodies.complex_weights, 2)


@pytest.mark.parametrize(
    ("size", "other", "saved", "loaded"),
    [
        (2, 3, ("narrow",), ("wide", "norm")),
        (2, 2, ("head", "wide"), ()),
        (3, 2, (), ("embedding",)),
    ],
)
def test_a_checkpoint_is_loaded_whatever_stays_replicated(
    tmp_path: Path, size: int, other: int, saved: tuple[str, ...], loaded: tuple[str, ...]
) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    ranks = run_distributed(checkpoints.train_save_and_go_on, size, args=(first, "adamw", saved))
    (whole,) = run_distributed(_whole, 1, args=(first,))
    assert ranks[0][1].items() <= whole.items()
    again = run_distributed(checkpoints.load_and_go_on, other, args=(first, "adamw", second, loaded))
    for _, held, saved_again in again:
        assert held == ranks[0][1]
        assert saved_again == whole
    if size == other:
        assert [losses for losses, *_ in again] == [losses for losses, _ in ranks]


def _whole(rank: int, world_size: int, folder: str) -> dict[str, bytes]:
    return checkpoints.whole_from(folder, "adamw")


def test_ranks_that_differ_are_told() -> None:
    for answers in run_distributed(bodies.ranks_that_differ, 2):
        assert answers["choice"].startswith("shard_module: rank 1 has blocks.0.norm.weight [12] torch.float32, ")
        assert "blocks.0.up.weight (replicated) [29, 12] torch.float32" in answers["choice"]
        assert on_gpus() or "all-reduce of blocks.1." in answers["pass"]


def test_a_choice_that_cannot_be_is_refused_by_name() -> None:
    expected = {
        "name": "TypeError: replicated_modules has '1.0', which is a str; pass the modules themselves",
        "parameter": "TypeError: replicated_modules has Parameter containing:",
        "stranger": "ValueError: replicated_modules has Linear(in_features=7, out_features=3, bias=False), which is "
        "not below the module",
        "copy": "ValueError: replicated_modules has Sequential(), which is not below the module",
        "root": "ValueError: replicated_modules has the module that is to be sharded",
        "outside": "ValueError: replicated_modules has Linear(in_features=4, out_features=5, bias=True), which is not",
        "shard": "ValueError: replicated_modules has 0, but 0.0.weight is a shard already",
        "half": "ValueError: experts: weight0 is shared with a module of replicated_modules",
        "again": "ValueError: 1.weight stayed replicated in an earlier call of etp.shard_module; pass its module",
        "again, frozen": "ValueError: 2.weight stayed replicated in an earlier call of etp.shard_module",
        "table": "ValueError: table.weight: max_norm rescales the rows that a rank's own data use",
        "bag": "ValueError: bag.weight: max_norm rescales the rows that a rank's own data use",
        "delayed": "ValueError: mlp: delay_wgrad_compute computes gradients after they are combined",
        "fused": "ValueError: mlp: fuse_wgrad_accumulation hides the gradients of replicated weights",
        "experts": "ValueError: experts is in replicated_modules, but its gradients would be combined over "
        "expert_group",
    }
    for answers in run_distributed(bodies.refusals, 2):
        assert set(answers) == set(expected)
        for case, start in expected.items():
            assert answers[case].startswith(start), answers[case]


def test_what_can_only_be_replicated_and_a_second_call_are_allowed() -> None:
    run_distributed(bodies.allowed, 2)


@pytest.mark.plain_layers
def test_refusals_name_the_option() -> None:
    for answers in run_distributed(bodies.messages_name_the_option, 2):
        assert len(answers) == 5
        for answer in answers:
            assert "replicated_modules" in answer, answer


@pytest.mark.plain_layers
def test_biases_of_experts_are_their_group_s_alone() -> None:
    run_distributed(bodies.experts_of_each_rank, 2)
