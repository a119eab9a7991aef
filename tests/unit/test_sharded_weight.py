"""A Megatron shard's own operations on a group of one rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist

from etp.group import WeightGroup
from etp.runtime import EtpRuntime
from megatron_patches.sharded_weight import EmbeddingWeight, MegatronShardedParam


@pytest.mark.parametrize(
    "hooks",
    [
        nullcontext(),
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.detach),
    ],
    ids=["none", "offloaded", "copied"],
)
def test_an_embeddings_gradient_survives_hooks_on_saved_tensors(
    world: dist.ProcessGroup, hooks: AbstractContextManager[None]
) -> None:
    table = torch.randn(10, 3, requires_grad=True)
    runtime = EtpRuntime()
    shard = MegatronShardedParam.from_full(table, world)
    shard.attach(runtime, "embedding.weight")
    runtime.add(WeightGroup([shard], world))
    tokens, upstream = torch.tensor([[1, 9], [1, 4]]), torch.randn(2, 2, 3)
    with hooks:
        rows = EmbeddingWeight.apply(shard)[tokens]
    rows.backward(upstream)
    expected = table[tokens]
    assert torch.equal(rows, expected)
    expected.backward(upstream)
    assert shard.grad is not None
    assert torch.equal(shard.grad[:10], table.grad)
    assert not shard.grad[10:].any()
