"""Habits of plain PyTorch that would silently change a sharded model's numbers are refused, and by name."""

from __future__ import annotations

import pytest

from tests.multiproc import bodies_left_alone as bodies
from tests.support.launch import run_distributed

pytestmark = pytest.mark.multiproc


def test_functions_that_need_the_whole_weight_are_refused() -> None:
    for rank, (wrong, drawn) in enumerate(run_distributed(bodies.functions_of_a_shard, 2)):
        place = f"ETPShardedParam(0.weight: rows {16 * rank}:16 of (16, 8), shard {rank} of 2"
        for name, message in wrong.items():
            where = "a shard inside a list" if name in {"linalg_multi_dot", "cat", "stack"} else place
            assert message.startswith(f"{name} on {where}"), (name, message)
            assert "param.full_tensor(), or param.local_shard()" in message
        for name, message in drawn.items():
            assert message.startswith(f"{name.removesuffix(' of data')} on {place}"), (name, message)
            assert "Initialise before etp.shard_module" in message


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_computed_from_a_shard_is_no_weight(frozen: bool) -> None:
    for rank, answers in enumerate(run_distributed(bodies.computed_from_a_shard, 2, args=(frozen,))):
        place = f"ETPShardedParam(0.weight: rows {16 * rank}:16 of (16, 8), shard {rank} of 2"
        assert len(answers) == 21
        for name, message in answers.items():
            function = name.split(":")[0].split(",")[0]
            assert message.startswith(function), (name, message)
            assert (place if function != "cat" else "a shard inside a list") in message
            assert "pass the module in replicated_modules" in message


def test_a_layer_does_not_compute_with_its_shard() -> None:
    """Padding leaves all of its rows to the first rank: elsewhere, results would be right in shape alone."""
    for answers in run_distributed(bodies.computed_with_data, 2):
        assert len(answers) == 2 * 8
        for name, message in answers.items():
            assert message.startswith(name.split(":")[0]), (name, message)
            assert "on ETPShardedParam(1.weight: rows" in message or "on a tensor computed from ETP" in message
            assert "pass the module in replicated_modules" in message


def test_casts_of_weights_are_refused_in_evaluations() -> None:
    for answers in run_distributed(bodies.casts_in_an_evaluation, 2):
        assert set(answers) == {"no_grad", "inference_mode"}
        for message in answers.values():
            assert message.startswith("linear on a tensor computed from ETPShardedParam(0.weight: rows"), message


def test_arithmetic_on_a_shard_is_allowed() -> None:
    run_distributed(bodies.arithmetic_on_a_shard, 2)


@pytest.mark.plain_layers
def test_second_derivatives_are_refused_and_the_next_pass_is_clean() -> None:
    for answers in run_distributed(bodies.second_derivatives, 2):
        assert answers["linear"].startswith("create_graph=True with the sharded weight weight, whose gradient")
        assert answers["grouped"].startswith("create_graph=True with the sharded weight weight0, whose gradient")


def test_autograd_grad_returns_means_of_replicated_parameters() -> None:
    run_distributed(bodies.returned_gradients, 2)


def test_a_forward_pass_sees_that_parameters_were_replaced_or_added() -> None:
    for answers in run_distributed(bodies.changed_members, 2):
        assert answers["pruned"].startswith("0.weight, a shard, has been replaced by nothing in its module")
        assert answers["reassigned"].startswith("0.weight, a shard, has been replaced by a ShardCopy of shape (16, 8)")
        assert answers["grown"].startswith("1.weight was added after etp.shard_module")
        assert answers["thawed"].startswith("1.weight was added after etp.shard_module")
        assert answers["adapted"].startswith("0.adapter.weight was added after etp.shard_module")
        assert answers["ddp"].startswith("DistributedDataParallel has broadcast one rank's shard of 0.weight")


def test_changes_without_harm_are_allowed() -> None:
    run_distributed(bodies.allowed_changes, 2)


def test_a_tie_across_calls_is_refused() -> None:
    for message in run_distributed(bodies.tied_across_calls, 2):
        assert message.startswith("weight shared its weight with weight, which an earlier call of etp.shard_module")


def test_a_model_without_values_is_refused() -> None:
    for message in run_distributed(bodies.on_the_meta_device, 2):
        assert message.startswith("0.weight is on the meta device")


def test_only_a_ranks_own_shards_are_loaded() -> None:
    for rank, answers in enumerate(run_distributed(bodies.states_of_other_ranks, 2)):
        other = "embedding.weight: the state holds shard 0 of 2 of a weight of 23 rows, and this rank needs shard 1"
        assert answers["rank 0"].startswith(other if rank else "no error")
        for name in ("whole", "whole, not strict"):
            assert answers[name].startswith("embedding.weight: the state holds the full weight of shape (23, 12)")
        assert answers["assign"].startswith("embedding.weight: load_state_dict with assign=True")


def test_sparse_gradients_of_replicated_parameters_are_refused() -> None:
    for message in run_distributed(bodies.sparse_gradients, 2):
        assert message.startswith("the gradient of 0.weight is sparse and cannot be combined over the ranks")


def test_parameters_that_a_function_returns_no_gradient_for_have_none() -> None:
    for found in run_distributed(bodies.functions_without_gradients, 2):
        assert found == ["linear.weight", "linear.bias"]


def test_optimizers_that_would_not_train_the_shards_are_refused() -> None:
    for rank, answers in enumerate(run_distributed(bodies.unfit_optimizers, 2)):
        assert answers["early"].startswith("SGD has the full weight of 0.weight, which the module no longer uses")
        shard = f"has ETPShardedParam(0.weight: rows {16 * rank}:16 of (16, 8), shard {rank} of 2"
        assert answers["lbfgs"].startswith(f"LBFGS {shard}")
        assert answers["zero"].startswith(f"ZeroRedundancyOptimizer {shard}")
        for name in ("Adafactor", "Muon", "LAMB"):
            assert answers[name].startswith(f"{name} {shard}")
            assert "treats each weight as a whole matrix" in answers[name]


def test_what_is_distributed_already_is_refused() -> None:
    for answers in run_distributed(bodies.distributed_already, 2):
        assert answers["ddp"].startswith("0 is a DistributedDataParallel, which combines gradients over the ranks")
        assert answers["fsdp"].startswith("0 is a FSDPSequential, which combines gradients over the ranks")
        assert answers["dtensor"].startswith("0.weight is a DTensor, which is distributed already")
