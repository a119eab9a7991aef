"""etp's layers equal plain modules; experts have their own axis; what cannot be sharded is refused by name."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import pytest
import torch

from etp import ETPShardedParam
from tests.multiproc import bodies_modules as bodies
from tests.support.launch import on_gpus, run_distributed

pytestmark = pytest.mark.multiproc


@runtime_checkable
class DistributedWeight(Protocol):
    """The members of TE 2.20.2's ``transformer_engine.pytorch.distributed_weight.DistributedWeight``."""

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Any: ...

    def materialize_group_for_backward(self) -> Any: ...

    def finalize_group_grads(self, wgrads: Any) -> Any: ...

    def grad_buffer(self) -> torch.Tensor: ...


@pytest.mark.plain_layers
@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (3, torch.float64)], ids=str
)
def test_linear_layers_match_plain_modules(world_size: int, dtype: torch.dtype) -> None:
    run_distributed(bodies.linear_layers, world_size, args=(dtype,))


@pytest.mark.plain_layers
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)], ids=str)
def test_grouped_layers_match_plain_modules(world_size: int, dtype: torch.dtype) -> None:
    run_distributed(bodies.grouped_layers, world_size, args=(dtype,))


@pytest.mark.plain_layers
@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_and_thawed_experts_match(world_size: int) -> None:
    run_distributed(bodies.frozen_experts, world_size)


def test_of_a_frozen_weight_no_input_is_kept() -> None:
    run_distributed(bodies.inputs_of_frozen_weights, 2)


@pytest.mark.parametrize("after", [(0, 0, 0), (1, 0, 1), (1, 1, 1)])
def test_weights_frozen_within_an_iteration_keep_their_gradients(after: tuple[int, ...]) -> None:
    run_distributed(bodies.frozen_within_an_iteration, 2, args=(after,))


def test_a_resident_weight_is_as_trained_as_its_parameter() -> None:
    run_distributed(bodies.frozen_while_resident, 2)


@pytest.mark.plain_layers
def test_splits_that_do_not_fit_are_refused() -> None:
    for messages in run_distributed(bodies.grouped_refusals, 2):
        assert len(messages) == 3
        for message, splits in zip(messages, ([3, 3], [4], [2, 1, 1]), strict=True):
            assert message.startswith(f"m_splits {splits} must name 2 parts that add up to the")


def test_layers_that_share_some_of_their_weights_are_refused() -> None:
    gathered = "but weight0, weight1 are gathered together: layers may share all of their weights"
    expected = {
        "swapped": f"a layer computes with weight1, weight0, {gathered}",
        "one of two": f"a layer computes with weight0, {gathered}",
        "linear": f"a layer computes with weight1, {gathered}",
        "embedding": f"a layer computes with weight1, {gathered}",
        "tied": f"a layer computes with weight0, weight1, {gathered}",
        "sharded": "1.weight0 is gathered together with other weights than weight0 (+1), with which it is shared",
    }
    for messages in run_distributed(bodies.weights_of_other_groups, 2):
        assert set(messages) == set(expected)
        for attempt, start in expected.items():
            assert messages[attempt].startswith(start), messages[attempt]


def test_a_part_of_a_sharded_model_is_refused_before_anything_changes() -> None:
    for messages in run_distributed(bodies.parts_of_a_sharded_model, 2):
        assert messages["part"].startswith("a runtime cannot be split: it also drives 0.weight; pass etp.shard_module")
        assert messages["backward"].startswith("weights change their runtime inside a backward pass")


def test_experts_average_over_their_own_axis() -> None:
    sizes = run_distributed(bodies.experts_have_their_own_axis, 4)
    assert sizes[0] == {"first.weight": 4, "experts.weight0 (+1)": 2, "last.weight": 4}


def test_ranks_of_other_expert_groups_may_have_other_experts_biases_included() -> None:
    for rank, (alike, message) in enumerate(run_distributed(bodies.pairs_have_other_experts, 4)):
        assert not alike
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert message.startswith(f"shard_module: ranks {pair} hold different values of experts.bias1.")


def test_differing_peers_are_told_what_differs_and_nothing_changes() -> None:
    culprits = {
        "value": "blocks.1.up.weight",
        "norm": "norm.bias",
        "size": "blocks.0.up.weight [31, 12]",
        "dtype": "head.weight [23, 12] torch.bfloat16",
        "missing": "blocks.2.down.bias",
    }
    for answers in run_distributed(bodies.differing_peers, 2):
        assert set(answers) == set(culprits)
        for change, culprit in culprits.items():
            message, types = answers[change]
            assert culprit in message, message
            assert message.startswith("shard_module: rank")
            assert types == ["Parameter"]
            assert "same" in message


