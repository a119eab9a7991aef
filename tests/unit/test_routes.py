"""Which transport a weight group gets, for the device that its weights are on, and what a runtime keeps of others'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from etp import routes
from etp.group import WeightGroup
from etp.mode import Modes
from etp.traffic import TrafficCounters
from tests.unit.test_group import shard_named


def test_full_weights_need_no_transport(world: dist.ProcessGroup) -> None:
    """They may be asked for before the model is on the GPU that it was configured for."""
    linear = nn.Linear(6, 5)
    expected = linear.weight.detach().clone()
    runtime = etp.shard_module(linear, world, config=etp.EtpConfig(transport="copy_engine"))  # type: ignore[arg-type]
    full = etp.full_state_dict(linear)
    assert torch.equal(full["weight"], expected)
    assert not runtime.routes.transports
    with pytest.raises(ValueError, match="weights are on cpu"):
        linear(torch.randn(2, 6))


class Made:
    """A transport, or the lane of one."""

    def __init__(self, device: torch.device, *_: object) -> None:
        self.device = device
        self.modes: list[bool] = []

    def change_mode(self, *, capturing: bool = False) -> None:
        self.modes.append(capturing)

    def watch_replays(self) -> None:
        """Nothing is replayed."""

    def expect(self, end: object, label: str) -> None:
        """Nothing is waited for."""


def test_a_transport_serves_one_kind_of_device(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "Lane", Made)
    monkeypatch.setattr(routes, "select_transport", lambda *arguments: Made(arguments[-1]))
    groups = [WeightGroup([shard_named(name)], world) for name in ("a", "b")]
    found = routes.Routes(etp.EtpConfig())

    def transports(device: str) -> list[Any]:
        for group in groups:
            group.spec = replace(group.spec, device=torch.device(device))
        return [found.of(group).transport for group in groups]

    cpu = transports("cpu")
    meta = transports("meta")
    assert [each.device.type for each in (*cpu, *meta)] == ["cpu", "cpu", "meta", "meta"]
    assert cpu[0] is cpu[1]
    assert meta[0] is meta[1]
    assert found.transports == {world: meta[0]}
    assert transports("cpu") == cpu
    found.change_mode(replace(Modes(etp.EtpConfig()).now, capture=1))
    assert cpu[0].modes == meta[0].modes == [True]


def test_a_transport_that_was_put_there_is_used(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "select_transport", None)
    found, given = routes.Routes(etp.EtpConfig()), cast("Any", Made(torch.device("cpu")))
    found.transports[world] = given
    for name in ("a", "b"):
        assert found.of(WeightGroup([shard_named(name)], world)).transport is given


def test_groups_of_one_name_are_counted_together(world: dist.ProcessGroup) -> None:
    groups = [WeightGroup([shard_named(name)], world) for name in ("Linear.weight", "Linear.weight", "other")]
    counters = TrafficCounters(groups)
    for group in groups:
        group.gathers, group.gathered_bytes = 1, group.spec.nbytes
        group.reductions, group.reduced_bytes = 1, 16
    assert counters.gathers == counters.reductions == {"Linear.weight": 2, "other": 1}
    # A group of one rank gets nothing from peers.
    assert counters.gather_bytes == counters.reduce_bytes == {"Linear.weight": 0, "other": 0}
    groups[0].size = groups[1].size = 2
    each = groups[0].spec.nbytes // 2
    assert counters.gather_bytes == {"Linear.weight": 2 * each, "other": 0}
    assert counters.reduce_bytes == {"Linear.weight": 2 * 8, "other": 0}
    groups[0].reset_counts()
    assert counters.gathers == counters.reductions == {"Linear.weight": 1, "other": 1}
    counters.reset()
    assert counters.gathers == {}
