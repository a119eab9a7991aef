"""Gradient buffers and sinks: what the pool owns, what padding holds, where a reduction ends, what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from etp.collectives.base import GradSink
from etp.collectives.sums import accumulate_parts
from etp.errors import EtpCommunicationError, EtpStateError
from etp.grads import PendingReduction, WgradPool, gradient_sink, padded_wgrad
from etp.group import ReduceState, WeightGroup
from etp.streams import Enqueued, Ready
from tests.support.fake_group import fake_group
from tests.unit.test_group import FakeShard

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    with fake_group(rank=0, world_size=4) as group:
        yield group


def test_a_returned_buffer_is_lent_again_and_counted_once() -> None:
    pool = WgradPool()
    first = pool.lease((6, 4), F32, CPU)
    assert (tuple(first.shape), first.dtype, first.is_contiguous()) == ((6, 4), F32, True)
    assert pool.owns(first)
    assert not pool.has_free((6, 4), F32, CPU)
    pool.restore(first)
    assert not pool.owns(first)
    assert pool.has_free((4, 6), F32, CPU)
    again = pool.lease((4, 6), F32, CPU)
    assert again.data_ptr() == first.data_ptr()
    assert pool.nbytes() == 6 * 4 * 4


def test_two_leases_never_share_memory() -> None:
    pool = WgradPool()
    buffers = [pool.lease((8,), F32, CPU) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 3
    assert pool.nbytes() == 3 * 8 * 4


def test_other_dtypes_and_sizes_have_buffers_of_their_own() -> None:
    pool = WgradPool()
    pool.restore(pool.lease((8,), F32, CPU))
    for shape, dtype in (((9,), F32), ((8,), torch.bfloat16)):
        assert not pool.has_free(shape, dtype, CPU)
        assert pool.lease(shape, dtype, CPU).dtype is dtype
    assert pool.nbytes() == 8 * 4 + 9 * 4 + 8 * 2


def test_what_the_pool_did_not_lend_is_refused() -> None:
    pool = WgradPool()
    foreign = torch.randn(6, 4)
    assert not pool.owns(foreign)
    with pytest.raises(EtpStateError, match=r"shape \(6, 4\) was returned to a pool that did not lend it"):
        pool.restore(foreign)
    other = WgradPool().lease((6, 4), F32, CPU)
    with pytest.raises(EtpStateError, match="did not lend it"):
        pool.restore(other)


def test_returning_twice_is_refused() -> None:
    pool = WgradPool()
    buffer = pool.lease((6, 4), F32, CPU)
    pool.restore(buffer)
    with pytest.raises(EtpStateError, match="or was returned twice"):
        pool.restore(buffer)


def test_a_view_of_the_leading_rows_returns_the_whole_buffer() -> None:
    pool = WgradPool()
    rows = pool.lease((6, 4), F32, CPU)[:5]
    assert pool.owns(rows)
    assert not pool.owns(rows[1:])
    pool.restore(rows)
    assert pool.has_free((6, 4), F32, CPU)


def test_clear_frees_what_is_not_lent_and_write_off_what_is() -> None:
    pool = WgradPool()
    lent = pool.lease((4,), F32, CPU)
    pool.restore(pool.lease((8,), F32, CPU))
    pool.clear()
    assert pool.nbytes() == 4 * 4
    assert pool.owns(lent)
    pool.write_off()
    assert pool.nbytes() == 0
    assert not pool.owns(lent)


def test_a_leased_gradient_is_padded_where_it_lies() -> None:
    pool = WgradPool()
    wgrad = pool.lease((8, 3), F32, CPU).fill_(float("nan"))[:5]
    values = torch.randn(5, 3)
    wgrad.copy_(values)
    padded = padded_wgrad(wgrad, (8, 3), pool)
    assert padded.data_ptr() == wgrad.data_ptr()
    assert torch.equal(padded[:5], values)
    assert padded[5:].count_nonzero() == 0


@pytest.mark.parametrize("strided", [False, True])
def test_a_foreign_gradient_is_copied_where_padding_or_strides_need_it(strided: bool) -> None:
    pool = WgradPool()
    values = torch.randn(3, 5).t() if strided else torch.randn(5, 3)
    padded = padded_wgrad(values, (8, 3), pool)
    assert pool.owns(padded)
    assert torch.equal(padded[:5], values)
    assert padded[5:].count_nonzero() == 0
    assert padded_wgrad(torch.randn(3, 8).t(), (8, 3), pool).is_contiguous()


def test_a_foreign_gradient_that_fits_is_used_as_it_is() -> None:
    pool = WgradPool()
    wgrad = torch.randn(8, 3)
    assert padded_wgrad(wgrad, (8, 3), pool) is wgrad
    assert pool.nbytes() == 0


def test_sinks_prefer_main_grad_then_grad_then_make_one() -> None:
    param = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    fresh = gradient_sink(param)
    assert not fresh.accumulate
    assert (tuple(fresh.tensor.shape), fresh.tensor.dtype) == ((4, 3), torch.bfloat16)
    assert param.grad is None
    param.grad = torch.randn(4, 3, dtype=torch.bfloat16)
    assert gradient_sink(param) == GradSink(param.grad, accumulate=True)
    param.main_grad = torch.randn(4, 3)  # type: ignore[attr-defined]
    assert gradient_sink(param).tensor is param.main_grad  # type: ignore[attr-defined]


def test_a_made_sink_is_contiguous_whatever_the_shards_strides() -> None:
    param = torch.nn.Parameter(torch.randn(3, 4).t())
    assert gradient_sink(param).tensor.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_parts_are_summed_in_rank_order_and_rounded_once(dtype: torch.dtype, accumulate: bool) -> None:
    parts = torch.randn(5, 6).to(dtype)
    before = torch.randn(2, 3).to(dtype)
    sink = GradSink(before.clone(), accumulate)
    accumulate_parts(parts, sink, 5)
    wide = torch.promote_types(dtype, F32)
    total = torch.zeros(6, dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    total = (total / 5).view(2, 3)
    expected = (before.to(wide) + total).to(dtype) if accumulate else total.to(dtype)
    assert torch.equal(sink.tensor, expected)


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_a_ranks_own_part_takes_its_place_in_the_order(rank: int) -> None:
    parts = torch.randn(5, 6) * torch.tensor([1e8, 1.0, -1e8, 1e-3, 1.0])[:, None]
    whole, split = GradSink(torch.empty(6), accumulate=False), GradSink(torch.empty(6), accumulate=False)
    accumulate_parts(parts, whole, 1)
    others = torch.cat([parts[:rank], parts[rank + 1 :]])
    accumulate_parts(others, split, 1, own=parts[rank].clone(), rank=rank)
    assert torch.equal(whole.tensor, split.tensor)


class Event(Enqueued):
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
    group = WeightGroup([FakeShard("w")], world)
    group.set_reduce_state(ReduceState.ISSUED)

    def publish(run_hooks: bool) -> None:
        log.append(f"published in {group.reduce_state.name}" + ("" if run_hooks else ", no hooks"))
        if fails:
            raise KeyError("a hook")

    wgrads = [pool.lease((8, 3), F32, CPU), torch.randn(8, 3)]
    return PendingReduction(group, Ready(Event(log, lost=lost), (), None), wgrads, pool, publish)


def test_a_finished_reduction_publishes_after_the_wait_and_frees_its_own_buffers(world: dist.ProcessGroup) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log)
    assert reduction.nbytes == 2 * 8 * 3 * 4
    assert reduction.holds((8, 3), F32, CPU)
    assert not reduction.holds((8, 4), F32, CPU)
    reduction.finish()
    assert log == ["joined", "published in READY"]
    assert reduction.group.reduce_state is ReduceState.NONE
    assert pool.has_free((8, 3), F32, CPU)
    assert pool.nbytes() == 8 * 3 * 4, "the foreign buffer stays its owner's"


def test_a_belated_reduction_publishes_without_hooks(world: dist.ProcessGroup) -> None:
    log: list[str] = []
    reduction = pending(world, WgradPool(), log)
    reduction.belated = True
    reduction.finish()
    assert log == ["joined", "published in READY, no hooks"]


def test_a_discarded_reduction_is_waited_for_and_not_published(world: dist.ProcessGroup) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log)
    reduction.discard()
    assert log == ["joined"]
    assert reduction.group.reduce_state is ReduceState.NONE
    assert pool.has_free((8, 3), F32, CPU)


def test_a_publication_that_raises_leaves_the_group_usable(world: dist.ProcessGroup) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log, fails=True)
    with pytest.raises(KeyError, match="a hook"):
        reduction.finish()
    assert reduction.group.reduce_state is ReduceState.NONE
    assert pool.has_free((8, 3), F32, CPU)


@pytest.mark.parametrize("end", [PendingReduction.finish, PendingReduction.discard])
def test_a_lost_peer_leaves_the_group_usable(world: dist.ProcessGroup, end: Callable[[PendingReduction], None]) -> None:
    pool = WgradPool()
    log: list[str] = []
    reduction = pending(world, pool, log, lost=True)
    with pytest.raises(EtpCommunicationError):
        end(reduction)
    assert log == ["joined"], "what did not arrive is not published"
    assert reduction.group.reduce_state is ReduceState.NONE
    assert pool.has_free((8, 3), F32, CPU)
