"""Order of events, traffic, memory, staleness and failures, on gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.gpu.bodies_engine import look_ahead_equals_unsharded
from tests.gpu.bodies_graphs import captured_evaluation_equals_eager
from tests.multiproc import bodies_engine as bodies
from tests.support.launch import RanksFailedError, on_gpus, run_distributed

pytestmark = pytest.mark.multiproc

WEIGHT_BYTES = bodies.SIDE * bodies.SIDE * 4


def forward_events(depth: int) -> list[str]:
    """Four layers: without look-ahead each is gathered when it is visited, else one visit earlier."""
    events = ["gather 0", "gathered 0", "use 0"]
    for layer in range(4):
        following = layer + 1
        if depth and following < 4:
            events.append(f"gather {following}")
        events.append(f"compute {layer}")
        if following < 4:
            events += [] if depth else [f"gather {following}"]
            events += [f"gathered {following}", f"use {following}"]
    return events


def seen_by_host(events: list[str]) -> list[str]:
    """On a GPU streams wait for what was gathered, and the host does not."""
    return [event for event in events if not (on_gpus() and event.startswith("gathered"))]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_gather_is_issued_one_visit_ahead_and_used_when_done(depth: int) -> None:
    for forward, _ in run_distributed(bodies.events_of_a_step, 2, args=(depth,)):
        assert seen_by_host(forward) == seen_by_host(forward_events(depth))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_hooks_follow_their_reduction_which_is_deferred(depth: int) -> None:
    for _, backward in run_distributed(bodies.events_of_a_step, 2, args=(depth,)):
        at = {event: place for place, event in enumerate(backward)}
        assert len(at) == len(backward), "an event came twice"
        for layer in range(4):
            assert on_gpus() or at[f"hook {layer} True"] == at[f"reduced {layer}"] + 1
            if f"gather {layer}" in at:
                assert at[f"gather {layer}"] < at[f"gathered {layer}"] < at[f"use {layer}"]
            if layer:
                assert at[f"use {layer}"] < at[f"reduce {layer}"]
                # Not waited for before the next one is started.
                waited = f"hook {layer} True" if on_gpus() else f"reduced {layer}"
                assert at[f"reduce {layer}"] < at[f"reduce {layer - 1}"] < at[waited]
        assert [event for event in backward if event.startswith("hook")] == [f"hook {n} True" for n in (3, 2, 1, 0)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_microbatch_ends_with_gathering_for_the_next_but_not_for_the_next_iteration(depth: int) -> None:
    """One slot more than the depth for four layers; backward visits 3, 2 and 1."""
    begins = ["gather 0", "gather 1", "gather 2", "gather 3"]
    expected = {
        0: [begins, ["gather 2", "gather 1"]] * 3,
        1: [
            begins,
            ["gather 1", "gather 0"],  # 0 is for the next forward pass
            ["gather 2", "gather 3"],
            ["gather 1", "gather 0"],
            ["gather 2", "gather 3"],
            ["gather 1"],
        ],
    }
    for passes, same in run_distributed(bodies.gathers_between_passes, 2, args=(depth,)):
        assert same
        assert passes == expected[depth]


def test_backward_takes_what_forward_left_and_gathers_the_rest_once() -> None:
    """The input needs no gradient, so backward needs no value of the first weight."""
    for layers, slots in ((6, 2), (2, 2), (1, 2)):
        for counts in run_distributed(bodies.gathers_per_step, 2, args=(layers, {})):
            for gathers, gathered, reduced in counts[1:]:
                assert gathers == layers + max(0, layers - 1 - slots)
                assert gathered == gathers * WEIGHT_BYTES // 2
                assert reduced == layers * WEIGHT_BYTES // 2


@pytest.mark.parametrize("resident", [0, 1, 2, 3, 5])
def test_resident_bytes_save_the_predicted_gathers(resident: int) -> None:
    layers, slots = 6, 2
    options = {"resident_bytes": resident * WEIGHT_BYTES}
    expected = layers + max(0, layers - slots - max(resident, 1))
    for counts in run_distributed(bodies.gathers_per_step, 2, args=(layers, options)):
        assert [gathers for gathers, _, _ in counts[1:]] == [expected, expected]


def test_one_reduction_per_iteration_moves_fp32_once() -> None:
    options = {"reduce_once_per_iteration": True}
    for counts in run_distributed(bodies.gathers_per_step, 2, args=(3, options)):
        assert [reduced for _, _, reduced in counts] == [3 * WEIGHT_BYTES // 2] * 3


def test_forwards_reuse_weights_unless_they_changed() -> None:
    for answers in run_distributed(bodies.reuse_across_forwards, 2):
        assert answers == {
            "first": 3,
            "unchanged": 0,
            "counted": 1,
            "rebound": 1,
            "data": 1,
            "unannounced": 0,
            "announced": 3,
            "stale is what it was": True,
            "fresh is right": True,
            "sgd": 3,
            "adamw foreach": 3,
            "adamw fused": 3,
        }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("poison", [False, True])
def test_look_ahead_across_passes_that_is_wrong_at_times_changes_no_number(world_size: int, poison: bool) -> None:
    for result in run_distributed(look_ahead_equals_unsharded, world_size, args=("c10d", poison)):
        assert result["worst"] <= (0.0 if world_size == 2 else 1e-6)
        assert result["ahead"] > 0
        assert result["abandoned"] > 0
        assert result["slots"] == 2


def test_evaluations_between_steps_with_look_ahead_change_no_number() -> None:
    for result in run_distributed(captured_evaluation_equals_eager, 2, args=("c10d", False)):
        assert result["worst"] == 0.0
        assert result["compared"] == 6 * 2


def test_evaluation_in_parts_marks_no_weight_as_used_twice() -> None:
    for flags in run_distributed(bodies.unneeded_slots, 2):
        assert set(flags.values()) == {0}


@pytest.mark.parametrize(("depth", "resident"), [(1, 0), (0, 0), (2, 0), (1, 12_000)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_holds_the_bytes_of_the_closed_form(world_size: int, depth: int, resident: int) -> None:
    """docs/design.md: shards and gradients are 1/N; slots are shared by shape; two gradient buffers a shape."""
    multiple = 4 * world_size
    shapes = [(-(-50 // multiple) * multiple, 24), (-(-24 // multiple) * multiple, 50)]
    sizes = [rows * columns * 4 for rows, columns in shapes]
    weights = 3 * sum(sizes)
    shared = sum(min(3, depth + 1) * size for size in sizes)
    for held in run_distributed(bodies.memory, world_size, args=(depth, resident)):
        assert held["shards"] == held["gradients"] == weights // world_size
        if resident:
            assert held["gather_slots"] <= shared + resident
        else:
            assert held["gather_slots"] == shared
        assert 0 < held["gradient_buffers"] <= 2 * sum(sizes)
        stated = sum(held[part] for part in ("shards", "gradients", "gather_slots", "gradient_buffers"))
        # The ranks' digests of their order, on the host until they are read; 16 bytes each.
        digests = 16 * world_size if on_gpus() else 0
        assert held["live"] - stated - held["replicated"] in (0, digests)


def test_buffers_are_released_and_come_back() -> None:
    for sizes in run_distributed(bodies.buffers_come_back, 2):
        assert sizes["held"] == 2 * WEIGHT_BYTES
        assert sizes["released slots"] == sizes["released pool"] == 0
        assert 0 < sizes["pool"] <= 2 * WEIGHT_BYTES
        assert sizes["pool after failures"] <= 2 * WEIGHT_BYTES
        assert sizes["refused inside"] >= 1


def test_slots_follow_a_change_of_dtype() -> None:
    for seen in run_distributed(bodies.dtype_changes, 2):
        assert seen == [f"torch.{name}" for name in ("float32", "bfloat16", "float64", "float32") for _ in range(2)]


def test_stale_reads_and_changed_weights_are_errors() -> None:
    for messages in run_distributed(bodies.stale_reads, 2):
        assert "modified by an inplace operation" in messages["autograd"]
        assert "layers.0.weight reads its gathered weight" in messages["slot"]
        assert "now holds layers.1.weight" in messages["slot"]
        assert messages["changed"].startswith("layers.2.weight was modified by an inplace operation")


def test_a_change_that_no_gradient_depends_on_is_none() -> None:
    run_distributed(bodies.changed_where_it_does_not_matter, 2)


def test_autograd_grad_returns_the_gradient_of_a_shard_without_main_grad() -> None:
    for message in run_distributed(bodies.shard_gradient_by_autograd_grad, 2):
        assert "torch.autograd.grad cannot return the gradient of the sharded weight layers.0.weight" in message
        assert "call backward()" in message


def test_nothing_is_printed() -> None:
    assert run_distributed(bodies.prints_nothing, 2) == ["", ""]


@pytest.mark.plain_layers
def test_a_layer_of_its_own_can_be_used_anywhere() -> None:
    run_distributed(bodies.loose_layers_have_their_own_runtimes, 2)


def test_the_chain_can_be_read() -> None:
    expected = "\n".join(
        [
            "chain of 3 weight groups, prefetch depth 1",
            *(
                f"  layers.{layer}.weight: [16, 16] over 2 ranks, slot {layer % 2}, {WEIGHT_BYTES} bytes"
                for layer in range(3)
            ),
        ]
    )
    assert run_distributed(bodies.describes_its_chain, 2) == [expected, expected]


@pytest.mark.cpu_only("on GPUs a time-out ends the process, as tests/gpu/test_lost_rank.py shows")
@pytest.mark.parametrize(
    ("where", "what"),
    [("gather", "all-gather of 0.weight"), ("returned gradient", "all-reduce of replicated gradients (1.weight)")],
)
def test_a_peer_that_does_not_come_is_named_within_the_time_out(where: str, what: str) -> None:
    message, seconds = run_distributed(bodies.a_peer_does_not_come, 2, args=(where,))[0]
    assert message.startswith(f"{what} failed on rank 0 (shard group: ranks [0, 1])")
    assert "A peer did not come in time" in message
    assert "EtpConfig.timeout_s" in message
    assert 1.0 < seconds < 20.0  # EtpConfig.timeout_s is 2; the process group waits for 96


@pytest.mark.cpu_only("on GPUs a time-out ends the process, as tests/gpu/test_lost_rank.py shows")
@pytest.mark.parametrize("what", ["gather", "several", "reduction", "reduce-scatter"])
def test_a_process_need_not_wait_for_a_collective_whose_time_is_over(what: str) -> None:
    assert 0.9 < run_distributed(bodies.a_collective_ends_by_itself, 2, args=(what,), fresh=True)[0] < 20.0


@pytest.mark.cpu_only("on GPUs a time-out ends the process, as tests/gpu/test_lost_rank.py shows")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_peer_that_dies_ends_the_others_with_the_weights_name(where: str) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError) as error:
        run_distributed(bodies.a_peer_dies, 3, timeout_s=60.0, args=(where,))
    assert time.monotonic() - began < 45.0
    failures: dict[int, Any] = {failure.rank: failure for failure in error.value.failures}
    assert failures[2].kind == "exit"
    for rank in (0, 1):
        assert failures[rank].kind == "EtpCommunicationError"
        last = failures[rank].report.strip().splitlines()[-1]
        assert "EtpCommunicationError: " in last
        assert any(f"{what} of " in last for what in ("all-gather", "reduce-scatter")), last
        assert f"failed on rank {rank} (shard group: ranks [0, 1, 2])" in last
        assert ".weight" in last
        assert "the connection is gone" in last
