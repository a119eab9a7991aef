"""WeightGroup: both state machines in full, slots, and what a slot holds for whom. Without collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from etp.cache import BufferCache
from etp.collectives.base import Route, Transport
from etp.errors import EtpStateError, StaleWeightError
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.shard import Shard
from etp.stack import Stack
from etp.streams import InFlight, Lane
from tests.support.fake_group import fake_group

RANKS = 4


def shard_named(name: str, *, requires_grad: bool = True) -> Shard:
    """This rank's shard of a new weight, (10, 3); over four ranks, of (3, 3)."""
    layout = ShardLayout((10, 3), dist.get_world_size(), 1)
    shard = Shard(torch.randn(layout.shard_shape), layout, dist.group.WORLD, requires_grad)
    shard.fqn = name
    return shard


class Done(InFlight):
    """A collective that is done."""

    def __init__(self, joined: list[str], label: str) -> None:
        super().__init__()
        self._joined, self._label = joined, label

    def join(self) -> None:
        self._joined.append(self._label)


class Copies(Transport):
    """A transport for one process: every rank's shard is this one."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.joined: list[str] = []

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        for output, shard in zip(outputs, shards, strict=True):
            output.copy_(shard.repeat(RANKS, 1))
        self.started.append(label)
        return Done(self.joined, label)

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        raise NotImplementedError


class PlannedError(Exception):
    """A peer that is lost, or memory that is not there."""


class Fails(Copies):
    """A transport whose next collective fails: when it is started, or when it is waited for."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        where, self._where = self._where, ""
        if where == "start":
            raise PlannedError
        if where == "wait":
            return Lost()
        return super().all_gather(outputs, shards, label)


class Lost(InFlight):
    """A collective that will not be done."""

    def join(self) -> None:
        raise PlannedError


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    with fake_group(rank=1, world_size=RANKS) as group:
        yield group


LANE = Lane(torch.device("cpu"))


def gather(group: WeightGroup, transport: Copies, *, pass_number: int = 0, epoch: int = 0) -> None:
    route = Route(transport, LANE, LANE, LANE.device)
    group.issue_gather(route, pass_number=pass_number, epoch=epoch, waits=None)


def test_a_gather_goes_through_its_states_and_hands_out_logical_views(world: dist.ProcessGroup) -> None:
    shards = [shard_named("a"), shard_named("b", requires_grad=False)]
    group, transport = WeightGroup(shards, world), Copies()
    group.attach(BufferCache(1, 0))
    assert (group.name, group.size, group.spec.nbytes) == ("a (+1)", RANKS, 2 * 12 * 3 * 4)
    gather(group, transport)
    assert group.pending
    assert transport.joined == []
    weights = group.take(LANE)
    assert not group.pending
    assert transport.joined == ["all-gather of a (+1)"]
    for weight, shard, buffer in zip(weights, shards, group.slot.buffers, strict=True):
        assert tuple(weight.shape) == (10, 3)
        assert torch.equal(weight, shard.local_shard().repeat(RANKS, 1)[:10])
        assert weight.data_ptr() == buffer.data_ptr()
        assert weight.requires_grad == shard.requires_grad
        assert not buffer.requires_grad
    assert [(shard.weight_group, shard._group_index) for shard in shards] == [(group, 0), (group, 1)]


def test_gathering_twice_without_taking_is_refused(world: dist.ProcessGroup) -> None:
    group, transport = WeightGroup([shard_named("w")], world), Copies()
    group.attach(BufferCache(1, 0))
    gather(group, transport)
    with pytest.raises(EtpStateError, match="w is being gathered already"):
        gather(group, transport)


def test_a_group_without_a_buffer_says_so(world: dist.ProcessGroup) -> None:
    group = WeightGroup([shard_named("w")], world)
    assert not group.holds(0, gathered_in=None)
    with pytest.raises(EtpStateError, match="w has no gather buffer yet"):
        _ = group.slot


def test_taking_what_another_group_overwrote_names_both(world: dist.ProcessGroup) -> None:
    cache, transport = BufferCache(1, 0), Copies()
    first, second = WeightGroup([shard_named("first")], world), WeightGroup([shard_named("second")], world)
    for group in (first, second):
        group.attach(cache)
        gather(group, transport)
    with pytest.raises(StaleWeightError, match=r"first reads .*generation 1.* now holds second \(generation 2\)"):
        first.take(LANE)
    assert torch.equal(second.take(LANE)[0], second.shards[0].local_shard().repeat(RANKS, 1)[:10])


