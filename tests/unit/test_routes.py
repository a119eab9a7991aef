"""Which transport a weight group gets, for the device that its weights are on, and what a runtime keeps of others'."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from etp import routes
from etp.collectives import select_transport
from etp.group import WeightGroup
from etp.runtime import EtpRuntime
from etp.traffic import TrafficCounters
from tests.unit.test_group import FakeShard


def test_full_weights_need_no_transport(world: dist.ProcessGroup) -> None:
    """They may be asked for before the model is on the GPU that it was configured for."""
    linear = nn.Linear(6, 5)
    expected = linear.weight.detach().clone()
    runtime = etp.shard_module(linear, world, config=etp.EtpConfig(transport="copy_engine"))  # type: ignore[arg-type]
    full = etp.full_state_dict(linear)
    assert torch.equal(full["weight"], expected)
    assert not runtime.transports
    with pytest.raises(ValueError, match="weights are on cpu"):
        linear(torch.randn(2, 6))


class Made:
    """A transport, or the lane of one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.modes: list[bool] = []

    def change_mode(self, *, capturing: bool = False) -> None:
        self.modes.append(capturing)

    def watch_replays(self) -> None:
        """Nothing is replayed."""


def test_a_transport_serves_one_kind_of_device(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "Lane", Made)
    monkeypatch.setattr(routes, "select_transport", lambda *arguments: Made(arguments[-1]))
    shards = [FakeShard("a"), FakeShard("b")]
    groups = [WeightGroup([shard], world) for shard in shards]
    found = routes.Routes(etp.EtpConfig())

    def transports(device: str) -> list[Any]:
        for shard, group in zip(shards, groups, strict=True):
            shard.data = torch.empty(4, 3, device=device)
            group._specs = ()
        return [found.of(group).transport for group in groups]

    cpu = transports("cpu")
    meta = transports("meta")
    assert [each.device.type for each in (*cpu, *meta)] == ["cpu", "cpu", "meta", "meta"]
    assert cpu[0] is cpu[1]
    assert meta[0] is meta[1]
    assert found.transports == {world: meta[0]}
    assert transports("cpu") == cpu
    found.change_mode(capturing=True)
    assert cpu[0].modes == meta[0].modes == [True]


def test_a_transport_that_was_put_there_is_used(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "select_transport", None)
    found, given = routes.Routes(etp.EtpConfig()), cast("Any", object())
    found.transports[world] = given
    for name in ("a", "b"):
        assert found.of(WeightGroup([FakeShard(name)], world)).transport is given


def test_groups_of_one_name_are_counted_together(world: dist.ProcessGroup) -> None:
    counters = TrafficCounters()
    groups = [WeightGroup([FakeShard(name)], world) for name in ("Linear.weight", "Linear.weight", "other")]
    for group in groups:
        counters.gathered(group)
        counters.reduced(group, [torch.zeros(4)])
    assert counters.gathers == counters.reductions == {"Linear.weight": 2, "other": 1}
    # A group of one rank gets nothing from peers.
    assert counters.gather_bytes == counters.reduce_bytes == {"Linear.weight": 0, "other": 0}
    groups[0].size = groups[1].size = 2
    each = groups[0].nbytes // 2
    assert counters.gather_bytes == {"Linear.weight": 2 * each, "other": 0}
    assert counters.reduce_bytes == {"Linear.weight": 2 * 8, "other": 0}
    counters.forget(groups[0])
    assert counters.gathers == counters.reductions == {"Linear.weight": 1, "other": 1}
    counters.reset()
    assert counters.gathers == {}


def test_a_runtime_keeps_nothing_of_groups_that_another_adopts(world: dist.ProcessGroup) -> None:
    layers = [nn.Linear(6, 6) for _ in range(2)]
    model = nn.Sequential(*layers)
    former = etp.shard_module(model, world)
    model(torch.randn(2, 6)).sum().backward()
    assert former.counters.gathers
    EtpRuntime(etp.EtpConfig()).adopt(model)
    assert former.counters.gathers == {}
    alive = [weakref.ref(cast("Any", layer.weight).weight_group) for layer in layers]
    model.zero_grad()
    del model, layers
    gc.collect()
    assert former.groups == []
    assert [group() for group in alive] == [None, None]


def _full(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight.full_tensor(), layer.bias


@pytest.mark.parametrize("options", [{}, {"timeout_s": 5.0}, {"fp32_accumulation": False}, {"transport": "c10d"}])
def test_sharding_again_makes_no_other_transport_unless_its_options_differ(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A transport's communicators are never given back."""
    made: list[Any] = []
    select = select_transport

    def counted(*arguments: Any) -> Any:
        made.append(select(*arguments))
        return made[-1]

    monkeypatch.setattr(routes, "select_transport", counted)
    model = nn.Sequential(etp.Linear(6, 6, etp_group=world), etp.Linear(6, 6, etp_group=world))
    x = torch.randn(2, 6)
    model(x).sum().backward()
    assert len(made) == 2, "loose layers have a runtime each"
    former = etp.shard_module(model, world)
    assert former.transports == {world: made[0]}
    for extra in (1, 2):
        model.append(nn.Linear(6, 6))
        config = etp.EtpConfig(prefetch_depth=extra, **options)
        runtime = etp.shard_module(model, world, config=config)
        expected = x
        for layer in model.children():
            expected = torch.nn.functional.linear(expected, *_full(layer))
        assert torch.equal(model(x), expected)
        model(x).sum().backward()
        assert list(runtime.transports) == [world]
    assert former.transports == {} or options
    assert len(made) == (3 if options else 2)


def test_a_runtime_that_keeps_groups_keeps_its_transports(world: dist.ProcessGroup) -> None:
    """As one whose weights are adopted chunk by chunk."""
    layers = [nn.Linear(6, 6, bias=False) for _ in range(2)]
    owner = EtpRuntime()
    for layer in layers:
        shard = etp.ETPShardedParam.from_full(layer.weight, world)
        layer._parameters["weight"] = shard
        shard.attach(owner, "weight")
        owner.add(WeightGroup([shard], world))
    x = torch.randn(2, 6)
    expected = layers[1](layers[0](x))
    first, second = EtpRuntime(), EtpRuntime()
    first.adopt(layers[0])
    assert list(owner.transports) == [world]
    assert first.transports == {}
    assert torch.equal(layers[1](layers[0](x)), expected)
    second.adopt(layers[1])
    assert owner.transports == {}
    assert torch.equal(layers[1](layers[0](x)), expected)
    assert len({id(runtime.transports[world]) for runtime in (first, second)}) == 2