def test_a_group_without_this_rank_is_refused() -> None:
    messages = run_distributed(bodies.no_member, 2)[0]
    assert len(messages) == 5
    assert [message.split(";")[0] for message in messages] == [
        "rank 0 is no member of etp_group",
        "rank 0 is no member of expert_group",
        "rank 0 is no member of etp_group",
        "rank 0 is no member of the shard group",
        "rank 0 is no member of the shard group",
    ]


def test_what_is_no_process_group_is_refused_by_name() -> None:
    kinds = ["DeviceMesh", "EtpConfig", "list", "NoneType"]
    for messages in run_distributed(bodies.no_group, 2):
        assert [message.split(";")[0] for message in messages] == [
            *(f"etp_group is of type {kind}" for kind in kinds),
            *(f"expert_group is of type {kind}" for kind in (*kinds[:3], "str")),
            *(f"etp_group is of type {kind}" for kind in kinds),
        ]
        assert all("mesh.get_group()" in message for message in messages)


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    expected = {
        "odd_without_padding": "0.weight: 5 rows do not divide over 2 shards and pad_for_alignment is 0",
        "max_norm": "table.weight: an embedding with max_norm or sparse gradients cannot be sharded",
        "sparse": "table.weight: an embedding with max_norm or sparse gradients cannot be sharded",
        "complex_weight": "0.weight is complex, and only real weights can be sharded",
        "complex_layer": "a weight of torch.complex64 cannot be sharded",
        "quantized": "0.weight is a Float8Tensor, and its shards would be torch.float32: build the model without quant",
        "parametrized": "0.weight is computed from other parameters",
        "lazy": "0.weight has no shape yet; run a forward pass",
        "over_other_ranks": "0.weight is sharded over ranks [0, 1], and etp_group has ranks [",
        "experts_over_other_ranks": "0.weight0 is sharded over ranks [",
        "one_memory": "1.weight and 0.weight are two parameters in one memory",
        "has_gradient": "0.weight has a gradient already",
        "has_hook": "0.weight has gradient hooks",
        "has_accumulate_hook": "0.weight has gradient hooks",
        "copy_engine_on_cpu": "transport 'copy_engine' cannot serve this group",
        "normalization": "normalization is 'BatchNorm'; choose 'LayerNorm' or 'RMSNorm'",
        "no_gemms": "num_gemms is 0",
    }
    if on_gpus():
        del expected["copy_engine_on_cpu"]
    for messages in run_distributed(bodies.refusals, 2):
        assert set(messages) == set(expected)
        for attempt, start in expected.items():
            assert messages[attempt].startswith(start), messages[attempt]


def test_misuse_of_a_shard_is_refused_by_name() -> None:
    for rank, answers in enumerate(run_distributed(bodies.misuse_of_a_shard, 2)):
        products = {"matmul", "at", "mm_transposed", "T", "mT", "einsum", "addmm", "linear_input", "embedding_bag"}
        assert set(answers) == products | {"deepcopy", "pickle", "register_hook"}
        for product in products - {"einsum"}:
            assert f"ETPShardedParam(0.weight: rows {10 * rank}:10 of (10, 6), shard {rank} of 2" in (
                answers[product].replace(f"rows {min(16 * rank, 10)}:10", f"rows {10 * rank}:10")
            )
            assert "a shard is not its weight" in answers[product]
        assert "a shard is not its weight" in answers["einsum"]
        assert "0.weight is a shard tied to its process group and cannot be deep-copied" in answers["deepcopy"]
        assert "cannot be pickled" in answers["pickle"]
        assert "register_post_accumulate_grad_hook" in answers["register_hook"]


def test_sharding_keeps_ties_flags_and_nesting() -> None:
    run_distributed(bodies.keeps_what_the_user_noted, 2)
    run_distributed(bodies.module_without_replicated_parameters, 2)


def test_a_shard_has_every_member_of_tes_protocol() -> None:
    members = [
        "is_distributed_weight",
        *(name for name in vars(DistributedWeight) if name.endswith(("ward", "grads", "buffer"))),
    ]
    assert len(members) == 5
    assert issubclass(ETPShardedParam, torch.Tensor)
    for missing, te_agrees in run_distributed(bodies.implements_te_protocol, 2, args=(members,)):
        assert missing == []
        assert te_agrees


def test_tes_protocol_computes_the_gradients() -> None:
    run_distributed(bodies.te_protocol_computes_gradients, 2)


@pytest.mark.slow
def test_compiled_layers_equal_others() -> None:
    # Fresh, because dynamo remembers what it has traced.
    run_distributed(bodies.compiled_layers, 2, fresh=True)
