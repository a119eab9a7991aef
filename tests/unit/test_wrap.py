"""What a module says of its memory. One process; sharding itself is tested with several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import etp
from etp.group import WeightGroup
from etp.runtime import EtpRuntime
from tests.support.fake_group import fake_group
from tests.unit.test_group import Copies

ROWS, COLUMNS, RANKS = 40, 6, 4


class Elsewhere(Copies):
    """A transport that holds memory which PyTorch's allocator does not know of."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def nbytes(self) -> dict[str, int]:
        return self._sizes


@pytest.mark.parametrize(
    ("transport", "besides"),
    [
        (Elsewhere({"shards_in_place": 960, "arena": 0, "receive_ring": 720}), 720),
        (Elsewhere({"shards_in_place": 0, "arena": 512, "receive_ring": 720}), 1232),
        (Copies(), 0),
    ],
)
def test_memory_of_transports_counts_once(transport: Any, besides: int) -> None:
    with fake_group(rank=1, world_size=RANKS) as group:
        linear = nn.Linear(COLUMNS, ROWS, bias=False)
        shard = etp.ETPShardedParam.from_full(linear.weight, group, 1)
        linear.weight = shard
        WeightGroup([shard], group)
        runtime = EtpRuntime(etp.EtpConfig())
        runtime.adopt(linear)
        runtime.routes.transports[group] = transport
        shard.grad = torch.zeros_like(shard)
        held = etp.resident_nbytes(linear)
    own = ROWS // RANKS * COLUMNS * 4
    assert held == {
        "shards": own,
        "gradients": own,
        "gather_slots": 0,
        "gradient_buffers": 0,
        "transports": besides,
    }
