"""The gather cache: who shares a slot with whom, what stays at its address, and which reads are refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etp.cache import BufferCache, BufferSpec, Slot, Ticket
from etp.errors import EtpStateError, StaleWeightError

CPU = torch.device("cpu")


@dataclass
class Weight:
    """An owner of slots."""

    name: str
    pending: bool = False

    def abandon_gather(self) -> None:
        """No gather is ever pending."""


W, V = Weight("layers.0.weight"), Weight("layers.2.weight")


def spec(*shape: int, dtype: torch.dtype = torch.float32, count: int = 1) -> BufferSpec:
    return BufferSpec(shape, dtype, CPU, count)


ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_bytes_follow_the_dtypes_own_size(dtype: torch.dtype) -> None:
    assert BufferSpec((6, 4), dtype, CPU).nbytes == 24 * dtype.itemsize


def test_groups_of_one_shape_take_slots_in_turn() -> None:
    cache = BufferCache(slots_per_shape=2, resident_bytes=0)
    slots = [cache.get(cache.reserve(spec(8, 4))) for _ in range(5)]
    assert slots[0] is slots[2] is slots[4]
    assert slots[1] is slots[3]
    assert slots[0] is not slots[1]


def test_other_shapes_and_dtypes_have_slots_of_their_own() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    specs = [spec(8, 4), spec(4, 8), spec(8, 4, dtype=torch.bfloat16), spec(8, 4, count=2)]
    assert len({id(cache.get(cache.reserve(each))) for each in specs}) == 4


def test_storage_comes_at_first_use_and_is_counted() -> None:
    cache = BufferCache(slots_per_shape=2, resident_bytes=0)
    tickets = [cache.reserve(spec(8, 4)) for _ in range(3)]
    assert cache.nbytes() == 0
    (buffer,) = cache.get(tickets[0]).buffers
    assert (tuple(buffer.shape), buffer.dtype, buffer.device) == ((8, 4), torch.float32, CPU)
    assert cache.nbytes() == 8 * 4 * 4
    assert cache.get(tickets[2]).buffers[0] is buffer
    assert cache.get(tickets[1]).buffers[0].data_ptr() != buffer.data_ptr()
    assert cache.nbytes() == 2 * 8 * 4 * 4


def test_the_resident_budget_buys_slots_of_their_own_in_order_of_reservation() -> None:
    nbytes = 8 * 4 * 4
    cache = BufferCache(slots_per_shape=1, resident_bytes=2 * nbytes + nbytes // 2)
    tickets = [cache.reserve(spec(8, 4)) for _ in range(4)]
    assert [ticket.dedicated for ticket in tickets] == [True, True, False, False]
    assert len({id(cache.get(ticket)) for ticket in tickets}) == 3
    small = cache.reserve(spec(4, 4))  # what is left still buys a smaller one
    assert small.dedicated
    for slot in cache.slots():
        assert slot.buffers
    assert cache.nbytes() == 2 * nbytes + nbytes // 2 + nbytes


def test_an_address_is_the_same_for_the_life_of_its_ticket() -> None:
    cache = BufferCache(slots_per_shape=2, resident_bytes=0)
    ticket = cache.reserve(spec(8, 4))
    slot = cache.get(ticket)
    address = slot.buffers[0].data_ptr()
    for round_number in range(5):
        cache.reserve(spec(8, 4))
        slot.claim(Weight(f"weight {round_number}"))
        assert cache.get(ticket) is slot
        assert cache.get(ticket).buffers[0].data_ptr() == address


def test_clear_frees_storage_voids_content_and_keeps_tickets() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=64)
    tickets = [cache.reserve(spec(4, 4)), cache.reserve(spec(4, 4))]
    generations = [cache.get(ticket).claim(W) for ticket in tickets]
    slots = [cache.get(ticket) for ticket in tickets]
    cache.clear()
    assert cache.nbytes() == 0
    for ticket, slot, generation in zip(tickets, slots, generations, strict=True):
        assert cache.get(ticket) is slot
        with pytest.raises(StaleWeightError):
            slot.check(W, generation)
        assert slot.claim(W) > generation
        slot.check(W, slot.generation)


def test_a_returned_ticket_is_refused() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    ticket = cache.reserve(spec(4, 4))
    cache.unreserve(ticket)
    with pytest.raises(EtpStateError, match="this ticket was returned or belongs to another cache"):
        cache.get(ticket)
    with pytest.raises(EtpStateError, match="this ticket was returned"):
        cache.unreserve(ticket)


def test_a_ticket_of_another_cache_is_refused() -> None:
    ticket = BufferCache(1, 0).reserve(spec(4, 4))
    with pytest.raises(EtpStateError, match="belongs to another cache"):
        BufferCache(1, 0).get(ticket)


def test_a_returned_dedicated_slot_gives_its_budget_back() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=64)
    ticket = cache.reserve(spec(4, 4))
    assert ticket.dedicated
    assert cache.get(ticket).buffers
    cache.unreserve(ticket)
    assert cache.nbytes() == 0
    assert cache.reserve(spec(4, 4)).dedicated


def test_a_shared_slot_lives_until_its_last_ticket_is_returned() -> None:
    cache = BufferCache(slots_per_shape=1, resident_bytes=0)
    first, second = cache.reserve(spec(4, 4)), cache.reserve(spec(4, 4))
    slot = cache.get(first)
    assert slot.buffers
    cache.unreserve(first)
    assert cache.get(second) is slot
    assert slot.allocated
    cache.unreserve(second)
    assert not slot.allocated
    assert cache.slots() == []


def test_slots_are_reused_after_any_of_them_was_given_up() -> None:
    """Round-robin by a count of reservations would run past the end of a list that shrank."""
    cache = BufferCache(slots_per_shape=3, resident_bytes=0)
    tickets = [cache.reserve(spec(4, 4)) for _ in range(5)]
    for index in (0, 1, 3, 4):
        cache.unreserve(tickets[index])
    fresh = [cache.reserve(spec(4, 4)) for _ in range(5)]
    slots = [cache.get(ticket) for ticket in (tickets[2], *fresh)]
    assert len({id(slot) for slot in slots}) == 3
    assert sorted(slots.count(slot) for slot in set(slots)) == [2, 2, 2]


@given(st.integers(1, 4), st.lists(st.integers(0, 30), max_size=40))
def test_any_sequence_of_reserving_and_returning_keeps_slots_balanced(per_shape: int, moves: list[int]) -> None:
    """Even moves reserve; odd moves return some ticket. No slot is ever crowded while another stands empty."""
    cache = BufferCache(per_shape, resident_bytes=0)
    held: list[Ticket] = []
    for move in moves:
        if move % 2 == 0 or not held:
            held.append(cache.reserve(spec(2, 2)))
        else:
            cache.unreserve(held.pop(move % len(held)))
        used = {id(cache.get(ticket)) for ticket in held}
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