def test_a_slot_holds_a_weight_until_it_changes_or_is_overwritten(world: dist.ProcessGroup) -> None:
    cache, transport = BufferCache(1, 0), Copies()
    shard = shard_named("w")
    group, other = WeightGroup([shard], world), WeightGroup([shard_named("v")], world)
    for each in (group, other):
        each.attach(cache)
    gather(group, transport)
    group.take(LANE)
    assert group.holds(0, gathered_in=None)
    assert not group.holds(1, gathered_in=None), "an announced change"
    shard.local_shard().add_(1.0)
    group.read_shards(0)
    assert not group.holds(0, gathered_in=None), "a counted change"
    gather(group, transport)
    group.take(LANE)
    assert group.holds(0, gathered_in=None)
    shard.data = shard.data.clone()
    group.read_shards(0)
    assert not group.holds(0, gathered_in=None), "other storage"
    gather(group, transport)
    group.take(LANE)
    gather(other, transport)
    assert not group.holds(0, gathered_in=None), "another weight in the slot"


def test_an_abandoned_gather_is_waited_for_and_frees_its_slot(world: dist.ProcessGroup) -> None:
    group, transport = WeightGroup([shard_named("w")], world), Copies()
    group.attach(BufferCache(1, 0))
    gather(group, transport)
    assert group.slot.owner is group
    group.abandon_gather()
    assert transport.joined == ["all-gather of w"]
    assert not group.pending
    group.abandon_gather()
    assert transport.joined == ["all-gather of w"]


@pytest.mark.parametrize(
    ("where", "then"), [("start", WeightGroup.take), ("wait", WeightGroup.take), ("wait", WeightGroup.abandon_gather)]
)
def test_what_a_failed_gather_left_is_taken_for_no_weight(
    world: dist.ProcessGroup, where: str, then: Callable[..., object]
) -> None:
    cache, transport = BufferCache(1, 0), Fails(where)
    group, other = WeightGroup([shard_named("w")], world), WeightGroup([shard_named("v")], world)
    for each in (other, group):
        each.attach(cache)
    gather(other, Copies())
    other.take(LANE)
    with pytest.raises(PlannedError):  # noqa: PT012  # which of the two raises is the parameter
        gather(group, transport)
        then(group, *[LANE] * (then is WeightGroup.take))
    for each in (group, other):
        assert not each.pending
        assert not each.holds(0, gathered_in=None)
    with pytest.raises(StaleWeightError, match="w reads"):
        group.take(LANE)
    gather(group, transport)
    assert torch.equal(group.take(LANE)[0], group.shards[0].local_shard().repeat(RANKS, 1)[:10])
    assert group.holds(0, gathered_in=None)


def test_a_slot_without_memory_leaves_its_group_as_it_was(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = WeightGroup([shard_named("w")], world)
    group.attach(BufferCache(1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            gather(group, Copies())
    assert not group.pending
    assert not group.holds(0, gathered_in=None)
    gather(group, Copies())
    group.take(LANE)


def _out_of_memory(*_: object, **__: object) -> torch.Tensor:
    raise torch.OutOfMemoryError


def test_a_new_dtype_takes_a_new_slot_and_gives_the_old_one_back(world: dist.ProcessGroup) -> None:
    cache, shard = BufferCache(1, 0), shard_named("w")
    group = WeightGroup([shard], world)
    group.attach(cache)
    old = group.slot
    assert old.buffers
    group.attach(cache)
    assert group.slot is old
    shard.data = shard.data.to(torch.bfloat16)
    group.read_shards(0)
    group.attach(cache)
    assert group.slot is not old
    assert not old.allocated
    assert cache.slots() == [group.slot]
    assert group.slot.spec.dtype is torch.bfloat16


def test_memory_that_cannot_be_gathered_is_named(world: dist.ProcessGroup) -> None:
    """As where ``param.data`` is assigned a transposed tensor, or the whole weight."""
    shard = shard_named("w")
    group = WeightGroup([shard], world)
    fitting = shard.data
    rows, columns = fitting.shape
    for other in (torch.zeros(columns, rows).t(), torch.zeros(rows + 1, columns), torch.zeros(columns)):
        shard.data = other
        group.read_shards(0)
        with pytest.raises(ValueError, match=r"^w has been given .* assign param\.data a contiguous tensor of .* rows"):
            group.local_shards()
    shard.data = fitting
    group.read_shards(1)
    assert torch.equal(group.local_shards()[0], fitting)


def test_an_empty_group_is_refused(world: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="at least one"):
        WeightGroup([], world)
