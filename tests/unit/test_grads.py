"""Gradient buffers and sinks: what the pool owns, what padding holds, where a reduction ends, what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etp.collectives.sums import accumulate_parts
from etp.errors import EtpCommunicationError, EtpStateError
from etp.grads import Destinations, PendingReduction, WgradPool, padded_wgrads
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.shard import Shard
from etp.stack import Stack
from etp.streams import InFlight
from tests.support.fake_group import fake_group
from tests.unit.test_group import shard_named

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    with fake_group(rank=0, world_size=4) as group:
        yield group


def test_a_returned_buffer_is_lent_again_and_counted_once() -> None:
    pool = WgradPool()
    (first,) = pool.lease(1, (6, 4), F32, CPU)
    assert (tuple(first.shape), first.dtype, first.is_contiguous()) == ((6, 4), F32, True)
    assert pool.kind_of(first) is not None
    assert not pool.has_free(24, F32, CPU)
    pool.restore(first)
    assert pool.kind_of(first) is None
    assert pool.has_free(24, F32, CPU)
    (again,) = pool.lease(1, (4, 6), F32, CPU)
    assert again.data_ptr() == first.data_ptr()
    assert pool.nbytes() == 6 * 4 * 4


def test_two_leases_never_share_memory() -> None:
    pool = WgradPool()
    buffers = [pool.lease(1, (8,), F32, CPU)[0] for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 3
    assert pool.nbytes() == 3 * 8 * 4


def test_other_dtypes_and_sizes_have_buffers_of_their_own() -> None:
    pool = WgradPool()
    pool.restore(pool.lease(1, (8,), F32, CPU)[0])
    for numel, dtype in ((9, F32), (8, torch.bfloat16)):
        assert not pool.has_free(numel, dtype, CPU)
        assert pool.lease(1, (numel,), dtype, CPU).dtype is dtype
    assert pool.nbytes() == 8 * 4 + 9 * 4 + 8 * 2


def test_what_the_pool_did_not_lend_is_refused() -> None:
    pool = WgradPool()
    foreign = torch.randn(6, 4)
    assert pool.kind_of(foreign) is None
    with pytest.raises(EtpStateError, match=r"shape \(6, 4\) was returned to a pool that did not lend it"):
        pool.restore(foreign)
    (other,) = WgradPool().lease(1, (6, 4), F32, CPU)
    with pytest.raises(EtpStateError, match="did not lend it"):
        pool.restore(other)


def test_returning_twice_is_refused() -> None:
    pool = WgradPool()
    (buffer,) = pool.lease(1, (6, 4), F32, CPU)
    pool.restore(buffer)
    with pytest.raises(EtpStateError, match="or was returned twice"):
        pool.restore(buffer)


def test_a_view_of_the_leading_rows_returns_the_whole_buffer() -> None:
    pool = WgradPool()
    rows = pool.lease(1, (6, 4), F32, CPU)[0][:5]
    assert pool.kind_of(rows) is not None
    assert pool.kind_of(rows[1:]) is None
    pool.restore(rows)
    assert pool.has_free(24, F32, CPU)


def test_clear_frees_what_is_not_lent_and_write_off_what_is() -> None:
    pool = WgradPool()
    (lent,) = pool.lease(1, (4,), F32, CPU)
    pool.restore(pool.lease(1, (8,), F32, CPU)[0])
    pool.clear()
    assert pool.nbytes() == 4 * 4
    assert pool.kind_of(lent) is not None
    pool.write_off()
    assert pool.nbytes() == 0
    assert pool.kind_of(lent) is None


@pytest.mark.parametrize("count", [1, 3])
def test_leased_gradients_are_padded_where_they_lie(count: int) -> None:
    pool = WgradPool()
    lease = pool.lease(count, (8, 3), F32, CPU)
    values = torch.randn(count, 5, 3)
    wgrads = [whole.fill_(float("nan"))[:5].copy_(value) for whole, value in zip(lease, values, strict=True)]
    padded = padded_wgrads(wgrads, ShardLayout((5, 3), 4, 2), pool)
    assert padded is lease
    assert torch.equal(padded.block()[:, :5], values)
    assert padded.block()[:, 5:].count_nonzero() == 0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_foreign_gradients_are_copied_where_padding_or_strides_need_it(strided: bool, count: int) -> None:
    pool = WgradPool()
    values = [torch.randn(3, 5).t() if strided else torch.randn(5, 3) for _ in range(count)]
    padded = padded_wgrads(values, ShardLayout((5, 3), 4, 2), pool)
    assert pool.kind_of(padded[0]) is not None
    assert torch.equal(padded.block()[:, :5], torch.stack(values))
    assert padded.block()[:, 5:].count_nonzero() == 0
    assert all(whole.is_contiguous() for whole in padded_wgrads([torch.randn(3, 8).t()], ShardLayout((8, 3), 4), pool))


def test_foreign_gradients_that_fit_are_used_as_they_are() -> None:
    pool = WgradPool()
    wgrads = [torch.randn(8, 3), torch.randn(8, 3)]
    padded = padded_wgrads(wgrads, ShardLayout((8, 3), 4, 1), pool)
    assert all(one is other for one, other in zip(padded, wgrads, strict=True))
    assert pool.nbytes() == 0


def test_gradients_go_to_main_grad_then_grad_then_a_new_tensor(world: dist.ProcessGroup) -> None:
    shard = bf16_shard(world)
    fresh = Destinations.of([shard])
    assert not fresh.accumulate
    assert (tuple(fresh.sinks.shape), fresh.sinks.dtype) == ((4, 3), torch.bfloat16)
    assert shard.grad is None
    fresh.publish()
    assert shard.grad is fresh.sinks[0]
    into = Destinations.of([shard])
    assert into.accumulate
    assert into.sinks[0] is shard.grad
    shard.main_grad = torch.randn(4, 3)
    into = Destinations.of([shard])
    assert into.sinks[0] is shard.main_grad
    assert Destinations.of([shard], into) is into
    shard.main_grad = shard.main_grad.clone()
    assert Destinations.of([shard], into).sinks[0] is shard.main_grad
    other = bf16_shard(world)
    other.main_grad = torch.randn(4, 3)
    both = Destinations.of([shard, other])
    assert len(Destinations.of([shard], both).sinks) == 1, "a pass that reaches fewer of the group's shards"


def test_some_of_a_group_may_have_a_gradient_to_add_to(world: dist.ProcessGroup) -> None:
    shards = [bf16_shard(world) for _ in range(3)]
    before = shards[1].grad = torch.tensor([-0.0, 1.0]).repeat(6).view(4, 3).bfloat16()
    into = Destinations.of(shards)
    assert into.accumulate
    accumulate_parts(torch.full((1, 3, 12), -0.0), into.sinks, 1, accumulate=True)
    into.publish()
    assert shards[1].grad is before
    for shard in shards:
        assert shard.grad is not None
        assert bool(shard.grad.signbit().any()), "a sum of negative zeros keeps its sign"
    assert shards[0].grad is not shards[2].grad


def bf16_shard(world: dist.ProcessGroup) -> Any:
    """A shard of (4, 3)."""
    layout = ShardLayout((4 * world.size(), 3), world.size(), 1)
    return Shard(torch.randn(4, 3, dtype=torch.bfloat16), layout, world)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_parts_are_summed_in_rank_order_and_rounded_once(dtype: torch.dtype, accumulate: bool) -> None:
    parts = torch.randn(5, 6).to(dtype)
    before = torch.randn(2, 3).to(dtype)
    (sink,) = sinks = Stack([before.clone()])
    accumulate_parts(parts, sinks, 5, accumulate=accumulate)
    wide = torch.promote_types(dtype, F32)
    total = torch.zeros(6, dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    total = (total / 5).view(2, 3)
    expected = (before.to(wide) + total).to(dtype) if accumulate else total.to(dtype)
    assert torch.equal(sink, expected)


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_a_ranks_own_part_takes_its_place_in_the_order(rank: int) -> None:
    parts = torch.randn(5, 6) * torch.tensor([1e8, 1.0, -1e8, 1e-3, 1.0])[:, None]
    whole, split = Stack([torch.empty(6)]), Stack([torch.empty(6)])
    accumulate_parts(parts, whole, 1, accumulate=False)
    others = torch.cat([parts[:rank], parts[rank + 1 :]])
    accumulate_parts(others, split, 1, accumulate=False, own=Stack([parts.clone()]), rank=rank)
    assert torch.equal(whole[0], split[0])


class Event(InFlight):
    """A started reduction that notes when it is waited for."""

    def __init__(self, log: list[str], *, lost: bool = False) -> None:
        super().__init__()
        self._log = log
        self._lost = lost

    def join(self) -> None:
        self._log.append("joined")
        if self._lost:
            raise EtpCommunicationError


def pending(
    world: dist.ProcessGroup, pool: WgradPool, log: list[str], *, fails: bool = False, lost: bool = False
) -> PendingReduction:
    group = WeightGroup([shard_named("w")], world)
    group.reducing = True

    def publish(run_hooks: bool) -> None:
        log.append(f"published, {group.reducing=}" + ("" if run_hooks else ", no hooks"))
        if fails:
            raise KeyError("a hook")

    wgrads = pool.lease(2, (8, 3), F32, CPU)
    block = pool.kind_of(wgrads[0])
    return PendingReduction(group, Event(log, lost=lost), wgrads, 192, pool, block, None, publish)


def test_a_finished_reduction_publishes_after_the_wait_and_frees_its_own_buffers(world: dist.ProcessGroup) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log)
    assert reduction.block == (48, F32, CPU, None)
    reduction.finish()
    assert log == ["joined", "published, group.reducing=True"]
    assert not reduction.group.reducing
    assert pool.has_free(48, F32, CPU)
    assert pool.nbytes() == 2 * 8 * 3 * 4


def test_a_belated_reduction_publishes_without_hooks(world: dist.ProcessGroup) -> None:
    log: list[str] = []
    reduction = pending(world, WgradPool(), log)
    reduction.belated = True
    reduction.finish()
    assert log == ["joined", "published, group.reducing=True, no hooks"]


def test_a_discarded_reduction_is_waited_for_and_not_published(world: dist.ProcessGroup) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log)
    reduction.finish(publish=False)
    assert log == ["joined"]
    assert not reduction.group.reducing
    assert pool.has_free(48, F32, CPU)


def test_a_publication_that_raises_leaves_the_group_usable(world: dist.ProcessGroup) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log, fails=True)
    with pytest.raises(KeyError, match="a hook"):
        reduction.finish()
    assert not reduction.group.reducing
    assert pool.has_free(48, F32, CPU)


@pytest.mark.parametrize("publish", [True, False])
def test_a_lost_peer_leaves_the_group_usable(world: dist.ProcessGroup, publish: bool) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log, lost=True)
    with pytest.raises(EtpCommunicationError):
        reduction.finish(publish=publish)
    assert log == ["joined"], "what did not arrive is not published"
    assert not reduction.group.reducing
    assert pool.has_free(48, F32, CPU)
