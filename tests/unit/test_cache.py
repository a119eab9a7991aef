"""The gather cache: who shares a slot with whom, what stays at its address, and which reads are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etp.cache import BufferCache, BufferSpec, Slot
from etp.errors import EtpStateError, StaleWeightError
from etp.group import WeightGroup

CPU = torch.device("cpu")


def weight(name: str) -> WeightGroup:
    """An owner of slots, as far as the cache asks for it."""
    return cast("WeightGroup", SimpleNamespace(name=name))


W, V = weight("layers.0.weight"), weight("layers.2.weight")


def spec(*shape: int, dtype: torch.dtype = torch.float32, count: int = 1) -> BufferSpec:
    return BufferSpec(shape, dtype, CPU, count)


ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_bytes_follow_the_dtypes_own_size(dtype: torch.dtype) -> None:
    assert BufferSpec((6, 4), dtype, CPU).nbytes == 24 * dtype.itemsize


def test_groups_of_one_shape_take_slots_in_turn() -> None:
    cache = BufferCache(slots_per_shape=2, resident_bytes=0)
    slots = [cache.reserve(spec(8, 4)) for _ in range(5)]
    assert slots[0] is slots[2] is slots[4]
    assert slots[1] is slots[3]
    assert slots[0] is not slots[1]


def test_other_shapes_and_dtypes_have_slots_of_their_own() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    specs = [spec(8, 4), spec(4, 8), spec(8, 4, dtype=torch.bfloat16), spec(8, 4, count=2)]
    assert len({id(cache.reserve(each)) for each in specs}) == 4


def test_storage_comes_at_first_use_and_is_counted() -> None:
    cache = BufferCache(slots_per_shape=2, resident_bytes=0)
    slots = [cache.reserve(spec(8, 4)) for _ in range(3)]
    assert cache.nbytes() == 0
    (buffer,) = slots[0].buffers
    assert (tuple(buffer.shape), buffer.dtype, buffer.device) == ((8, 4), torch.float32, CPU)
    assert cache.nbytes() == 8 * 4 * 4
    assert slots[2].buffers[0] is buffer
    assert slots[1].buffers[0].data_ptr() != buffer.data_ptr()
    assert cache.nbytes() == 2 * 8 * 4 * 4


def test_the_resident_budget_buys_slots_of_their_own_in_order_of_reservation() -> None:
    nbytes = 8 * 4 * 4
    cache = BufferCache(slots_per_shape=1, resident_bytes=2 * nbytes + nbytes // 2)
    slots = [cache.reserve(spec(8, 4)) for _ in range(4)]
    assert [slot.sharers for slot in slots] == [0, 0, 2, 2]
    assert slots[2] is slots[3]
    small = cache.reserve(spec(4, 4))  # what is left still buys a smaller one
    assert small.sharers == 0
    for slot in cache.slots():
        assert slot.buffers
    assert cache.nbytes() == 2 * nbytes + nbytes // 2 + nbytes


def test_an_address_stays_the_same_whoever_reserves_or_claims() -> None:
    cache = BufferCache(slots_per_shape=2, resident_bytes=0)
    slot = cache.reserve(spec(8, 4))
    address = slot.buffers[0].data_ptr()
    for round_number in range(5):
        cache.reserve(spec(8, 4))
        slot.claim(weight(f"weight {round_number}"))
        assert slot.buffers[0].data_ptr() == address


def test_clear_frees_storage_voids_content_and_keeps_slots() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=64)
    slots = [cache.reserve(spec(4, 4)), cache.reserve(spec(4, 4))]
    generations = [slot.claim(W) for slot in slots]
    cache.clear()
    assert cache.nbytes() == 0
    assert cache.slots() == slots
    for slot, generation in zip(slots, generations, strict=True):
        with pytest.raises(StaleWeightError):
            slot.check(W, generation)
        assert slot.claim(W) > generation
        slot.check(W, slot.generation)


def test_a_slot_that_was_given_back_is_refused() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    slot = cache.reserve(spec(4, 4))
    cache.unreserve(slot)
    with pytest.raises(EtpStateError, match="this slot was given back or belongs to another cache"):
        cache.unreserve(slot)


def test_a_slot_of_another_cache_is_refused() -> None:
    slot = BufferCache(1, 0).reserve(spec(4, 4))
    with pytest.raises(EtpStateError, match="belongs to another cache"):
        BufferCache(1, 0).unreserve(slot)


def test_a_returned_dedicated_slot_gives_its_budget_back() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=64)
    slot = cache.reserve(spec(4, 4))
    assert slot.sharers == 0
    assert slot.buffers
    cache.unreserve(slot)
    assert cache.nbytes() == 0
    assert cache.reserve(spec(4, 4)).sharers == 0


def test_a_shared_slot_lives_until_the_last_group_gives_it_back() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    slot = cache.reserve(spec(4, 4))
    assert cache.reserve(spec(4, 4)) is slot
    assert slot.buffers
    cache.unreserve(slot)
    assert slot.allocated
    cache.unreserve(slot)
    assert not slot.allocated
    assert cache.slots() == []


def test_slots_are_reused_after_any_of_them_was_given_up() -> None:
    """Round-robin by a count of reservations would run past the end of a list that shrank."""
    cache = BufferCache(slots_per_shape=3, resident_bytes=0)
    first = [cache.reserve(spec(4, 4)) for _ in range(5)]
    for index in (0, 1, 3, 4):
        cache.unreserve(first[index])
    fresh = [cache.reserve(spec(4, 4)) for _ in range(5)]
    slots = [first[2], *fresh]
    assert len({id(slot) for slot in slots}) == 3
    assert sorted(slots.count(slot) for slot in set(slots)) == [2, 2, 2]


@given(st.integers(1, 4), st.lists(st.integers(0, 30), max_size=40))
def test_any_sequence_of_reserving_and_returning_keeps_slots_balanced(per_shape: int, moves: list[int]) -> None:
    """Even moves reserve; odd moves give some slot back. No slot is ever crowded while another stands empty."""
    cache = BufferCache(per_shape, resident_bytes=0)
    held: list[Slot] = []
    for move in moves:
        if move % 2 == 0 or not held:
            held.append(cache.reserve(spec(2, 2)))
        else:
            cache.unreserve(held.pop(move % len(held)))
        used = {id(slot) for slot in held}
        assert len(used) <= per_shape
        assert used == {id(slot) for slot in cache.slots()}


def test_a_claim_takes_the_slot_and_counts() -> None:
    slot = Slot(spec(4, 4))
    assert (slot.owner, slot.generation) == (None, 0)
    assert slot.claim(W) == 1
    slot.check(W, 1)
    assert slot.claim(V) == 2
    slot.check(V, 2)


def test_a_stale_read_names_both_owners_and_generations() -> None:
    slot = Slot(spec(4, 4))
    generation = slot.claim(W)
    slot.claim(V)
    with pytest.raises(StaleWeightError) as error:
        slot.check(W, generation)
    message = str(error.value)
    assert "layers.0.weight reads its gathered weight (generation 1)" in message
    assert "now holds layers.2.weight (generation 2)" in message
    assert "gather it again where it is used" in message


def test_the_owners_own_older_generation_is_stale_too() -> None:
    slot = Slot(spec(4, 4))
    generation = slot.claim(W)
    slot.claim(W)
    with pytest.raises(StaleWeightError, match=r"generation 1.*generation 2"):
        slot.check(W, generation)


def test_a_claim_stops_autograd_from_reading_what_was_there() -> None:
    slot = Slot(spec(4, 4))
    slot.claim(W)
    gathered = slot.buffers[0].detach()
    gathered.normal_()
    x = torch.randn(2, 4, requires_grad=True)
    y = (x @ gathered.requires_grad_()).sum()
    slot.claim(V)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_slots_allocated_in_inference_mode_serve_training() -> None:
    slot = Slot(spec(4, 4))
    with torch.inference_mode():
        slot.claim(W)
        assert not slot.buffers[0].is_inference()
    x = torch.randn(2, 4, requires_grad=True)
    (x @ slot.buffers[0].detach().normal_()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("slots", [0, -1])
def test_a_cache_without_slots_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"slots_per_shape is {slots}; a gather needs at least one"):
        BufferCache(slots, 0)
