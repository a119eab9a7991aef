"""Flags that ranks raise for each other: how many operations on them are kept. That they work is shown on GPUs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etp.collectives import symmetric
from etp.collectives.driver import MemoryOperations
from etp.collectives.symmetric import Signals


class Buffer:
    """Words of one rank of two, at made-up addresses."""

    addresses = (0x1000, 0x2000)
    """Of each rank."""

    def __init__(self, *_: Any) -> None:
        pass


class Driver:
    """Keeps the words that were to be written or waited for, by address."""

    def __init__(self) -> None:
        self.enqueued: list[MemoryOperations] = []

    def enqueue(self, operations: MemoryOperations, stream: int) -> None:
        del stream
        self.enqueued.append(operations)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Signals:
    monkeypatch.setattr(symmetric, "SymmetricBuffer", Buffer)
    monkeypatch.setattr(symmetric, "_MOST_OPERATIONS", 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    driver: Any = Driver()
    group: Any = object()
    return Signals(group, 3, torch.device("cpu"), driver, raised=())


def test_operations_are_made_once_and_do_not_pile_up(signals: Signals) -> None:
    driver: Any = signals._driver
    for _ in range(3):
        signals.send(1, 0, 7)
        signals.receive(1, 0, 7)
        signals.exchange(1, 0, 7)
    assert len(set(map(id, driver.enqueued))) == 3
    sent, received, both = ([bytes(one) for one in operations.batch] for operations in driver.enqueued[:3])
    assert both == [*sent, *received]
    driver.enqueued.clear()
    before = _kept()
    for purpose in range(1, 100):
        signals.send(1, 0, purpose)
        signals.receive(1, 0, purpose)
        signals.exchange(1, 0, purpose)
        driver.enqueued.clear()
    assert _kept() - before <= 4


def test_ranks_that_do_not_find_each_other_are_told_what_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: Any) -> None:
        raise RuntimeError("Wait timeout")

    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", too_late)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 5])
    group: Any = object()
    with pytest.raises(RuntimeError, match=r"rank 5 .* ranks of \[4, 5\] .*Wait timeout.* same number .*'c10d'"):
        symmetric._rendezvous(torch.empty(0), group)


def test_no_cycle_keeps_them(signals: Signals) -> None:
    """Memory of the flags is freed with the last reference, not whenever the garbage collector comes."""
    signals.send(0, 0)
    gone = weakref.ref(signals._buffer)
    gc.disable()
    try:
        signals.__dict__.clear()
        assert gone() is None
    finally:
        gc.enable()


def _kept() -> int:
    return sum(type(each) is MemoryOperations for each in gc.get_objects())
