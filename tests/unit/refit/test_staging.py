"""The pool of packet memory: its limit holds whatever happens, and slots of any number of links are within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_patches.refit.errors import StagingError
from megatron_patches.refit.memory.staging import SLOTS, StagingPool, slot_bytes, useful_bytes


def test_the_limit_is_enforced_and_the_peak_remembered() -> None:
    pool = StagingPool(100)
    first = pool.lease(60, bytearray)
    assert len(first.buffer) == 60
    with pytest.raises(StagingError, match="a buffer of 41 bytes beside 60 bytes of packets exceeds the 100 bytes"):
        pool.lease(41, bytearray)
    second = pool.lease(40, bytearray)
    first.release()
    first.release()
    assert (pool.leased_bytes, pool.peak_bytes) == (40, 100)
    second.release()
    assert pool.leased_bytes == 0


def test_a_buffer_that_cannot_be_made_is_not_counted() -> None:
    def fail(nbytes: int) -> None:
        raise MemoryError(f"no {nbytes} bytes")

    pool = StagingPool(100)
    with pytest.raises(MemoryError, match="no 100 bytes"):
        pool.lease(100, fail)
    assert pool.leased_bytes == 0


@given(limit=st.integers(0, 1 << 40), links=st.integers(0, 5000), extra=st.integers(0, 2))
def test_slots_fill_the_budget_but_for_alignment(limit: int, links: int, extra: int) -> None:
    count = SLOTS * links + extra
    if limit < 8 * max(1, count):
        with pytest.raises(
            StagingError, match=f"staging_bytes is {limit}; {links} links take at least {8 * count} byte"
        ):
            slot_bytes(limit, links, extra)
        return
    size = slot_bytes(limit, links, extra)
    assert size % 8 == 0
    assert size % 256 == 0 or size < 256
    assert size * count <= limit
    assert (size + 256) * max(1, count) > limit


@pytest.mark.parametrize(
    ("total", "useful"), [(1, 256), (256, 256), (257, 512), (1 << 20, 1 << 20), (8 << 20, 1 << 20), (1 << 34, 1 << 31)]
)
def test_a_slot_is_no_larger_than_of_use(total: int, useful: int) -> None:
    assert useful_bytes(total) == useful
