"""The gradient of a loss term of the weights themselves, where gradients are summed over ranks. One process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from etp.param import ETPShardedParam
from tests.support.fake_group import fake_group

RANKS = 4


class Driver:
    """A runtime, as far as arithmetic on shards asks it."""

    in_forward, sums_gradients = False, True


class Pair(NamedTuple):
    """Two weights by name, as a model may keep them."""

    up: Any
    down: Any


@pytest.fixture
def shards() -> Iterator[list[Any]]:
    with fake_group(rank=1, world_size=RANKS) as group:
        made: list[Any] = [ETPShardedParam.from_full(torch.randn(32, 3, requires_grad=True), group, 1) for _ in "ab"]
        for index, shard in enumerate(made):
            shard.attach(Driver(), f"w{index}")
        yield made


@pytest.mark.parametrize("together", [list, tuple, lambda shards: Pair(*shards)], ids=["list", "tuple", "named tuple"])
def test_each_weight_in_a_sequence_is_counted_once_per_rank(
    shards: list[Any], together: Callable[[list[Any]], Any]
) -> None:
    squares = torch._foreach_mul(together(shards), 3.0)
    torch.stack([square.sum() for square in squares]).sum().backward()
    for shard in shards:
        assert torch.equal(torch.as_tensor(shard.grad), torch.full(shard.layout.shard_shape, 3.0 * RANKS))
