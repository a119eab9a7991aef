"""Groups that span hosts, with ranks of one machine that are told that they are on several."""

from __future__ import annotations

import pytest
import torch

from tests.multiproc import bodies_hierarchical as bodies
from tests.support.launch import on_gpus, run_distributed

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("hosts", "per_host", "dtype", "sink_dtype", "fp32"),
    [
        (2, 2, torch.bfloat16, torch.float32, True),
        (2, 2, torch.float32, torch.float32, True),
        (2, 2, torch.float32, torch.float32, False),
        (3, 2, torch.bfloat16, torch.bfloat16, True),
    ],
)
def test_two_steps_equal_one(
    hosts: int, per_host: int, dtype: torch.dtype, sink_dtype: torch.dtype, fp32: bool
) -> None:
    ranks = hosts * per_host
    args = per_host, dtype, sink_dtype, fp32
    found = run_distributed(bodies.steps_equal_one_step, ranks, args=args, fresh=on_gpus())
    within = "CopyEngineTransport" if on_gpus() else "C10dTransport"
    assert found == [(within, 3 * 2 * (1 + 1 + 3 + 5))] * ranks


@pytest.mark.parametrize("of", ["dense", "experts"])
def test_training_equals_that_of_the_unsharded_model(of: str) -> None:
    transports = run_distributed(bodies.trains, 4, args=(2, of), fresh=on_gpus())
    assert transports == [["HierarchicalTransport"]] * 4


def test_models_can_be_trained_after_an_evaluation_in_inference_mode() -> None:
    run_distributed(bodies.trains_after_an_evaluation, 4, fresh=on_gpus())


@pytest.mark.cpu_only("the format is one of CPU tensors")
def test_weights_in_a_format_are_gathered_in_two_steps() -> None:
    assert run_distributed(bodies.gathered_in_a_format, 4) == [[True] * 6] * 4


@pytest.mark.cpu_only("on GPUs copies within a host wait for those of the peer's other layer until the time-out")
def test_ranks_of_one_host_that_use_other_layers_are_told_on_all_hosts() -> None:
    for raised in run_distributed(bodies.orders_differ_within_hosts, 4):
        assert "ranks [0, 1, 2, 3] share their weights" in raised
        assert "was the all-gather of 1.weight on rank 0 and the all-gather of 2.weight on rank 1" in raised


@pytest.mark.cpu_only("on GPUs, a lost peer ends the process")
def test_a_peer_that_leaves_is_noticed_in_either_step() -> None:
    _, counterpart, neighbour, _ = run_distributed(bodies.one_leaves, 4)
    assert "all-gather of weight between hosts failed on rank 1 (shard group: ranks [1, 3])" in counterpart
    assert "all-gather of weight within the host failed on rank 2 (shard group: ranks [2, 3])" in neighbour


@pytest.mark.cpu_only("on GPUs, what serves a host depends on its links")
def test_groups_that_can_be_served_in_two_steps_and_others() -> None:
    in_one_step = ("uneven", "interleaved", "one host", "one rank each")
    for answers in run_distributed(bodies.selected, 4):
        assert answers == {
            "two ranks each, hierarchical": "HierarchicalTransport",
            "two ranks each, auto": "HierarchicalTransport",
            "uneven, hierarchical": "transport 'hierarchical' cannot serve this group: it has [3, 1] ranks on host-0, "
            "host-1, not equally many; use 'c10d' or 'auto'",
            "interleaved, hierarchical": "transport 'hierarchical' cannot serve this group: its ranks are not numbered "
            "host by host but are on host-0, host-1, host-0, host-1; use 'c10d' or 'auto'",
            "one host, hierarchical": "C10dTransport",
            "one rank each, hierarchical": "C10dTransport",
            **{f"{name}, auto": "C10dTransport" for name in in_one_step},
        }
