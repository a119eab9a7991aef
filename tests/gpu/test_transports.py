"""The copy-engine transport against the c10d one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.gpu import bodies_transports as bodies
from tests.gpu.devices import needs_gpus
from tests.gpu.launch import run_on_gpus
from tests.multiproc import bodies_order
from tests.support.launch import RanksFailedError, run_distributed
from tests.support.ports import free_port

WORLDS = [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("dtype", "sink_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_copy_engine_equals_c10d(world_size: int, dtype: torch.dtype, sink_dtype: torch.dtype) -> None:
    counts = run_on_gpus(bodies.transports_agree, world_size, args=(dtype, sink_dtype))
    assert counts == [12 * 2 * (1 + 1 + 1 + 3 + 128 + 128)] * world_size


@needs_gpus(2, shared=False)
def test_processes_that_see_one_gpu_each_copy_from_each_other() -> None:
    body = bodies.agree_though_each_sees_one_gpu
    assert (
        run_distributed(body, 2, None, args=(free_port(),), fresh=True)
        == [(12 * 2 * (1 + 1 + 1 + 3 + 128 + 128), "CopyEngineTransport")] * 2
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_shard_that_was_not_published_is_refused(world_size: int) -> None:
    for message in run_on_gpus(bodies.unpublished_is_refused, world_size):
        assert "all-gather of w" in message
        assert "never published" in message


@needs_gpus(2)
def test_ranks_that_reduce_different_weights_end_with_the_weights_name(tmp_path: Path) -> None:
    """Added up, they would be wrong gradients of the right shape."""
    with pytest.raises(RanksFailedError) as error:
        run_distributed(bodies.reductions_of_different_weights, 2, "nccl", args=(str(tmp_path),), fresh=True)
    assert "were added up" not in str(error.value)
    said = "".join(path.read_text() for path in tmp_path.iterdir())
    assert re.search(r"reduce-scatter of only_on_\d's gradient on rank \d .* did not finish within 3 s", said)


@needs_gpus(2)
def test_ranks_that_gather_different_weights_are_told_when_the_next_pass_ends() -> None:
    arguments = ((0, 1, 2, 3), (0, 2, 1, 3)), True, {"prefetch_depth": 0}
    for raised, right in run_distributed(bodies_order.orders_that_differ, 2, "nccl", args=arguments):
        assert "number 2 was the all-gather of layers.1.weight on rank 0 and the all-gather of layers.2" in raised
        assert right


@needs_gpus(2)
def test_ranks_of_which_one_gathers_more_end_with_a_layers_name(tmp_path: Path) -> None:
    """With look-ahead, the rank that leaves the predicted order has gathered once more than its peer.

    Its device waits for a gather that the peer does not start, unless orders are compared before.
    """
    with pytest.raises(RanksFailedError):
        run_distributed(bodies_order.uneven_numbers, 2, "nccl", args=(str(tmp_path),), fresh=True)
    told = r"number \d+ was the .*layers\.\d.* on rank 0 and the .*layers\.\d.* on rank 1"
    timed_out = r"of layers\.\d\.weight.* on rank \d .* did not finish within 5 s: .* left the common order"
    for rank in range(2):
        assert re.search(f"{told}|{timed_out}", (tmp_path / f"rank{rank}.txt").read_text())


@needs_gpus(2)
def test_ranks_that_train_other_replicated_parameters_are_told_when_the_next_pass_ends() -> None:
    """Their gradients, of one size, were added up."""
    arguments = ((bodies_order.SIDE, bodies_order.SIDE),)
    for raised, right in run_distributed(bodies_order.replicated_that_differ, 2, "nccl", args=arguments):
        assert "the all-reduce of own.0.weight's gradient on rank 0 and the all-reduce of own.1.weight's" in raised
        assert right


@needs_gpus(2)
@pytest.mark.parametrize(("transport", "alike"), [("c10d", False), ("copy_engine", False), ("copy_engine", True)])
def test_ranks_that_train_other_replicated_parameters_end_with_their_names(
    tmp_path: Path, transport: str, alike: bool
) -> None:
    """NCCL's all-reduce may never end where sizes differ; copy_engine starts none, even where they are alike."""
    arguments = transport, alike, str(tmp_path)
    with pytest.raises(RanksFailedError):
        run_distributed(bodies_order.other_replicated, 2, "nccl", args=arguments, fresh=True)
    told = r"the all-reduce of own\.0\.weight's gradient on rank 0 and the all-reduce of own\.1\."
    timed_out = (
        r"all-reduce of replicated gradients \(shared\.bias to own\.\d\.\w+\) on rank \d .* did not finish within 5 s"
    )
    expected = {"c10d": f"{told}|{timed_out}", "copy_engine": timed_out}[transport]
    for rank in range(2):
        assert re.search(expected, (tmp_path / f"rank{rank}.txt").read_text())
