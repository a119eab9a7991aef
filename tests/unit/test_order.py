"""The order of collectives of ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etp.collectives import order, works
from etp.collectives.order import CollectiveOrder
from etp.errors import PeerMismatchError


class Meeting:
    """What the collectives of ``size`` threads exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._given: dict[int, Any] = {}
        self._own = threading.local()

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    @rank.setter
    def rank(self, rank: int) -> None:
        self._own.rank = rank

    def exchange(self, value: Any) -> list[Any]:
        self._barrier.wait()
        self._given[self._own.rank] = value
        self._barrier.wait()
        return [self._given[rank] for rank in range(self.size)]


class _Done:
    def wait(self, *_: Any) -> None:
        pass


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    meeting = Meeting(3)

    def all_gather(output: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool) -> _Done:
        assert async_op
        output.copy_(torch.cat(meeting.exchange(own.clone())))
        return _Done()

    monkeypatch.setattr(works, "all_gather_single", all_gather)
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _group: store)
    monkeypatch.setattr(dist, "get_rank", lambda _group: meeting.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda _group: meeting.size)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [4, 6, 9])
    return meeting


def outcomes(meeting: Meeting, names: Sequence[Sequence[Sequence[str]]], silent: int | None = None) -> list[list[str]]:
    """For each rank what comparing each of its lists of names raises; rank ``silent`` does not look at any answer."""
    found: list[list[str]] = [[] for _ in range(meeting.size)]

    def run(rank: int) -> None:
        meeting.rank = rank
        compared = CollectiveOrder(object(), torch.device("cpu"), None)  # type: ignore[arg-type]
        for round_ in names[rank]:
            for name in round_:
                compared.record(name)
            compared.exchange()
            assert not compared.names
            if rank != silent:
                found[rank].append(_raised(compared.verify))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(meeting.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def _raised(call: Callable[[], None]) -> str:
    try:
        call()
    except PeerMismatchError as error:
        return str(error)
    return ""


def test_only_a_round_that_differs_is_refused(meeting: Meeting) -> None:
    alike = ["a", "b", "c"]
    names = [[alike, alike, alike], [alike, ["a", "c", "c"], alike], [alike, alike, alike]]
    for before, differs, after in outcomes(meeting, names):
        assert before == after == ""
        assert "number 2 was the b on rank 4 and the c on rank 6" in differs


def test_names_do_not_run_into_each_other(meeting: Meeting) -> None:
    for (differs,) in outcomes(meeting, [[["ab", "c"]], [["a", "bc"]], [["ab", "c"]]]):
        assert "number 1 was the ab on rank 4 and the a on rank 6" in differs


def test_a_rank_with_fewer_collectives_is_named(meeting: Meeting) -> None:
    for (differs,) in outcomes(meeting, [[["a", "b"]], [["a", "b"]], [["a"]]]):
        assert "number 2 was the b on rank 4 and the no collective on rank 9" in differs


def test_differences_before_the_names_that_were_kept(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MOST_NAMES", 3)
    alike, late = ["a", "b", "c", "d", "e"], ["a", "b", "c", "x", "e"]
    for (differs,) in outcomes(meeting, [[alike], [late], [alike]]):
        assert "number 4 was the d on rank 4 and the x on rank 6" in differs
    for (differs,) in outcomes(meeting, [[alike], [["y", *alike[1:]]], [alike]]):
        assert "they differ before the names that were kept" in differs


def test_what_a_graph_captures_is_not_recorded(meeting: Meeting) -> None:
    compared = CollectiveOrder(object(), torch.device("cpu"), None)  # type: ignore[arg-type]
    compared.recording = False
    compared.record("a")
    assert not compared.names
    compared.recording = True
    compared.record("a")
    assert compared.names
    compared.verify()  # nothing was exchanged yet


def test_a_rank_that_does_not_tell_its_names_is_not_waited_for(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_PATIENCE_S", 0.2)
    (first,), (second,), nothing = outcomes(meeting, [[["a", "b"]], [["a", "c"]], [["a", "b"]]], silent=2)
    assert not nothing
    for differs in (first, second):
        assert "number 1 was the a on rank 4 and the no collective on rank 9" in differs
